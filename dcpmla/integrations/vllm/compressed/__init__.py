"""DeepSeek-V4 in vLLM: this package's attention in place of vLLM's, with decode context parallelism.

`register` puts a model class (`model`) and checks of options (`model_config`) into vLLM's registries. The model is
vLLM's own but for its attention layers (`attention`), which share one cache (`stack`) and one builder of metadata
(`backend`).
"""
