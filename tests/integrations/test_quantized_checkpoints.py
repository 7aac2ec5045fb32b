"""Weights in 8 and 4 bits as they are published: the values read from them equal their dequantized twins."""

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dcpmla import DCPConfig, MLAAttention
from dcpmla.attention.output.rows import quant_for
from dcpmla.hf_quantization import check_quantization
from dcpmla.integrations.checkpoint import Checkpoint
from dcpmla.integrations.families.family import Family
from dcpmla.integrations.families.table import find_family
from dcpmla.integrations.quantization import StoredTensor
from dcpmla.model.moe import MoE
from dcpmla.parallel.formats import Quantized, dequantize, format_name, from_e8m0, is_block_fp8
from dcpmla.parallel.linear import Weight, read_linear, read_weight
from tests.planning.test_plan_truth import check as check_bytes
from tests.support.packers import pack_int4
from tests.support.quantized_models import SCHEMES, quantize, save_wide, write_dequantized, write_quantized
from tests.support.ranks import run_ranks
from tests.support.whole_models import load_on_rank

WHOLE, CUT = slice(None), slice(3, 101)
MLA_SCHEMES = [scheme for scheme in SCHEMES if not scheme.startswith("published")]
KEPT = (
    dict.fromkeys(
        ("block", "ue8m0", "e8m0", "bytes", "tensor", "modelopt", "compressed_tensor", "compressed_block"), "fp8"
    )
    | dict.fromkeys(("int4", "int4_all", "int4_asymmetric", "int4_channel", "awq", "gptq"), "int4")
    | {"mxfp4": "fp4", "e8m0_32": "mxfp8", "nvfp4": "nvfp4", "nvfp4_ct": "nvfp4"}
)


def open_checkpoint(directory: Path) -> Checkpoint:
    config = json.loads((directory / "config.json").read_text())
    rename = partial(find_family(config["model_type"]).module_name, num_layers=config["num_hidden_layers"])
    return Checkpoint(directory, config.get("quantization_config"), rename)


def make_pair(source: Path, directory: Path, scheme: str) -> tuple[dict[str, Weight], dict[str, Tensor]]:
    """Return the weights of a quantized checkpoint, and the tensors of its twin."""
    write_quantized(source, directory / "quantized", scheme)
    write_dequantized(source, directory / "twin", scheme)
    check_quantization(SCHEMES[scheme].config)
    weights, twin = (open_checkpoint(directory / name).weights("") for name in ("quantized", "twin"))
    more = ("input_scale", "layers.4.shared_head.norm.weight")  # the latter of multi-token prediction
    assert {name for name in weights if not name.endswith(more)} == set(twin)
    return dict(weights), {name: weight[WHOLE,] for name, weight in twin.items()}


@pytest.fixture(scope="module")
def v32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("v32")
    save_wide("deepseek_v32", directory)
    return directory


@pytest.mark.parametrize("scheme", MLA_SCHEMES)
def test_what_is_read_is_what_the_twin_holds(scheme: str, v32: Path, tmp_path: Path) -> None:
    weights, twin = make_pair(v32, tmp_path, scheme)
    kinds = set()
    for name, values in twin.items():
        shape = tuple(values.shape)
        assert torch.equal(read_weight(weights, name, shape), values)
        if len(shape) == 2:
            assert torch.equal(read_weight(weights, name, shape, CUT, CUT), values[CUT, CUT])
            whole = read_linear(weights, name, (shape[0], shape[1]))
            assert torch.equal(dequantize(whole, torch.float32), values)
            kinds |= {format_name(whole)} if not isinstance(weights[name], StoredTensor) else set()
    assert kinds == ({"int4", "fp8"} if scheme in ("mixed", "w4a8", "w4afp8") else {KEPT.get(scheme, "plain")})


KV_A = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"


