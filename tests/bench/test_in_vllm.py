"""The parts of `benchmarks/in_vllm.py` that need neither vLLM nor a GPU: models, options and rows."""

import json
from pathlib import Path

import pytest

from benchmarks import in_vllm
from benchmarks.vllm_engine import prefill_row, row_of
from benchmarks.vllm_models import MODELS, OURS, PREFILLS, VOCAB_SIZE, Variant
from dcpmla.bench.results import unknown_fields
from dcpmla.bench.timing import Timing
from dcpmla.config import DCPConfig


def test_fields_are_known() -> None:
    timing = Timing(3.0, in_graph=True)
    rows = [row_of("decode", timing, 2, 64), prefill_row(timing, 8, 64, 5.0) | {"route": "mha", "layer_kind": "csa"}]
    assert not unknown_fields(rows)


@pytest.mark.parametrize("name", MODELS)
def test_configs_have_the_layers_that_are_measured(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    model.save_config(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == [model.architecture]
    assert (config["model_type"], config["vocab_size"]) == (model.model_type, VOCAB_SIZE)
    assert config["num_hidden_layers"] == model.num_layers
    if model.model_type == "deepseek_v4":
        ratios = [config["compress_rates"].get(kind, 0) for kind in config["layer_types"]]
        assert ratios == model.fields["compress_ratios"]
        assert config["n_routed_experts"] > config["num_experts_per_tok"]
        assert config["topk_method"] == "noaux_tc", "vLLM's router of layers without a hash table needs a bias"
    else:
        assert config["first_k_dense_replace"] == model.num_layers, "experts"
    if model.model_type == "deepseek_v32":
        assert (config["index_topk"], config["index_n_heads"], config["index_head_dim"]) == (2048, 64, 128)


@pytest.mark.parametrize("name", MODELS)
def test_engines_hold_the_loads(name: str) -> None:
    """Each engine's options fit its loads; this package's caches are laid out by them on two ranks."""
    model = MODELS[name]
    for num_ranks in (1, 2):
        variants = model.variants(num_ranks, None)
        assert [variant.backend for variant in variants[:1]] == [OURS] * (num_ranks > 1 or bool(model.whole))
        for variant in variants:
            options = model.engine_arguments(variant, num_ranks, "folder")
            dcp = DCPConfig(
                tensor_parallel_size=options["tensor_parallel_size"],
                decode_context_parallel_size=options["decode_context_parallel_size"],
                block_size=options["block_size"],
            )
            assert dcp.decode_context_parallel_size == (num_ranks if variant.shares else 1)
            assert ("dcp_comm_backend" in options) == (variant.exchange is not None)
            assert options["kv_cache_dtype"] == variant.kv_cache_dtype
            bytes_per_token = model.num_layers * model.bytes_per_token
            for batch, context in model.loads:
                assert options["max_model_len"] > context
                needed = batch * (context // dcp.decode_context_parallel_size + model.block_size) * bytes_per_token
                assert options["kv_cache_memory_bytes"] >= needed
            assert all(num_new + context < options["max_model_len"] for num_new, context in PREFILLS)
        assert model.variants(num_ranks, [OURS]) == [variant for variant in variants if variant.backend == OURS]
        assert not model.variants(num_ranks, [])


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    args = in_vllm.parse_arguments(["--num-gpus", "2", "--model", "deepseek-v3.2", "--backends", OURS])
    assert (args.num_gpus, args.model, args.backends, args.output) == (2, "deepseek-v3.2", [OURS], None)
    assert in_vllm.output_of(args.model, 2).parts[-2:] == ("h200x2", "vllm_deepseek-v3.2.json")
    assert in_vllm.output_of("deepseek-v3", 1).parts[-2:] == ("h200", "vllm.json")
    with pytest.raises(SystemExit):
        in_vllm.parse_arguments(["--num-gpus", "1", "--model", "deepseek-v5"])
    assert "deepseek-v4-flash" in capsys.readouterr().err


def test_variants_pass_through_the_command_of_a_job() -> None:
    variant = Variant("FLASHMLA_SPARSE", "a2a", "fp8_ds_mla", shares=False)
    assert Variant(*json.loads(json.dumps(variant))) == variant


def test_speed_is_compared_within_a_load() -> None:
    """A row of two ranks is compared with vLLM's of the same cache and kind of layers, with an exchange and without."""
    load = {"operation": "decode", "batch": 8, "context": 64, "tp": 2, "in_graph": True, "kv_cache_dtype": "fp8"}
    ours = load | {"kernel": "dcpmla", "dcp": 2, "exchange": "direct", "median_us": 10.0, "layer_kind": "csa"}
    flash_mla = {"kernel": "FLASHMLA_SPARSE", "layer_kind": "csa"}
    rows = [
        ours,
        load | flash_mla | {"dcp": 2, "exchange": "a2a", "median_us": 15.0},
        load | flash_mla | {"dcp": 1, "exchange": "none", "median_us": 20.0},
        load | flash_mla | {"dcp": 1, "exchange": "none", "median_us": 30.0, "layer_kind": "hca"},
        load | flash_mla | {"dcp": 1, "exchange": "none", "median_us": 40.0, "kv_cache_dtype": "auto"},
        load | flash_mla | {"dcp": 1, "exchange": "none", "median_us": 50.0, "tp": 1},
    ]
    in_vllm.compare(rows)
    assert not unknown_fields(rows)
    assert not any("speedup" in name for row in rows[1:] for name in row)
    speedups = {name: value for name, value in ours.items() if name.startswith("speedup")}
    assert speedups == {"speedup_over_flashmla_sparse_a2a": 1.5, "speedup_over_flashmla_sparse_dcp1": 2.0}
