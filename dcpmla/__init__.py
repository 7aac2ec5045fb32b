"""Multi-head Latent Attention with the latent KV cache sharded over the GPUs of a tensor-parallel group (decode context
parallelism).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dcpmla.attention.backends.calls import DecodeCall
from dcpmla.attention.mla.decode import dcp_mla_decode, decode_call, mla_decode
from dcpmla.attention.mla.layer import MLAAttention
from dcpmla.attention.mla.prefill import dcp_mla_prefill
from dcpmla.attention.placement import Placement
from dcpmla.attention.step.metadata import StepBuilder, StepMetadata
from dcpmla.attention.step.table import StepRequests
from dcpmla.cache.latent import LatentCache
from dcpmla.comm.select import select_exchange
from dcpmla.config import DCPConfig, MLAConfig
from dcpmla.indexer_config import IndexerConfig
from dcpmla.merge import merge_partials
from dcpmla.parallel.mesh import DCPMesh, init_mesh

if TYPE_CHECKING:
    from dcpmla.integrations.engine_options import EngineOptions
    from dcpmla.integrations.external.latent import ExternalAttention, MLAModules
    from dcpmla.integrations.loading import load_engine
    from dcpmla.llm import LLM
    from dcpmla.runtime.engine import Engine
    from dcpmla.runtime.graph import StepGraph
    from dcpmla.runtime.sampling import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "DCPConfig",
    "DecodeCall",
    "DCPMesh",
    "StepGraph",
    "Engine",
    "EngineOptions",
    "ExternalAttention",
    "IndexerConfig",
    "LatentCache",
    "MLAAttention",
    "MLAConfig",
    "MLAModules",
    "Placement",
    "SamplingParams",
    "StepBuilder",
    "StepMetadata",
    "StepRequests",
    "dcp_mla_decode",
    "dcp_mla_prefill",
    "decode_call",
    "init_mesh",
    "load_engine",
    "merge_partials",
    "mla_decode",
    "select_exchange",
]
_RINGS = {  # modules of names beyond the core, which are imported on demand
    "StepGraph": "dcpmla.runtime.graph",
    "Engine": "dcpmla.runtime.engine",
    "EngineOptions": "dcpmla.integrations.engine_options",
    "ExternalAttention": "dcpmla.integrations.external.latent",
    "LLM": "dcpmla.llm",
    "MLAModules": "dcpmla.integrations.external.latent",
    "SamplingParams": "dcpmla.runtime.sampling",
    "load_engine": "dcpmla.integrations.loading",
}


def __getattr__(name: str) -> Any:
    if name not in _RINGS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dcpmla.extras import needed_by

    with needed_by(f"dcpmla.{name}"):
        return getattr(import_module(_RINGS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