@pytest.mark.parametrize(
    ("scheme", "name", "shape", "kept", "cut"),
    [
        (  # rows and columns at multiples of 128, or to the end of 192 rows; and no others
            "block",
            KV_A,
            (192, 256),
            [(slice(0, 128), WHOLE), (slice(128, 192), slice(128, 256)), (WHOLE, slice(0, 128))],
            [(slice(64, 192), WHOLE), (slice(0, 127), WHOLE), (WHOLE, slice(0, 96)), (WHOLE, slice(32, 256))],
        ),
        (  # columns at multiples of 32, any rows: each row has the scales of its block
            "e8m0_32",
            KV_A,
            (192, 256),
            [(slice(5, 71), slice(32, 224)), (WHOLE, slice(128, 256))],
            [(WHOLE, slice(16, 48))],
        ),
        (
            "int4_all",
            "model.layers.1.mlp.experts.1.up_proj.weight",
            (256, 256),
            [(slice(3, 7), WHOLE), (slice(3, 7), slice(32, 96))],
            [(slice(3, 7), slice(16, 64)), (slice(3, 7), slice(5, 9))],
        ),
    ],
)
def test_cuts_at_blocks_and_groups_keep_codes(
    scheme: str, name: str, shape: tuple[int, int], kept: list[Any], cut: list[Any], v32: Path, tmp_path: Path
) -> None:
    weights, twin = make_pair(v32, tmp_path, scheme)
    for rows, cols in (*kept, *cut):
        part = read_linear(weights, name, shape, rows, cols)
        assert format_name(part) == (KEPT[scheme] if (rows, cols) in kept else "plain")
        values = part if isinstance(part, Tensor) else dequantize(part, torch.float32)
        assert torch.equal(values, twin[name][rows, cols])
        if is_block_fp8(part):
            stored = load_file(tmp_path / "quantized" / "model.safetensors")[name]
            assert torch.equal(part.codes.view(torch.uint8), stored[rows, cols].view(torch.uint8))


def test_rows_with_scales_of_their_own(tmp_path: Path) -> None:
    """A table's scales are read in parts, whatever the config's block; a broken one is named."""
    values = torch.randn(70, 64)
    codes, scales = quantize(values, (1, 32), powers_of_two=True)
    exponents = scales.to(torch.float8_e8m0fnu)
    exponents.view(torch.uint8)[60, 1] = 255
    save_file({"a.weight": codes, "a.weight_scale_inv": exponents}, tmp_path / "model.safetensors")
    weights = Checkpoint(tmp_path, {"quant_method": "fp8", "weight_block_size": [32, 32]}).weights("")
    part = read_linear(weights, "a.weight", (70, 64), slice(3, 50))
    assert isinstance(part, Quantized)
    assert torch.equal(part.codes.float(), codes[3:50].float())
    assert torch.equal(from_e8m0(part.scales), scales[3:50])
    with pytest.raises(ValueError, match="tensor a.weight has a scale that is negative, infinite or NaN"):
        read_linear(weights, "a.weight", (70, 64))


