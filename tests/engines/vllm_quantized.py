"""A quantization of vLLM's, "rounded": kv_b_proj in e4m3, under another name than that of a weight."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig


class RoundedLinear(LinearMethodBase):
    """A linear layer with weights in e4m3, scale 1."""

    create_weights = UnquantizedLinearMethod.create_weights

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.qweight = nn.Parameter(layer.weight.to(torch.float8_e4m3fn), requires_grad=False)
        del layer.weight

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, layer.qweight.to(x.dtype), bias)


@register_quantization_config("rounded")
class Rounded(QuantizationConfig):
    """A quantization of kv_b_proj alone, on any device."""

    def get_name(self) -> str:
        return "rounded"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Rounded":
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        if prefix.endswith("kv_b_proj"):
            return RoundedLinear()
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
