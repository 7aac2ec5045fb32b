"""Gates of attention's output: each column is multiplied by the sigmoid of a logit, its own or its head's."""

import torch
from torch import Tensor

from dcpmla.operators import operator
from dcpmla.parallel.fp8 import rows_or_codes
from dcpmla.parallel.quantized import QuantizedRows, empty_rows


def apply_gates(out: Tensor, logits: Tensor, quantizes: bool = False) -> Tensor | QuantizedRows:
    """Return rows out [T, h V] times the sigmoids of logits [T, N]; a gate covers h V / N neighbouring columns.

    Gates are rounded to the dtype of out, as transformers' models round them.

    Args:
        quantizes: Whether to return `quantize_rows` of the result instead; h V must be a multiple of 128 then.
    Source: transformers' bailing_hybrid and hy_v4; vLLM's Kimi-K3.
    """
    rows, *codes = _apply_gates(out, logits, quantizes)
    return QuantizedRows(*codes) if quantizes else rows


@operator(
    "apply_gates",
    kernel="dcpmla.attention.triton.gates:apply_gates",
    fake=lambda out, _, quantizes: empty_rows(out, quantizes),
    runs=lambda out, *_: out.is_cuda and out.dtype != torch.float64,
)
def _apply_gates(out: Tensor, logits: Tensor, quantizes: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return `rows_or_codes` of the product."""
    gates = logits.to(torch.promote_types(logits.dtype, torch.float32)).sigmoid().to(out.dtype)
    return rows_or_codes((out.unflatten(1, (logits.shape[1], -1)) * gates[..., None]).flatten(1), quantizes)
