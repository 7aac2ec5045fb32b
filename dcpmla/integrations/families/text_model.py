"""transformers' text model with a head, for families whose multimodal model alone has one."""

from typing import Any

from torch import nn


class TextModel(nn.Module):
    """A text model and the head over it, with the names that the multimodal model has for both.

    Args:
        config: Config of the text model.
        model: transformers' text model.
    """

    def __init__(self, config: Any, model: Any) -> None:
        super().__init__()
        self.config, self.model = config, model
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._keep_in_fp32_modules = model._keep_in_fp32_modules
        self._keep_in_fp32_modules_strict = model._keep_in_fp32_modules_strict
