"""Layers with weights in block fp8: on a CPU exactly the layers of the dequantized weights."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dcpmla import DCPConfig, MLAAttention, MLAConfig, Placement, init_mesh
from dcpmla.attention import layer as layer_module
from dcpmla.attention.compressed.layer import CompressedAttention
from dcpmla.attention.output import ops as output_ops
from dcpmla.attention.output.rows import OutputQuant
from dcpmla.attention.scales import OUTPUT_SCALE_NAMES, read_scale
from dcpmla.comm.select import select_exchange
from dcpmla.config import IndexerConfig
from dcpmla.integrations.families.table import attention_kind
from dcpmla.parallel.fp8 import NormedRows, QuantizedRows, quantize_rows
from dcpmla.parallel.linear import Linear
from dcpmla.parallel.quantized import BlockFp8, dequantize
from tests.attention.test_compile import DECODES, MIXED, PREFILL, Batch, run_layer
from tests.attention.test_compressed_layer import modules_of, tiny
from tests.attention.test_output_formats import codes
from tests.parallel.test_fp8_linear import blocks, quantized
from tests.support.layouts import dcp_config
from tests.support.ranks import run_ranks

CONFIG = MLAConfig(
    hidden_size=256,
    num_heads=4,
    q_lora_rank=256,
    kv_lora_rank=128,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    scale=192**-0.5,
    attention_bias=True,
)
# Rounding rows to e4m3 changes numbers by 2^-4 at most, and a norm by 2.5 %.
TOLERANCE = 4e-2
EXACT = 1e-12  # in float64: sums in another order, where memory lies otherwise


class Stored:
    """A matrix of a checkpoint in block fp8."""

    def __init__(self, weight: BlockFp8) -> None:
        self.weight, self.shape = weight, weight.codes.shape

    def __getitem__(self, index: Any) -> Tensor:
        return dequantize(self.weight, torch.float32)[index]

    def stored(self, rows: slice, cols: slice) -> BlockFp8 | Tensor:
        first, last = (
            [bound for bound, size in zip(bounds, self.shape, strict=True)]
            for bounds in zip(
                *(part.indices(size)[:2] for part, size in zip((rows, cols), self.shape, strict=True)), strict=True
            )
        )
        if any(
            start % 128 or (stop % 128 and stop < size)
            for start, stop, size in zip(first, last, self.shape, strict=True)
        ):
            return self[rows, cols]
        cuts = tuple(slice(start // 128, -(-stop // 128)) for start, stop in zip(first, last, strict=True))
        return BlockFp8(self.weight.codes[rows, cols], self.weight.scales[cuts])


def stored(weights: Mapping[str, Tensor], wide: tuple[str, ...] = ()) -> dict[str, Any]:
    """Replace matrices by random ones in block fp8, whose values have about the size of the former."""
    found: dict[str, Any] = dict(weights)
    for seed, (name, weight) in enumerate(weights.items()):
        if weight.ndim == 2 and not name.endswith(wide):
            made = blocks(*weight.shape, seed)
            found[name] = Stored(BlockFp8(made.codes, made.scales / 2 / weight.shape[1] ** 0.5))
    return found


def dequantized(weights: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: weight[:, :] if isinstance(weight, Stored) else weight for name, weight in weights.items()}


def checkpoint(config: MLAConfig) -> dict[str, Any]:
    """Make a whole layer's weights in block fp8, but for the indexer's weights_proj."""
    assert config.q_lora_rank is not None
    heads, kv_width = config.num_heads, config.qk_nope_head_dim + config.v_head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "q_a_proj.weight": (config.q_lora_rank, config.hidden_size),
        "kv_a_proj_with_mqa.weight": (config.latent_dim, config.hidden_size),
        "q_b_proj.weight": (heads * config.qk_head_dim, config.q_lora_rank),
        "kv_b_proj.weight": (heads * kv_width, config.kv_lora_rank),
        "o_proj.weight": (config.hidden_size, heads * config.v_head_dim),
        "q_a_layernorm.weight": (config.q_lora_rank,),
        "kv_a_layernorm.weight": (config.kv_lora_rank,),
        "q_a_proj.bias": (config.q_lora_rank,),
        "kv_a_proj_with_mqa.bias": (config.latent_dim,),
        "o_proj.bias": (config.hidden_size,),
    }
    if config.indexer is not None:
        width, index_heads = config.indexer.head_dim, config.indexer.num_heads
        shapes |= {
            "indexer.wq_b.weight": (index_heads * width, config.q_lora_rank),
            "indexer.wk.weight": (width, config.hidden_size),
            "indexer.weights_proj.weight": (index_heads, config.hidden_size),
            "indexer.k_norm.weight": (width,),
            "indexer.k_norm.bias": (width,),
        }
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return stored(weights, wide=("weights_proj.weight",))


def layers(
    config: MLAConfig, size: int, device: str = "cpu", dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[MLAAttention, MLAAttention]:
    """Return a layer in fp8, and one of the dequantized weights."""
    dcp = dcp_config(
        size,
        size,
        dcp_comm_backend="ag_rs" if dtype == torch.float64 else "auto",
        block_size=64 if device == "cuda" else 4,
        **options,
    )
    mesh, weights = init_mesh(size, size), checkpoint(config)
    exchange = select_exchange(dcp, mesh.dcp_group, device).exchange
    placement = Placement(dcp, mesh, exchange, dtype, device)
    both = [MLAAttention(config, placement).eval() for _ in range(2)]
    both[0].load_weights(weights)
    both[1].load_weights(dequantized(weights))
    return both[0], both[1]


def assert_equal_weights(in_fp8: nn.Module, plain: nn.Module, kept: set[str]) -> None:
    """Compare values, and which linear layers hold codes."""
    for name, module in plain.named_modules():
        if isinstance(module, Linear):
            mine = in_fp8.get_submodule(name)
            assert isinstance(mine, Linear)
            assert (mine.weight_scale is not None) == (name in kept), name
            weight = mine.weight if mine.weight_scale is None else BlockFp8(mine.weight, mine.weight_scale)
            assert torch.equal(dequantize(weight, module.weight.dtype), module.weight)


def check_layers(size: int, batches: tuple[Batch, ...]) -> None:
    """Compare outputs and caches, with each option that changes which heads a rank holds."""
    layer_module.PROJECT_FIRST_TOKENS = 1
    for q_replicate, project_first in ((False, False), (True, False), (False, True)):
        options = {"dcp_q_replicate": q_replicate, "dcp_project_before_merge": project_first}
        in_fp8, plain = layers(CONFIG, size, dtype=torch.float64, **options)
        assert_equal_weights(in_fp8, plain, {"fused_qkv_a_proj", "q_b_proj", "kv_b_proj", "o_proj"})
        for batch in batches:
            for got, wanted in zip(run_layer(in_fp8, batch), run_layer(plain, batch), strict=True):
                torch.testing.assert_close(got, wanted, rtol=0, atol=EXACT)


@pytest.mark.parametrize("size", [1, 2])
def test_layers_are_those_of_dequantized_weights(size: int) -> None:
    run_ranks(size, check_layers, size, (MIXED, DECODES[0], PREFILL))


def check_uneven() -> None:
    """Compare heads whose parts share blocks, and an indexer, whose wk lies beside a wide weight."""
    indexer = IndexerConfig(num_heads=4, head_dim=128, topk=8, rope_interleaved=False)
    config = dataclasses.replace(CONFIG, num_heads=2, qk_nope_head_dim=64, v_head_dim=192, indexer=indexer)
    in_fp8, plain = layers(config, 1, dtype=torch.float64)
    kept = {"fused_qkv_a_proj", "q_b_proj", "o_proj", "indexer.wq_b"}
    assert_equal_weights(in_fp8, plain, kept)
    for got, wanted in zip(run_layer(in_fp8, MIXED), run_layer(plain, MIXED), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=EXACT)


def test_blocks_that_heads_share() -> None:
    run_ranks(1, check_uneven)


def check_quantized_output() -> None:
    """Check that o_proj is handed quantized rows in decodes, prefills and mixed batches; zeros without a step."""
    layer, _ = layers(CONFIG, 1)
    taken = []
    layer.o_proj.register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0]))
    for batch in (MIXED, DECODES[0], PREFILL):
        plain, _ = run_layer(layer, batch)
        layer.o_proj.takes_quantized = True
        got, _ = run_layer(layer, batch)
        attended, _ = run_layer(layer, batch, layer.attend)
        layer.o_proj.takes_quantized = False
        assert isinstance(taken[-1], QuantizedRows)
        values, scales = output_ops.quantize_fp8_groups(attended, 128, "tma", False)
        assert torch.equal(codes(taken[-1].values[: len(values)]), codes(values))
        assert torch.equal(taken[-1].scales[: len(values)], scales)
        assert (got - plain).norm() < TOLERANCE * plain.norm()
        assert not torch.equal(got, plain)
    hidden = torch.zeros(5, 256)
    assert torch.equal(layer(hidden, None, None), layer.o_proj.bias.expand(5, -1))
    assert torch.equal(layer.partial(hidden, None, None), layer.o_proj.bias.expand(5, -1))
    rows = layer.attend(hidden, None, None, OutputQuant(kind="fp8_groups"))
    assert isinstance(rows, QuantizedRows)
    assert rows.values.shape == (5, 512)
    assert not codes(rows.values).any()


def test_quantized_output() -> None:
    run_ranks(1, check_quantized_output)


def check_static_output(headroom: float) -> None:
    """Compare o_proj of rows in fp8 with a static scale with a product of their values in float64."""
    layer, plain = layers(CONFIG, 1)
    batches = MIXED, DECODES[0], PREFILL
    scale = headroom * max(float(run_layer(layer, batch, layer.attend)[0].abs().max()) for batch in batches) / 448
    layer = MLAAttention(CONFIG, layer._placement).eval()
    layer.load_weights({**checkpoint(CONFIG), "o_proj.input_scale": torch.tensor(scale)})
    layer.o_proj.takes_quantized = True
    taken: list[Any] = []
    layer.o_proj.register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0]))
    for batch in batches:
        out, _ = run_layer(layer, batch)
        attended, _ = run_layer(layer, batch, layer.attend)
        assert taken[-1].scales is layer.o_proj.input_scale
        scale = layer.o_proj.input_scale.double()
        rounded = (attended.double() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale
        weight, bias = plain.o_proj.weight.double(), plain.o_proj.bias.double()
        reference = torch.nn.functional.linear(rounded, weight, bias)
        # `fp8` multiplies by the rounded inverse of the scale, which may give the other neighbour of a tie.
        assert (out.double() - reference).norm() < 1e-3 * reference.norm()
        exact = torch.nn.functional.linear(attended.double(), weight, bias)
        assert (out.double() - exact).norm() < TOLERANCE * exact.norm()


@pytest.mark.parametrize("headroom", [1.0, 1.7])
def test_output_with_a_static_scale(headroom: float) -> None:
    run_ranks(1, check_static_output, headroom)


@pytest.mark.parametrize("scale", [torch.ones(2), torch.tensor(0.0), torch.tensor(torch.inf), torch.tensor(torch.nan)])
def test_static_scales_that_are_none(scale: Tensor) -> None:
    message = "tensor o_proj.input_scale (has shape|is .*; it must be a finite number above 0)"
    with pytest.raises(ValueError, match=message):
        read_scale({"o_proj.input_scale": scale}, OUTPUT_SCALE_NAMES)


def check_compressed() -> None:
    """Compare the weights of DeepSeek-V4's layers, and what an output in groups gives after them."""
    sizes = {"num_attention_heads": 4, "o_groups": 2, "index_n_heads": 4, "index_head_dim": 64, "hidden_size": 128}
    hf_config = tiny(**sizes, head_dim=128, q_lora_rank=128, o_lora_rank=128)
    config, dcp, mesh = attention_kind(hf_config).config, DCPConfig(block_size=16), init_mesh(1, 1)
    exchange = select_exchange(dcp, mesh.dcp_group, "cpu").exchange
    wide = (
        "gate_proj.weight",
        "weights_proj.weight",
        "position_bias",
        "compressor.kv_proj.weight",
        "indexer.kv_proj.weight",
    )
    placement = Placement(dcp, mesh, exchange, torch.float32, "cpu")
    for module, kind in zip(modules_of(hf_config), config.layer_kinds, strict=True):
        weights = stored(module.state_dict(), wide)
        both = []
        for found in (weights, dequantized(weights)):
            layer = CompressedAttention(config, kind, placement)
            layer.load_weights(found)
            both.append(layer)
        kept = {"q_b_proj", "o_a_proj", "o_b_proj", "index_q_proj"} | (set() if kind.ratio else {"down_proj"})
        assert_equal_weights(*both, kept)
        out, lse, cos_sin = torch.randn(3, 4, 128), torch.randn(3, 4), torch.randn(3, 8)
        plain = both[0].finish(out, lse, cos_sin, 5)
        assert torch.equal(plain, both[1].finish(out, lse, cos_sin, 5))
        both[0].o_a_proj.takes_quantized = True
        got = both[0].finish(out, lse, cos_sin, 5)
        assert (got - plain).norm() < TOLERANCE * plain.norm()
        assert not torch.equal(got, plain)
        assert torch.equal(both[0].attend(torch.zeros(5, 128), None, None), torch.zeros(5, 256))


def test_compressed_layers() -> None:
    run_ranks(1, check_compressed)


def round_rows(plain: MLAAttention) -> None:
    """Have a layer's products take rows as fp8 rounds them, from now on."""

    def rounded(x: Tensor) -> Tensor:
        values, scales = quantized(x)
        return (values.float().unflatten(1, (-1, 128)) * scales[..., None]).flatten(1).to(x.dtype)

    plain.fused_qkv_a_proj.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))
    for linear in (plain.q_b_proj, plain.o_proj):
        product = linear.product
        linear.product = lambda x, rows=slice(None), product=product: product(rounded(x), rows)


def check_given_codes() -> None:
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


def test_given_codes() -> None:
    run_ranks(1, check_given_codes)


def check_on_a_gpu() -> None:
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


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    run_ranks(1, check_on_a_gpu, device="cuda")
