"""The backend of a model: `Backend` is the one for sparse MLA if the model's config asks for an indexer. vLLM takes one
path for all models, and resolves it when it makes a layer.
"""

from vllm.config import get_current_vllm_config_or_none

from dcpmla.integrations.vllm.backend import DCPMLABackend
from dcpmla.integrations.vllm.sparse.backend import DCPMLASparseBackend


def __getattr__(name: str) -> type:
    if name != "Backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    config = get_current_vllm_config_or_none()
    if config is None or config.model_config is None:
        return DCPMLABackend
    is_sparse = hasattr(config.model_config.hf_text_config, "index_topk")
    return DCPMLASparseBackend if is_sparse else DCPMLABackend
