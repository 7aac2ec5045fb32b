"""The backend of a model. vLLM takes one path for all models, this module's attribute with the backend's name in vLLM,
and resolves it when it makes a layer.
"""

from vllm.config import get_current_vllm_config_or_none
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from dcpmla.integrations.vllm.backend import DCPMLABackend
from dcpmla.integrations.vllm.sparse.backend import DCPMLASparseBackend

SPARSE_MODELS = ("deepseek_v32", "glm_moe_dsa", "deepseek_mtp")  # MTP modules of both have the last model_type
POOLED_BACKEND = "dcpmla.integrations.vllm.pooled.backend.DCPMLAPooledBackend"
POOLED_MODELS = ("glm5_next_text", "glm5_next_mtp")


def __getattr__(name: str) -> type:
    """Return the package's backend for the current config's model.

    Other models with an indexer keep vLLM's backend, unless the user has asked for CUSTOM: its layers refuse them.
    """
    if name not in AttentionBackendEnum.__members__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    config = get_current_vllm_config_or_none()
    model = None if config is None or config.model_config is None else config.model_config.hf_text_config
    if not hasattr(model, "index_topk"):
        return DCPMLABackend
    kind = getattr(model, "model_type", None)
    path = AttentionBackendEnum[name].value
    if kind in POOLED_MODELS:
        path = POOLED_BACKEND  # The module imports vLLM's model, so it is named.
    elif name == "CUSTOM" or kind in SPARSE_MODELS:
        return DCPMLASparseBackend
    resolved: type = resolve_obj_by_qualname(path)
    return resolved
