"""Layers with weights in block fp8 whose products take rows in fp8, too."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from dcpmla import MLAAttention
from dcpmla.attention.output import ops as output_ops
from dcpmla.attention.output.formats import OutputQuant
from dcpmla.parallel.fp8 import quantize_rows
from dcpmla.parallel.quantized import NormedRows, QuantizedRows
from tests.attention.test_compile import DECODES, MIXED, PREFILL, run_layer
from tests.attention.test_output_formats import codes
from tests.parallel.test_fp8_linear import quantized
from tests.support.fp8_layers import CONFIG, TOLERANCE, checkpoint, layers
from tests.support.ranks import on_ranks


@on_ranks(1)
def test_quantized_output() -> None:
    """Check that o_proj is handed quantized rows in decodes, prefills and mixed batches; zeros without a step."""
    layer, _ = layers(CONFIG, 1)
    taken = []
    layer.o_proj.register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0]))
    for batch in (MIXED, DECODES[0], PREFILL):
        plain, _ = run_layer(layer, batch)
        layer.o_proj.takes_quantized = True
        got, _ = run_layer(layer, batch)
        attended, _ = run_layer(layer, batch, layer.heads_output)
        layer.o_proj.takes_quantized = False
        assert isinstance(taken[-1], QuantizedRows)
        values, scales = output_ops.quantize_output(attended, OutputQuant("fp8_groups", scale_layout="tma"))
        assert torch.equal(codes(taken[-1].values[: len(values)]), codes(values))
        assert torch.equal(taken[-1].scales[: len(values)], scales)
        assert (got - plain).norm() < TOLERANCE * plain.norm()
        assert not torch.equal(got, plain)
    hidden = torch.zeros(5, 256)
    assert torch.equal(layer(hidden, None, None), layer.o_proj.bias.expand(5, -1))
    assert torch.equal(layer.partial(hidden, None, None), layer.o_proj.bias.expand(5, -1))
    rows = layer.heads_output(hidden, None, None, OutputQuant("fp8_groups"))
    assert isinstance(rows, QuantizedRows)
    assert rows.values.shape == (5, 512)
    assert not codes(rows.values).any()


@pytest.mark.parametrize("headroom", [1.0, 1.7])
@on_ranks(1)
def test_output_with_a_static_scale(headroom: float) -> None:
    """Compare o_proj of rows in fp8 with a static scale with a product of their values in float64."""
    layer, plain = layers(CONFIG, 1)
    batches = MIXED, DECODES[0], PREFILL
    scale = headroom * max(float(run_layer(layer, batch, layer.heads_output)[0].abs().max()) for batch in batches) / 448
    layer = MLAAttention(CONFIG, layer._placement).eval()
    layer.load_weights({**checkpoint(CONFIG), "o_proj.input_scale": torch.tensor(scale)})
    layer.o_proj.takes_quantized = True
    taken: list[Any] = []
    layer.o_proj.register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0]))
    for batch in batches:
        out, _ = run_layer(layer, batch)
        attended, _ = run_layer(layer, batch, layer.heads_output)
        assert taken[-1].scales is layer.o_proj.input_scale
        scale = layer.o_proj.input_scale.double()
        rounded = (attended.double() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale
        weight, bias = plain.o_proj.weight.double(), plain.o_proj.bias.double()
        reference = torch.nn.functional.linear(rounded, weight, bias)
        # `fp8` multiplies by the rounded inverse of the scale, which may give the other neighbour of a tie.
        assert (out.double() - reference).norm() < 1e-3 * reference.norm()
        exact = torch.nn.functional.linear(attended.double(), weight, bias)
        assert (out.double() - exact).norm() < TOLERANCE * exact.norm()


def round_rows(plain: MLAAttention) -> None:
    """Have a layer's products take rows as fp8 rounds them, from now on."""

    def rounded(x: Tensor) -> Tensor:
        values, scales = quantized(x)
        return (values.float().unflatten(1, (-1, 128)) * scales[..., None]).flatten(1).to(x.dtype)

    plain.fused_qkv_a_proj.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))
    for linear in (plain.q_b_proj, plain.o_proj):
        product = linear.product
        linear.product = lambda x, rows=slice(None), product=product: product(rounded(x), rows)


@on_ranks(1)
def test_given_codes() -> None:
    """Hand over hidden states with their codes, as a norm before the layer gives them."""
    in_fp8, plain = layers(CONFIG, 1)
    round_rows(plain)
    assert not in_fp8.takes_quantized
    for linear in (in_fp8.fused_qkv_a_proj, in_fp8.q_b_proj, in_fp8.o_proj):
        linear.takes_quantized = True
    assert in_fp8.takes_quantized

    def give_codes(hidden_states: Tensor, *rest: Any) -> Tensor:
        return in_fp8(NormedRows(hidden_states * torch.nan, quantize_rows(hidden_states)), *rest)

    for batch in (MIXED, DECODES[0], PREFILL):
        for got, wanted in zip(run_layer(in_fp8, batch, give_codes), run_layer(plain, batch), strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-3, rtol=1e-3)


@pytest.mark.gpu
@on_ranks(1, device="cuda")
def test_on_a_gpu() -> None:
    """Compare with rows rounded alike. Where those differ in bfloat16's last bit, so do some of their codes, which
    moves results by 2 to 4 %; rows that are not rounded would move them by 9 %.
    """
    config = dataclasses.replace(CONFIG, num_heads=8, kv_lora_rank=512)
    for options in ({}, {"dcp_project_before_merge": True}):
        in_fp8, plain = layers(config, 1, "cuda", torch.bfloat16, **options)
        assert in_fp8.o_proj.takes_quantized
        assert in_fp8.takes_quantized
        round_rows(plain)
        for batch in (MIXED, DECODES[0], ((0, 300), (200, 131))):
            for got, wanted in zip(run_layer(in_fp8, batch), run_layer(plain, batch), strict=True):
                assert (got.float() - wanted.float()).norm() < 6e-2 * wanted.float().norm()
