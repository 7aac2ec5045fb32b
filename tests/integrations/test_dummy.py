"""Random weights instead of a checkpoint's: models generate, ranks agree, formats are those of the config."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dcpmla import LLM
from dcpmla.config import DCPConfig
from dcpmla.integrations.dummy import dummy_weights
from dcpmla.integrations.engine_options import EngineOptions
from dcpmla.integrations.model_files import load_config
from dcpmla.integrations.sharded_model import ShardedModel
from dcpmla.model.moe import MoE
from dcpmla.parallel.formats import Quantized, dequantize, format_name
from dcpmla.parallel.linear import Linear, read_linear
from dcpmla.runtime.sampling import SamplingParams
from tests.integrations.test_transformers import prompts
from tests.support.models import FAMILIES, LARGE4_SHARING, SPARSE_FAMILIES, save_tiny
from tests.support.quantized_models import AWQ, SCHEMES, save_wide
from tests.support.ranks import run_ranks
from tests.support.whole_models import load_engine_on_rank


def outcome(directory: Path) -> tuple[list[list[int]], set[str], bool]:
    """On one rank: tokens of two prompts, the kinds of experts, whether any linear layer keeps codes."""
    dcp = DCPConfig(tensor_parallel_size=2, decode_context_parallel_size=2, block_size=4)
    method = "mtp" if load_config(directory).num_nextn_predict_layers else "none"
    options = EngineOptions(load_format="dummy", speculative_method=method)
    engine = load_engine_on_rank(directory, dcp, options, seq_lens=[12, 20])
    if engine.speculation.drafter is not None:
        engine.speculation.drafter.drafts_always = True
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    requests = [engine.add(list(range(1, length)), params) for length in (5, 12)]
    list(engine.run())
    assert isinstance(engine.model, ShardedModel)
    modules = list(engine.model.hidden_states.modules())
    experts = {format_name(weight) for moe in modules if isinstance(moe, MoE) for weight in moe.experts}
    keeps_codes = any(module.weight_scale is not None for module in modules if isinstance(module, Linear))
    return [request.token_ids for request in requests], experts, keeps_codes


FP8 = {"quantization_config": SCHEMES["block"].config, "num_nextn_predict_layers": 1}
MXFP8 = {"quantization_config": SCHEMES["e8m0_32"].config, "num_nextn_predict_layers": 0}


@pytest.mark.parametrize(
    ("family", "fields", "experts"),
    [
        ("deepseek_v3", FP8, "fp8"),
        ("deepseek_v4", {"num_nextn_predict_layers": 0}, "plain"),
        ("deepseek_v4", FP8 | {"expert_dtype": "fp4"}, "fp4"),
        ("deepseek_v4", MXFP8 | {"expert_dtype": "fp4"}, "fp4"),
        ("deepseek_v3", {"quantization_config": SCHEMES["int4"].config, "num_nextn_predict_layers": 0}, "int4"),
        ("deepseek_v3", {"quantization_config": SCHEMES["mxfp4"].config, "num_nextn_predict_layers": 0}, "fp4"),
        ("deepseek_v3", {"quantization_config": AWQ, "num_nextn_predict_layers": 1}, "int4"),
        ("deepseek_v3", {"quantization_config": SCHEMES["nvfp4"].config, "num_nextn_predict_layers": 0}, "nvfp4"),
        *([("axk2", FP8 | {"num_nextn_predict_layers": 0}, "fp8")] if "axk2" in SPARSE_FAMILIES else []),
    ],
)
def test_a_config_alone_generates(family: str, fields: dict[str, Any], experts: str, tmp_path: Path) -> None:
    save_wide(family, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    first, second = run_ranks(2, outcome, tmp_path)
    assert first[0] == second[0]
    kept = [SCHEMES[scheme].config for scheme in ("block", "e8m0_32", "awq", "nvfp4")]
    assert first[1:] == second[1:] == ({experts}, fields.get("quantization_config") in kept)


@pytest.mark.usefixtures("one_process_on_cpu")
@pytest.mark.parametrize(("family", "fields"), [("deepseek_v41", {}), ("mistral_large4_text", LARGE4_SHARING)])
def test_layers_of_shared_rows(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """With the default interleave."""
    if family not in (*FAMILIES, "deepseek_v41"):
        pytest.skip("an older transformers")
    save_tiny(family, tmp_path, **fields)
    (tmp_path / "model.safetensors").unlink()
    options = {"device": "cpu", "dtype": "float32", "max_model_len": 100, "max_num_seqs": 2, "load_format": "dummy"}
    with LLM(tmp_path, **options) as llm:
        answers = llm.generate(prompts(), SamplingParams(max_new_tokens=3, ignore_eos=True))
    assert [len(answer.token_ids) for answer in answers] == [3] * len(prompts())


def test_slices_are_cut_as_they_are_stored() -> None:
    down = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    shapes = {"model.layers.0.mlp.up_proj.weight": (320, 256), "model.layers.0.mlp.gate.weight": (8, 256)}
    shapes[down] = (192, 256)
    weights = dummy_weights(shapes, SimpleNamespace(**FP8), torch.bfloat16, torch.device("cpu"))
    name, gate, _ = shapes
    kept, cut = (read_linear(weights, name, shapes[name], rows=rows) for rows in (slice(128, 320), slice(64, 128)))
    assert isinstance(kept, Quantized)
    assert (kept.codes.shape, kept.scales.shape) == ((192, 256), (2, 2))
    assert isinstance(cut, torch.Tensor)
    assert cut.dtype == torch.bfloat16
    again = read_linear(weights, name, shapes[name], rows=slice(128, 320))
    assert torch.equal(dequantize(again, torch.float32), dequantize(kept, torch.float32))
    assert isinstance(read_linear(weights, gate, shapes[gate]), torch.Tensor)
    assert isinstance(read_linear(weights, down, shapes[down]), Quantized)


def test_token_ids_route_to_all_experts() -> None:
    """A table of DeepSeek-V4's: a token's experts are different ones, and each expert has as many tokens."""
    shapes = {"mlp.gate.tid2eid": (64, 6), "mlp.gate.weight": (48, 128)}
    table = dummy_weights(shapes, SimpleNamespace(), torch.bfloat16, torch.device("cpu"))["mlp.gate.tid2eid"][:]
    assert all(len(set(experts)) == 6 for experts in table.tolist())
    assert table.flatten().bincount(minlength=48).tolist() == [8] * 48
