"""vLLM's attention backend for sparse MLA over pools of tokens, without positions (GLM-5-Next)."""

from typing import Any, ClassVar

from dcpmla.integrations.vllm.pooled.names import Indexer
from dcpmla.integrations.vllm.pooled.selection import PoolIndexBackend, install
from dcpmla.integrations.vllm.sparse.backend import DCPMLASparseBackend
from dcpmla.integrations.vllm.sparse.impl import DCPMLASparseImpl


class DCPMLAPooledBackend(DCPMLASparseBackend):
    """Properties that vLLM checks before it takes a backend. Rows of latents alone have no format of 8 bits here."""

    supported_kv_cache_dtypes: ClassVar = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "DCPMLA_POOLED"

    @staticmethod
    def get_impl_cls() -> type:
        return DCPMLAPooledImpl


class DCPMLAPooledImpl(DCPMLASparseImpl):
    """The attention to the tokens of selected pools."""

    indexer_class: ClassVar[Any] = Indexer
    index_backend: ClassVar[type] = PoolIndexBackend
    models: ClassVar = "GLM-5-Next"

    def install(self) -> None:
        """Make vLLM's layers select with this package."""
        install()
