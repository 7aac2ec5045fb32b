"""An engine's projections and weights as the modules that a layer calls and reads."""

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, nn

from dcpmla.parallel.linear import RowParallelLinear
from dcpmla.parallel.quantized import AnyRows, plain

Projection = Callable[[Tensor], Tensor]
Module = TypeVar("Module", bound=nn.Module)


class ExternalLinear(RowParallelLinear):
    """A linear layer that calls an engine's projection and holds no weight."""

    def __init__(self, projection: Projection) -> None:
        nn.Module.__init__(self)  # skips RowParallelLinear's constructor, which would make a weight
        self.projection, self.takes_quantized = projection, False

    def forward(self, x: AnyRows) -> Tensor:
        return self.projection(plain(x))

    def product(self, x: AnyRows, rows: slice = slice(None)) -> Tensor:
        """Return the columns of the projection's output that the given rows of its weight make."""
        return self.projection(plain(x))[..., rows]

    def partial(self, x: AnyRows) -> Tensor:
        """Return the projection's result; the engine decides whether it is summed over the TP ranks."""
        return self.projection(plain(x))


def external_parameters(module: Module, **weights: Tensor) -> Module:
    """Put an engine's weights, which are not copied, into a module in place of its parameters, and return it."""
    for name, weight in weights.items():
        setattr(module, name, nn.Parameter(weight, requires_grad=False))
    return module


def external_norm(weight: Tensor, eps: float) -> nn.RMSNorm:
    """Return a norm by an engine's weight."""
    return external_parameters(nn.RMSNorm(len(weight), eps, device="meta"), weight=weight)


def check_parts(parts: tuple[Tensor, ...], num_rows: int, widths: list[int]) -> None:
    """Raise ValueError unless an engine's down-projection returned parts [num_rows, width] with contiguous columns."""
    expected = [(num_rows, width) for width in widths]
    if [tuple(part.shape) for part in parts] != expected or any(part.stride(1) != 1 for part in parts):
        returned = [(tuple(part.shape), part.stride()) for part in parts]
        raise ValueError(f"down_proj returns shapes and strides {returned}; expected {expected}, columns of stride 1")