def test_scales_are_read_once_and_codes_as_they_are_sliced(
    v32: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_quantized(v32, tmp_path, "block")
    read, get = [], StoredTensor.__getitem__
    monkeypatch.setattr(StoredTensor, "__getitem__", lambda self, index: read.append(get(self, index)) or read[-1])
    checkpoint, name = open_checkpoint(tmp_path), "model.layers.0.mlp.down_proj.weight"
    checkpoint.check_shapes({name: (256, 512)})
    weights = checkpoint.weights("")
    assert read == []
    for first in range(0, 512, 128):
        read_linear(weights, name, (256, 512), WHOLE, slice(first, first + 128))
    assert [tuple(part.shape) for part in read] == [(256, 128), (2, 4), *[(256, 128)] * 3]


def test_deepseek_v4_as_published(tmp_path: Path) -> None:
    save_wide("deepseek_v4", tmp_path / "saved")
    weights, twin = make_pair(tmp_path / "saved", tmp_path, "published")
    kinds: dict[str, str] = {}
    for name, values in twin.items():
        if not values.is_floating_point():
            assert torch.equal(weights[name][WHOLE,], values)
            continue
        shape = tuple(values.shape)
        assert torch.equal(read_weight(weights, name, shape), values)
        if len(shape) == 2:
            assert torch.equal(read_weight(weights, name, shape, slice(1, 3), slice(5, 50)), values[1:3, 5:50])
            for cols in (WHOLE, slice(128, 256), slice(32, 128), slice(3, 11)):
                part = read_linear(weights, name, (shape[0], shape[1]), WHOLE, cols)
                assert torch.equal(dequantize(part, torch.float32), values[:, cols])
                kinds[f"{name.split('layers.1.')[-1]} {cols.start}"] = format_name(part)
    expert, attention, gate = "mlp.experts.3.down_proj.weight", "self_attn.q_a_proj.weight", "mlp.gate.weight"
    assert [kinds[f"{expert} {first}"] for first in (None, 128, 32, 3)] == ["fp4", "fp4", "fp4", "plain"]
    assert [kinds[f"{attention} {first}"] for first in (None, 128, 32)] == ["fp8", "fp8", "plain"]
    assert kinds[f"{gate} None"] == "plain"


def check_input_scales(directory: Path) -> None:
    model, _ = load_on_rank(directory, DCPConfig(), dtype=torch.bfloat16)
    layers = [module for module in model.hidden_states.modules() if isinstance(module, MLAAttention)]
    for number, layer in enumerate(layers):
        assert quant_for(layer.o_proj, 128) is None  # a CPU multiplies rows as they are
        layer.o_proj.takes_quantized = True
        quant = quant_for(layer.o_proj, 128)
        assert quant is not None
        assert (quant.format, quant.scale) == ("fp8", layer.o_proj.input_scale)
        assert torch.equal(layer.o_proj.input_scale, torch.tensor([0.5 + number]))


def test_static_scales_of_the_output_projection(tmp_path: Path) -> None:
    """Each layer's, of checkpoints that were calibrated."""
    save_wide("deepseek_v3", tmp_path / "wide")
    write_quantized(tmp_path / "wide", tmp_path, "modelopt")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for number in range(sum(name.endswith("self_attn.o_proj.input_scale") for name in tensors)):
        tensors[f"model.layers.{number}.self_attn.o_proj.input_scale"] = torch.tensor(0.5 + number)
    save_file(tensors, file)
    run_ranks(1, check_input_scales, tmp_path)


def test_integers_are_packed_as_compressed_tensors_does(v32: Path, tmp_path: Path) -> None:
    """Its version 0.20 made these of -8 to 7, and of 7 to -8."""
    numbers = torch.arange(-8, 8).repeat(2, 1)
    numbers[1] = numbers[1].flip(0)
    packed = torch.tensor([[1985229328, -19088744], [-1985229329, 19088743]], dtype=torch.int32)
    assert torch.equal(pack_int4(numbers), packed)
    save_file(
        {"w.weight_packed": packed, "w.weight_scale": torch.tensor([[0.5], [3.0]])}, tmp_path / "model.safetensors"
    )
    weight = Checkpoint(tmp_path, rename=partial(Family().module_name, num_layers=4)).weights("")["w.weight"]
    for rows, cols in ((WHOLE, WHOLE), (slice(1, 2), slice(3, 11)), (WHOLE, slice(7, 8)), (WHOLE, slice(8, 16))):
        assert torch.equal(weight[rows, cols], (numbers * torch.tensor([[0.5], [3.0]]))[rows, cols])


def test_integers_with_scales_of_another_dtype_are_read_as_values(tmp_path: Path) -> None:
    tensors = {"w.weight_packed": torch.zeros(2, 8, dtype=torch.int32), "w.weight_scale": torch.rand(2, 2)}
    save_file(tensors, tmp_path / "model.safetensors")
    part = read_linear(
        Checkpoint(tmp_path, rename=partial(Family().module_name, num_layers=4)).weights(""), "w.weight", (2, 64)
    )
    assert torch.equal(part, -8 * tensors["w.weight_scale"].repeat_interleave(32, 1))


def warnings_on_rank(directory: Path, enable_expert_parallel: bool) -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dcpmla").addHandler(handler)
    dcp = DCPConfig(tensor_parallel_size=2, decode_context_parallel_size=2, block_size=4)
    model, _ = load_on_rank(directory, dcp, enable_expert_parallel=enable_expert_parallel)
    experts = [weight for moe in model.hidden_states.modules() if isinstance(moe, MoE) for weight in moe.experts]
    # The last expert is shared, and is not stored in 4 bits.
    num_bytes = sum(weight[:-1].nbytes for weight in experts if isinstance(weight, Tensor))
    return [f"{num_bytes:,} bytes", *messages]


@pytest.mark.parametrize("enable_expert_parallel", [False, True])
def test_cuts_through_groups_are_warned_of(enable_expert_parallel: bool, tmp_path: Path) -> None:
    """Of experts with 96 columns in groups of 32 each of two ranks has 48, as long as none has whole experts."""
    save_wide("deepseek_v3", tmp_path / "wide", moe_intermediate_size=96)
    write_quantized(tmp_path / "wide", tmp_path / "int4", "int4")
    of_first, of_second = run_ranks(2, warnings_on_rank, tmp_path / "int4", enable_expert_parallel)
    check_bytes([tmp_path / "int4"], 2)
    assert of_second[1:] == []
    if enable_expert_parallel:
        assert of_first == ["0 bytes"]
        return
    num_bytes, message = of_first
    assert message.startswith("tensor_parallel_size (-tp) 2 cuts through blocks or groups of quantized weights (model")
    assert "(model.layers.*.mlp.experts.down_proj, model.layers.*.mlp.experts.gate_up_proj)" in message
    assert f"in {num_bytes};" in message
