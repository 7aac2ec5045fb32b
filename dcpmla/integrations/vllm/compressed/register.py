"""The registration of DeepSeek-V4, in each of vLLM's processes."""

ARCHITECTURE = "DeepseekV4ForCausalLM"
CLASSES = {
    ARCHITECTURE: "dcpmla.integrations.vllm.compressed.model:DCPMLADeepseekV4ForCausalLM",
    "DeepSeekV4MTPModel": "dcpmla.integrations.vllm.compressed.drafts:DCPMLADeepSeekV4MTP",
}


def register_model() -> None:
    """Register the model and its draft module, which vLLM imports when it loads one, and the checks of its options.

    vLLM calls this before it reads its options. Classes and checks leave a job as it is unless its options choose
    this package's attention (`options.is_chosen`).
    """
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from dcpmla.integrations.vllm.compressed.model_config import CompressedModelConfig

    for name, path in CLASSES.items():
        ModelRegistry.register_model(name, path)
    MODELS_CONFIG_MAP[ARCHITECTURE] = CompressedModelConfig
