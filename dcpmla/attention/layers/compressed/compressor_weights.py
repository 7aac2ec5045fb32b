"""The weights of a compressor, without its projection, which is part of a layer's down-projection."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dcpmla.parallel.linear import Weight, fill, read_weight


class CompressorWeights(nn.Module):
    """The weights that pool tokens into entries [D].

    Attributes:
        bias: Bias of the gates; zeros in models that have none.
    """

    bias: Tensor

    def __init__(
        self, ratio: int, num_halves: int, width: int, device: torch.device | str, has_bias: bool = True
    ) -> None:
        super().__init__()
        bias = torch.zeros(ratio, num_halves * width, dtype=torch.float32, device=device)
        if has_bias:
            self.bias = nn.Parameter(bias)
        else:
            self.register_buffer("bias", bias, persistent=False)
        self.norm = nn.Parameter(torch.empty(width, dtype=torch.float32, device=device))

    def load_weights(self, weights: Mapping[str, Weight], prefix: str, order: Tensor | None = None) -> None:
        """Read bias and norm by their names in a checkpoint, columns of D in another order if one is given."""
        (ratio, columns), width = self.bias.shape, len(self.norm)
        order = torch.arange(width) if order is None else order
        if isinstance(self.bias, nn.Parameter):
            bias = read_weight(weights, f"{prefix}position_bias", (ratio, columns))
            fill(self.bias, bias.unflatten(1, (-1, width))[..., order].flatten(1))
        fill(self.norm, read_weight(weights, f"{prefix}kv_norm.weight", (width,))[order])
