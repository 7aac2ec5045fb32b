"""`bench layer` of DeepSeek-V4: a stack for each kind of layers, its parts against whole steps, what it reads."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from dcpmla.attention.layers.compressed.config import WINDOW_ONLY, CompressedConfig, LayerKind
from dcpmla.bench import timing
from dcpmla.bench.compressed_stack import CompressedStack
from dcpmla.bench.geometries import config_of
from dcpmla.bench.results import unknown_fields
from dcpmla.bench.stack import StackSizes
from dcpmla.config import DCPConfig
from dcpmla.integrations.families.table import attention_of
from dcpmla.integrations.model_files import load_config
from dcpmla.parallel.mesh import init_mesh
from tests.bench.test_bench_layer import CPU
from tests.support.benches import measure
from tests.support.launchers import run_forked, unattended
from tests.support.ranks import run_ranks
from tests.support.stack_operators import operators_of

CONFIGS = Path(__file__).parents[1] / "planning" / "configs"
CSA, HCA = LayerKind(4, True), LayerKind(128, False)
pytestmark = pytest.mark.thorough
TINY = "layer --geometry tiny-v4 --num-layers 2"
CONTEXT = 300  # 75 entries of CSA, of which 8 are selected, and 2 of HCA
PLAIN = ("total", "projections", "attention", "output")
SHARDED = ("total", "projections", "gather", "attention", "combine", "output")
SELECTING = {
    1: ("total", "projections", "selection", "attention", "output"),
    2: ("total", "projections", "selection", "candidates", "gather", "attention", "combine", "output"),
}


def tiny() -> CompressedConfig:
    config = attention_of(config_of("tiny-v4")).config
    assert isinstance(config, CompressedConfig)
    return config


def new_stack(kind: LayerKind, tp: int = 1, dcp: int = 1, **options: Any) -> CompressedStack:
    return CompressedStack(tiny(), kind, StackSizes(init_mesh(tp, dcp), 2, 2, CONTEXT, CPU, torch.float32), **options)


@pytest.mark.parametrize("name", ["flash", "pro"])
def test_geometries_have_the_attention_of_the_published_configs(name: str) -> None:
    published = load_config(CONFIGS / f"deepseek_v4_{name}.json")
    assert attention_of(config_of(f"deepseek-v4-{name}")).config == attention_of(published).config
    fields = ("hidden_size", "n_routed_experts", "moe_intermediate_size", "num_experts_per_tok", "rope_parameters")
    for field in fields:
        assert getattr(config_of(f"deepseek-v4-{name}"), field) == getattr(published, field)


def test_two_ranks_measure_each_kind(tmp_path: Path) -> None:
    out = tmp_path / "layer.json"
    command = f"{TINY} -tp 2 -dcp 1,2 --batch 2 --context {CONTEXT} --device cpu --json {out}"
    result, _ = run_forked(unattended(["-m", "dcpmla", "bench", *command.split(), "--plot", tmp_path / "a.png"], 2))
    content = json.loads(out.read_text())
    assert not unknown_fields(content["rows"])
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for row in content["rows"]:
        found.setdefault((row["dcp"], row["layer_kind"]), {})[row["part"]] = row
    for dcp, others in ((1, PLAIN), (2, SHARDED)):
        assert {kind: tuple(found[dcp, kind]) for kind in ("window", "csa", "hca")} == {
            "window": PLAIN,  # each rank has all windows
            "csa": SELECTING[dcp],
            "hca": others,
        }
    assert len(found) == 6
    for (dcp, _), rows in found.items():
        total = rows["total"]
        assert (total["geometry"], total["query_dim"], total["latent_dim"], total["heads"]) == ("tiny-v4", 128, 128, 8)
        assert ("added_us_per_layer" in total) == (dcp == 2)
        parts = [row["median_us"] for part, row in rows.items() if part not in ("total", "candidates")]
        assert total["sum_of_parts_us"] == pytest.approx(sum(parts), abs=0.3)
        exchanged = [rows[part]["median_us"] for part in ("gather", "candidates", "combine") if part in rows]
        assert total["exchange_us"] == pytest.approx(sum(exchanged), abs=0.3)
        assert total["bytes_read"] > rows["attention"]["bytes_read"] > 0
        for part in ("total", "attention", "selection"):
            if part in rows:
                share = rows[part]["floor_us"] / rows[part]["median_us"]
                assert rows[part]["floor_share"] == pytest.approx(share, abs=2e-3)
    listed = {"window": 16, "csa": 16 + 8, "hca": 16 + 2}
    for kind, num_rows in listed.items():
        for dcp in (1, 2):
            assert found[dcp, kind]["attention"]["bytes_read"] == 2 * 2 * (num_rows // dcp) * 128 * 4
    assert found[2, "csa"]["selection"]["bytes_read"] == 2 * 2 * 38 * 64 * 4
    assert [entry["layer_kind"] for entry in content["crossover"]] == ["window", "csa", "hca"]
    assert result.stdout.count("\ntotal, dcp 2, a2a, csa: ") == 1
    assert result.stdout.count("is faster than tp 2: ") == 3


@pytest.mark.usefixtures("one_process_on_cpu")
def test_formats_of_rows_and_of_index_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(timing.ROTATED_BYTES, "cpu", 1)  # one step, again and again
    options = "--kv-cache-dtype bf16,fp8,fp8_ds_mla --index-cache-dtype auto,fp8 --variants ,pbm"
    rows = measure(tmp_path, f"{TINY} --batch 1 --context {CONTEXT} {options}")
    totals = [row for row in rows if row["part"] == "total"]
    assert [(row["layer_kind"], row["kv_cache_dtype"], row["index_cache_dtype"]) for row in totals] == [
        ("window", "bf16", "auto"),
        ("window", "fp8_ds_mla", "auto"),
        *(("csa", name, index) for name in ("bf16", "fp8_ds_mla") for index in ("auto", "fp8")),
        ("hca", "bf16", "auto"),
        ("hca", "fp8_ds_mla", "auto"),
    ]
    skipped = (
        "skipped: dcp 1, none, fp8 cache, hca, batch 1, context 300: kv_cache_dtype (--kv-cache-dtype) fp8 does not"
    )
    assert skipped in capsys.readouterr().out


def parts_of_steps(dcp: int, **options: Any) -> list[tuple[Counter[str], Counter[str]]]:
    with torch.inference_mode():
        return [operators_of(new_stack(kind, 2, dcp, **options)) for kind in (WINDOW_ONLY, CSA, HCA)]


def test_the_parts_are_the_step() -> None:
    """Same operators, same number of times: nothing is left out, nothing measured twice."""
    for dcp in (1, 2):
        for whole, parts in run_ranks(2, parts_of_steps, dcp)[0]:
            assert whole == parts
            assert {"dcpmla.mla_decode.default", "dcpmla.unrope_heads.default"} <= whole.keys()


def block_sizes() -> list[tuple[int, int]]:
    with torch.inference_mode():
        sizes = {kind: new_stack(kind).cache.sizes for kind in (WINDOW_ONLY, CSA, HCA)}
    return [(plan.block_tokens, plan.entries_per_block(kind.ratio or 1)) for kind, plan in sizes.items()]


def test_blocks_hold_as_many_entries_as_in_the_model() -> None:
    config, block_size = tiny(), DCPConfig().block_size
    per_block = [block_size * config.row_tokens // ratio for ratio in (1, 4, 128)]
    assert run_ranks(1, block_sizes)[0] == [(block_size * config.row_tokens, number) for number in per_block]


def rotated_rows() -> tuple[int, int, list[list[int]]]:
    """Return the blocks of a stack that selects, the first row after its windows, and what its steps read for the first
    request.
    """
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(timing.ROTATED_BYTES, "cpu", 3 * new_stack(CSA).bytes_read()["attention"])
        stack = new_stack(CSA)
        for index in range(3):
            stack.step(index)
    sizes, selections = stack.cache.sizes, [stack._compressed(metadata).selection for metadata in stack.metadata]
    listed = [
        selection.slots[0, : int(selection.num_slots[0])].tolist() for selection in selections if selection is not None
    ]
    return sizes.num_blocks, sizes.window_rows(CSA.ratio), listed


def test_steps_read_other_rows() -> None:
    """Over the blocks of one set: steps differ in what they select, and in their windows."""
    num_blocks, first_entry, listed = run_ranks(1, rotated_rows)[0]
    assert num_blocks == 2 * 2
    assert [len(set(rows)) for rows in listed] == [16 + 8] * 3
    windows, entries = (
        [{r for r in rows if (r < first_entry) == of_window} for rows in listed] for of_window in (1, 0)
    )
    assert len(set.union(*windows)) == 3 * 16
    assert len({frozenset(rows) for rows in entries}) == 3
