"""Multi-head Latent Attention with the latent KV cache sharded over the GPUs of a tensor-parallel group (decode context
parallelism).
"""

from dcpmla.attention.decode import dcp_mla_decode, mla_decode
from dcpmla.attention.layer import MLAAttention
from dcpmla.attention.prefill import dcp_mla_prefill
from dcpmla.attention.step import StepMetadata
from dcpmla.cache.latent import LatentCache
from dcpmla.config import DCPConfig, MLAConfig
from dcpmla.merge import merge_partials
from dcpmla.parallel.mesh import DCPMesh, init_mesh
from dcpmla.runtime.graph import DecodeGraph

__all__ = [
    "DCPConfig",
    "DCPMesh",
    "DecodeGraph",
    "LatentCache",
    "MLAAttention",
    "MLAConfig",
    "StepMetadata",
    "dcp_mla_decode",
    "dcp_mla_prefill",
    "init_mesh",
    "merge_partials",
    "mla_decode",
]
