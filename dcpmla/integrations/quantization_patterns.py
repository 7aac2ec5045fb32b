"""Patterns of quantizations in graphs of inductor: operators of `attention/output/ops.py`, and fp8 in plain torch."""

from collections.abc import Iterator

import torch
from torch._inductor.pattern_matcher import MULTIPLE, CallFunction, KeywordArg, PatternExpr

from dcpmla.attention.output import ops  # noqa: F401  registers the operators
from dcpmla.attention.output.formats import OutputQuant
from dcpmla.cache.formats import FP8, FP8_MAX

_aten, _prims, _ours = torch.ops.aten, torch.ops.prims, torch.ops.dcpmla


def all_patterns() -> Iterator[PatternExpr]:
    """Yield the patterns of quantizations by `OutputQuant`; `values` is the input, `shape` the shape of a reshape in
    between. Without `format` it is fp8.
    """
    values, (format_, *options) = KeywordArg("values"), map(KeywordArg, OutputQuant._fields)
    shaped, (scale, *_) = _reshape(values), options
    yield CallFunction(_ours.quantize_output.default, values, format_, *options)
    yield CallFunction(_ours.quantize_output.default, shaped, "fp8", *options)
    yield from _plain_fp8(values, shaped, scale)


def _plain_fp8(values: PatternExpr, shaped: PatternExpr, scale: PatternExpr) -> Iterator[PatternExpr]:
    """Yield all spellings of `(values.float() * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn)`, decomposed."""
    inverse = CallFunction(_aten.reciprocal.default, scale, _users=MULTIPLE)
    for one in (inverse, CallFunction(_aten.mul.Tensor, inverse, 1, _users=MULTIPLE)):  # scale.reciprocal(), 1 / scale
        for x in (
            values,
            shaped,
            _convert(values, torch.float32),
            _convert(shaped, torch.float32),
            _reshape(_convert(values, torch.float32)),
        ):
            for factors in ((x, one), (one, x)):
                product = CallFunction(_aten.mul.Tensor, *factors)
                below = CallFunction(_aten.clamp_max.default, product, FP8_MAX)
                above = CallFunction(_aten.clamp_min.default, product, -FP8_MAX)
                yield _convert(CallFunction(_aten.clamp_min.default, below, -FP8_MAX), FP8)
                yield _convert(CallFunction(_aten.clamp_max.default, above, FP8_MAX), FP8)


def _reshape(x: PatternExpr) -> PatternExpr:
    return CallFunction([_aten.reshape.default, _aten.view.default], x, KeywordArg("shape"))


def _convert(x: PatternExpr, dtype: torch.dtype) -> PatternExpr:
    return CallFunction(_prims.convert_element_type.default, x, dtype)
