"""Patterns of quantizations in graphs of inductor: operators of `attention/output/ops.py`, and fp8 in plain torch."""

from collections.abc import Iterator
from typing import Any

import torch
from torch._inductor.pattern_matcher import MULTIPLE, CallFunction, KeywordArg, PatternExpr

from dcpmla.attention.output import ops  # noqa: F401  registers the operators
from dcpmla.cache.formats import FP8, FP8_MAX

_aten, _prims, _ours = torch.ops.aten, torch.ops.prims, torch.ops.dcpmla


def all_patterns() -> Iterator[tuple[Any, PatternExpr]]:
    """Yield quantizations with their patterns; `values` is the input, `shape` the shape of a reshape in between."""
    values, scale = KeywordArg("values"), KeywordArg("scale")
    shaped = _reshape(values)
    groups = map(KeywordArg, ("group_size", "scale_layout", "ue8m0"))
    fp8, fp8_groups = _ours.quantize_fp8.default, _ours.quantize_fp8_groups.default
    nvfp4 = _ours.quantize_nvfp4.default
    yield fp8, CallFunction(fp8, values, scale)
    yield fp8, CallFunction(fp8, shaped, scale)
    yield fp8_groups, CallFunction(fp8_groups, values, *groups)
    yield nvfp4, CallFunction(nvfp4, values, KeywordArg("global_scale"))
    yield from ((fp8, pattern) for pattern in _plain_fp8(values, shaped, scale))


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
