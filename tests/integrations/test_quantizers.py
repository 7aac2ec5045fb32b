"""`OutputQuantFusion` on graphs with vLLM's quantizations: the calls that it rewrites, those that it leaves to vLLM."""

import logging
from collections.abc import Iterator, Sequence

import pytest
import torch
import torch._inductor.config
from torch import Tensor

from dcpmla.attention.output.formats import OutputQuant
from dcpmla.attention.output.ops import quantize_output
from tests.integrations.test_torch_compile import FP8, Layers, Quantize, V, assert_said, plain_fp8, run_layers

VLLM = {  # as vLLM 0.33 declares them
    "static_scaled_fp8_quant": "(Tensor! result, Tensor input, Tensor scale, int[]? group_shape=None) -> ()",
    "per_token_group_fp8_quant": "(Tensor input, Tensor! output_q, Tensor! output_s, int group_size, float eps, "
    "float fp8_min, float fp8_max, bool scale_ue8m0, bool dummy_is_scale_transposed, bool dummy_is_tma_aligned) -> ()",
    "scaled_fp4_quant": "(Tensor input, Tensor input_scale, bool is_sf_swizzled_layout) -> (Tensor, Tensor)",
    "scaled_fp4_quant.out": "(Tensor input, Tensor input_scale, bool is_sf_swizzled_layout, *, Tensor(a!) output, "
    "Tensor(b!) output_scale) -> ()",
}
_C = torch.ops._C


def vllm_static(result: Tensor, x: Tensor, scale: Tensor, group_shape: Sequence[int] | None = None) -> None:
    result[: len(x)] = plain_fp8(x, scale)


def vllm_groups(x: Tensor, q: Tensor, s: Tensor, group: int, eps: float, low: float, high: float, *how: bool) -> None:
    groups = x.float().unflatten(1, (-1, group))
    scales = groups.abs().amax(-1).clamp(min=eps) / high
    s.copy_(scales.log2().ceil().exp2() if how[0] else scales)
    q.copy_((groups / s[..., None]).clamp(low, high).flatten(1))


def vllm_nvfp4(x: Tensor, scale: Tensor, swizzled: bool) -> tuple[Tensor, Tensor]:
    values, scales = quantize_output(x, OutputQuant("nvfp4", scale))
    return values, scales.view(torch.int32)


def vllm_nvfp4_out(x: Tensor, scale: Tensor, swizzled: bool, *, output: Tensor, output_scale: Tensor) -> None:
    for into, result in zip((output, output_scale), vllm_nvfp4(x, scale, swizzled), strict=True):
        into.copy_(result)


@pytest.fixture(scope="module", autouse=True)
def vllm_operators() -> Iterator[None]:
    """Operators of vLLM's names and schemas, where vLLM has not registered its own."""
    with torch.library._scoped_library("_C", "FRAGMENT") as library:
        functions = (vllm_static, vllm_groups, vllm_nvfp4, vllm_nvfp4_out)
        for (name, schema), function in zip(VLLM.items(), functions, strict=True):
            library.define(name + schema)
            library.impl(name, function, "CompositeExplicitAutograd")
            returns = schema.endswith("(Tensor, Tensor)")
            torch.library.register_fake(
                f"_C::{name}", vllm_nvfp4 if returns else lambda *args, **how: None, lib=library
            )
        yield


def static_fp8(x: Tensor, scale: Tensor, group_shape: list[int] | None = None, padding: int = 0) -> list[Tensor]:
    new = torch.zeros if padding else torch.empty
    result = new(len(x) + padding, x.shape[1], dtype=FP8, device=x.device)
    _C.static_scaled_fp8_quant(result, x, scale, group_shape)
    return [result]


def fp8_groups(x: Tensor, group: int, ue8m0: bool, layout: str, smallest: float = 1e-10) -> list[Tensor]:
    """As vLLM's `per_token_group_quant_fp8` calls its operator."""
    num_rows, num_groups = len(x), x.shape[1] // group
    if layout == "row":
        scales = torch.empty(num_rows, num_groups, device=x.device)
    elif layout == "column":
        scales = torch.empty(num_groups, num_rows, device=x.device).permute(-1, -2)
    else:
        scales = torch.empty_strided((num_rows, num_groups), (1, (num_rows + 3) // 4 * 4), device=x.device)
    values, flags = torch.empty(x.shape, dtype=FP8, device=x.device), (layout != "row", layout == "tma")
    _C.per_token_group_fp8_quant(x, values, scales, group, smallest, -448.0, 448.0, ue8m0, *flags)
    return [values, scales]


def nvfp4(x: Tensor, scale: Tensor, swizzled: bool = True) -> list[Tensor]:
    """As vLLM's `scaled_fp4_quant` calls its operator."""
    num_rows, num_scales = (len(x) + 127) // 128 * 128, (x.shape[1] // 16 + 3) // 4 * 4
    values = torch.empty(len(x), x.shape[1] // 2, dtype=torch.uint8, device=x.device)
    scales = torch.empty(num_rows, num_scales // 4, dtype=torch.int32, device=x.device)
    _C.scaled_fp4_quant.out(x, scale, swizzled, output=values, output_scale=scales)
    return [values, scales.view(FP8)]


OF_VLLM: list[Quantize] = [
    static_fp8,
    lambda x, scale: static_fp8(x, scale.view(1, 1), [-1, -1]),
    lambda x, scale: static_fp8(x.view(-1, V), scale),
    *(
        lambda x, _, layout=layout, group=group: fp8_groups(x, group, group == 64, layout)
        for layout, group in (("row", 128), ("column", 64), ("column", 128), ("tma", 128), ("tma", 64))
    ),
    nvfp4,
    lambda x, scale: _C.scaled_fp4_quant(x, scale, True),
]
LEFT_TO_VLLM: list[Quantize] = [
    lambda x, scale: static_fp8(x, scale.expand(len(x), 1), [1, -1]),
    lambda x, scale: static_fp8(x, scale, padding=3),
    lambda x, scale: static_fp8(x[1:], scale),
    lambda x, _: fp8_groups(x, 128, False, "row", smallest=1e-5),
    lambda x, _: fp8_groups(x, 32, False, "row"),
    lambda x, scale: nvfp4(x, scale, swizzled=False),
    lambda x, scale: [*nvfp4(x, scale), x + 1],
]


@pytest.mark.parametrize(("version", "calls"), [(2, OF_VLLM), (1, OF_VLLM[:1] + OF_VLLM[4::5])])
def test_operators_of_vllm(version: int, calls: list[Quantize], caplog: pytest.LogCaptureFixture) -> None:
    """In both forms that torch gives to calls that write; vLLM asks for the first."""
    form = torch._inductor.config.patch(enable_auto_functionalized_v2=version == 2)
    with form, caplog.at_level(logging.INFO, "dcpmla"):
        assert run_layers(Layers(calls)) == {"project_quantized": len(calls)}
    assert_said(caplog, logging.INFO, f"in {len(calls)} of {len(calls)} layers")


def test_left_to_vllm(caplog: pytest.LogCaptureFixture) -> None:
    assert run_layers(Layers(LEFT_TO_VLLM)) == {"project_values": len(LEFT_TO_VLLM)}
    assert_said(caplog, logging.WARNING, "nothing to fuse in a graph with 7 layers")
