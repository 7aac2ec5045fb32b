"""The arguments of operators of decoder blocks."""

from typing import NamedTuple

from torch import Tensor

from dcpmla.model.glu import Glu
from dcpmla.parallel.quantized import QuantizedRows


class Sums(NamedTuple):
    """The residual of a step.

    Attributes:
        stored: The embedding and the sums of complete groups, the first `num_stored` of [B, T, hidden].
        num_stored: Number of stored sums.
        current: [T, hidden], the embedding before the first block, later the sum of a group's outputs; None before a
            group's first output.
        out: [T, hidden], an output that is not added to `current` yet; None for none.
    """

    stored: Tensor
    num_stored: int
    current: Tensor | None
    out: Tensor | None = None

    def add(self, out: Tensor) -> "Sums":
        """Return the sums with a part's output [T, hidden]."""
        return self._replace(current=out) if self.current is None else self._replace(out=out)


class RoutedRows(NamedTuple):
    """Rows, the experts that their router chose, and the weights of E experts (`model.experts`).

    Attributes:
        x: [T, H], bfloat16, float16 or float32.
        quantized: The same rows in fp8; None if they are not quantized yet.
        expert_ids: int32 [T, k]; ids outside [0, E) are ignored: other ranks' experts, LongCat's zero experts.
        expert_weights: float32 [T, k].
        gate_up, down: Weights [E, 2 I, H], [E, H, I] in the rows' dtype, or codes.
        gate_up_scales, down_scales: Scales of the codes; None for weights in the rows' dtype.
        gate_up_zeros, down_zeros, gate_up_factors, down_factors: The other fields of `Quantized`.
        num_experts: Number of experts over all ranks that share the routes. Kernels are chosen by it.
        is_few: Whether routes are not sorted by experts: each is a block of its own.
        is_deterministic: Whether a row's bits depend on no other row (`parallel.fixed`); not in 4 bits.
    """

    x: Tensor
    quantized: QuantizedRows | None
    expert_ids: Tensor
    expert_weights: Tensor
    gate_up: Tensor
    gate_up_scales: Tensor | None
    gate_up_zeros: Tensor | None
    gate_up_factors: Tensor | None
    down: Tensor
    down_scales: Tensor | None
    down_zeros: Tensor | None
    down_factors: Tensor | None
    glu: Glu
    num_experts: int
    is_few: bool
    is_deterministic: bool

    def new_result(self) -> Tensor:
        """Allocate the terms [T k, H], or their sums [T, H]: the second product adds few terms before it rounds."""
        adds = self.is_few and not self.is_deterministic
        return self.x.new_empty(self.x.shape if adds else (self.expert_ids.numel(), self.x.shape[1]))
