"""`bench layer` on two ranks, of MLA and of DeepSeek-V4's kinds of layers: its parts against whole steps, what it says
of DCP against the definitions, what it reads, its geometries.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from dcpmla.attention.layers.compressed.config import WINDOW_ONLY, CompressedConfig, LayerKind
from dcpmla.attention.mla.layer import PROJECT_FIRST_TOKENS
from dcpmla.bench import timing
from dcpmla.bench.compressed_stack import CompressedStack
from dcpmla.bench.geometries import config_of
from dcpmla.bench.layer import crossovers
from dcpmla.bench.results import unknown_fields
from dcpmla.bench.stack import PARTS as ALL_PARTS
from dcpmla.bench.stack import Stack, StackSizes
from dcpmla.config import DCPConfig
from dcpmla.integrations.families.table import attention_of
from dcpmla.integrations.model_files import load_config
from dcpmla.integrations.model_size import read_model
from dcpmla.parallel.mesh import init_mesh
from dcpmla.planning.machine import H200X8
from dcpmla.planning.measured import predict_row
from tests.support.benches import measure_on_gpus
from tests.support.launchers import run_forked, srun, unattended
from tests.support.models import tiny_config
from tests.support.ranks import run_ranks
from tests.support.stack_operators import operators_of

pytestmark = pytest.mark.thorough
CONFIGS = Path(__file__).parents[1] / "planning" / "configs"
CPU = torch.device("cpu")
PARTS = tuple(part for part in ALL_PARTS if part != "selection")
UNSHARDED = ("total", "projections", "attention", "output")
SELECTING = {
    1: ("total", "projections", "selection", "attention", "output"),
    2: ("total", "projections", "selection", "candidates", "gather", "attention", "combine", "output"),
}
TINY = ["bench", "layer", "--geometry", "tiny", "--num-layers", "2"]
CSA, HCA = LayerKind(4, True), LayerKind(128, False)
CONTEXT = 300  # 75 entries of CSA, of which 8 are selected, and 2 of HCA
Step = dict[str, dict[str, Any]]  # rows by their parts


def steps_of_two_ranks(directory: Path, *options: object) -> tuple[dict[str, Any], dict[tuple[Any, ...], Step], str]:
    """Measure under TP 2; return the file, the steps by layout and batch, and the report. Check what all have."""
    out, plot = directory / "layer.json", directory / "layer.png"
    program = ["-m", "dcpmla", *TINY, "-tp", 2, *options, "--json", out, "--plot", plot, "--commit", "abc"]
    result, _ = run_forked(unattended(program, 2))
    content = json.loads(out.read_text())
    assert list(content) == ["commit", "machine", "versions", "rows", "ceilings", "crossover"]
    assert (content["commit"], content["machine"]) == ("abc", "2 x CPU")
    assert not unknown_fields(content["rows"])
    assert content["crossover"] == crossovers(content["rows"])
    assert plot.read_bytes().startswith(b"\x89PNG")
    steps: dict[tuple[Any, ...], Step] = {}
    for row in content["rows"]:
        setting = row["dcp"], row["exchange"], row["variant"], row["layer_kind"], row["batch"]
        assert row["part"] not in steps.setdefault(setting, {})
        steps[setting][row["part"]] = row
    for (dcp, _, _, kind, batch), step in steps.items():
        check_step(step, steps[1, "none", "", kind, batch])
        assert dcp == 1 or "  added_us_per_layer " in result.stdout
    return content, steps, result.stdout


def check_step(step: Step, plain: Step) -> None:
    """Compare a step's sums and ratios with its times and those of plain TP."""
    total, dcp = step["total"], step["total"]["dcp"]
    times, plain_times = ({part: row["median_us"] for part, row in rows.items()} for rows in (step, plain))
    assert all(time > 0 for time in times.values())
    exchanged = sum(times.get(part, 0.0) for part in ("gather", "candidates", "combine"))
    sums = sum(times[part] for part in ALL_PARTS if part in times), exchanged
    assert (total["sum_of_parts_us"], total["exchange_us"]) == pytest.approx(sums, abs=0.3)
    assert total["bytes_read"] > step["attention"]["bytes_read"] > 0
    for part, row in step.items():
        is_compared = part in ("total", "attention", "selection")
        found = tuple(field in row for field in ("floor_us", "scaling_efficiency", "added_us_per_layer"))
        assert found == (is_compared, is_compared and dcp == 2, part == "total" and dcp == 2)
        if is_compared:
            assert row["floor_share"] == pytest.approx(row["floor_us"] / row["median_us"], abs=2e-3)
        if is_compared and dcp == 2:
            assert row["scaling_efficiency"] == pytest.approx(plain_times[part] / (2 * times[part]), abs=1e-3)
    if dcp == 2:
        signs = {"total": 1, "attention": -1, "selection": -1, "candidates": 1}
        apart, plain_apart = (
            sum(sign * each.get(part, 0.0) for part, sign in signs.items()) for each in (times, plain_times)
        )
        assert total["added_us_per_layer"] == pytest.approx((apart - plain_apart) / 2, abs=0.11)


def test_two_ranks_measure_each_part(tmp_path: Path) -> None:
    few, many = 1, PROJECT_FIRST_TOKENS
    loads = ["--batch", f"{few},{many}", "--context", "70,100000000000"]
    variants = ["-dcp", "2,1", "--variants", ",pbm,q_replicate,fp8"]
    content, steps, report = steps_of_two_ranks(tmp_path, *variants, *loads)
    replicated = ("total", "projections", "attention", "combine", "output")
    assert {setting: tuple(step) for setting, step in steps.items()} == {
        **{(1, "none", "", "mla", batch): UNSHARDED for batch in (few, many)},
        **{(2, "a2a", "", "mla", batch): ("total", *PARTS) for batch in (few, many)},
        **{(2, "a2a", "q_replicate", "mla", batch): replicated for batch in (few, many)},
        (2, "a2a", "pbm", "mla", many): ("total", *PARTS),
    }
    assert {(row["geometry"], row["num_layers"], row["context"]) for row in content["rows"]} == {("tiny", 2, 70)}
    layouts = [(2, "a2a", variant, "bf16", "auto") for variant in ("", "q_replicate", "pbm")]
    assert [tuple(entry.values())[:5] for entry in content["crossover"]] == layouts
    too_few = f": a step of fewer than {many} tokens does not project before it merges\n"
    assert report.count(f"skipped: dcp 2, a2a, pbm, batch {few}, context 70{too_few}") == 1
    assert report.count("skipped: dcp ") == 2 + 7  # contexts too long, for each layout that a batch has
    assert report.count("is faster than tp 2: ") == 3
    efficient = r"^total, dcp 2, a2a(, \w+)?, mla: .*scaling_efficiency \S+ in the median \(\S+ to \S+\)$"
    assert len(re.findall(efficient, report, re.MULTILINE)) == 3


def test_two_ranks_measure_each_kind(tmp_path: Path) -> None:
    options = ["--geometry", "tiny-v4", "-dcp", "1,2", "--batch", "2", "--context", CONTEXT]
    content, steps, report = steps_of_two_ranks(tmp_path, *options)
    parts = {
        "window": (UNSHARDED, UNSHARDED),  # each rank has all windows
        "csa": (SELECTING[1], SELECTING[2]),
        "hca": (UNSHARDED, ("total", *PARTS)),
    }
    assert {(setting[3], setting[0]): tuple(step) for setting, step in steps.items()} == {
        (kind, dcp): of_kind[dcp - 1] for kind, of_kind in parts.items() for dcp in (1, 2)
    }
    listed = {"window": 16, "csa": 16 + 8, "hca": 16 + 2}
    for (dcp, _, _, kind, _), step in steps.items():
        total = step["total"]
        assert (total["geometry"], total["query_dim"], total["latent_dim"], total["heads"]) == ("tiny-v4", 128, 128, 8)
        assert step["attention"]["bytes_read"] == 2 * 2 * (listed[kind] // dcp) * 128 * 4
        if (kind, dcp) == ("csa", 2):
            assert step["selection"]["bytes_read"] == 2 * 2 * 38 * 64 * 4
    assert [entry["layer_kind"] for entry in content["crossover"]] == ["window", "csa", "hca"]
    assert report.count("is faster than tp 2: ") == 3


def test_two_ranks_on_each_of_two_nodes(tmp_path: Path) -> None:
    """The planner takes a group of 2 for one inside its node, and lets the group of 4 pay for the network."""
    out, config = tmp_path / "layer.json", tmp_path / "config.json"
    config.write_text(tiny_config("deepseek_v32").to_json_string())  # layers of sparse models run as dense ones
    options = ["--geometry", config, "-tp", 4, "-dcp", "2,4", "--batch", "2", "--context", "70", "--json", out]
    program = ["-m", "dcpmla", *TINY, *options]
    run_forked(srun(program, [2, 2], "localhost,elsewhere"))
    model, rows = read_model(tiny_config("deepseek_v32")), json.loads(out.read_text())["rows"]
    assert {(row["geometry"], row["tp"], row["gpus_per_node"], row["exchange"]) for row in rows} == {
        ("config.json", 4, 2, "a2a")
    }
    gathers = {row["dcp"]: (predict_row(H200X8, model, row) or 0) / 2 for row in rows if row["part"] == "gather"}
    assert gathers[4] - gathers[2] == pytest.approx(H200X8.network_us, abs=0.2)


# ---- stacks

Cut = tuple[LayerKind | None, int, dict[str, Any]]  # kind of layers, None for MLA; DCP size, fields of DCPConfig


def tiny() -> CompressedConfig:
    config = attention_of(config_of("tiny-v4")).config
    assert isinstance(config, CompressedConfig)
    return config


def new_stack(kind: LayerKind, tp: int = 1, dcp: int = 1) -> CompressedStack:
    sizes = StackSizes(init_mesh(tp, dcp), 2, [1] * 2, [CONTEXT] * 2, CPU, torch.float32)
    return CompressedStack(tiny(), kind, sizes, sizes.dcp_config())


def parts_of_steps(cuts: list[Cut]) -> list[tuple[Counter[str], Counter[str]]]:
    """Operators of a whole step, and of its parts together, without views and what the residual adds."""
    found = []
    with torch.inference_mode():
        for kind, dcp, options in cuts:
            load = [1] * PROJECT_FIRST_TOKENS, [70] * PROJECT_FIRST_TOKENS
            sizes = StackSizes(init_mesh(2, dcp), 2, *load, CPU, torch.float32)
            mla = attention_of(config_of("tiny"))
            stack = Stack(mla, sizes, sizes.dcp_config(**options)) if kind is None else new_stack(kind, 2, dcp)
            found.append(operators_of(stack))
    return found


def test_the_parts_are_the_step() -> None:
    """Same operators, same number of times: nothing is left out, nothing measured twice."""
    options: list[dict[str, Any]] = [{"dcp_comm_backend": "ag_rs"}, {}, {"dcp_q_replicate": True}]
    options += [{"dcp_project_before_merge": True}, {"kv_cache_dtype": "fp8", "decode_query_dtype": "fp8"}]
    cuts: list[Cut] = [(None, 1, {}), *((None, 2, option) for option in options)]
    cuts += [(kind, dcp, {}) for kind in (WINDOW_ONLY, CSA, HCA) for dcp in (1, 2)]
    for cut, (whole, parts) in zip(cuts, run_ranks(2, parts_of_steps, cuts)[0], strict=True):
        assert whole == parts, cut
        own = "c10d.allreduce_.default" if cut[0] is None else "dcpmla.unrope_heads.default"
        assert {"dcpmla.mla_decode.default", own} <= whole.keys()


def rows_of_stacks() -> tuple[list[tuple[int, int]], int, int, list[set[int]]]:
    """Return the tokens and entries of each kind's blocks; of a stack that selects its number of blocks, the first row
    after its windows, and what its steps read for the first request.
    """
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        plans = {kind: new_stack(kind).cache.sizes for kind in (WINDOW_ONLY, CSA, HCA)}
        patch.setitem(timing.ROTATED_BYTES, "cpu", 3 * new_stack(CSA).bytes_read()["attention"])
        stack = new_stack(CSA)
        for index in range(3):
            stack.step(index)
    selections = [stack._compressed(metadata).selection for metadata in stack.metadata]
    listed = [set(chosen.slots[0, : int(chosen.num_slots[0])].tolist()) for chosen in selections if chosen is not None]
    blocks = [(plan.block_tokens, plan.entries_per_block(kind.ratio or 1)) for kind, plan in plans.items()]
    return blocks, stack.cache.sizes.num_blocks, stack.cache.sizes.window_rows(CSA.ratio), listed


def test_blocks_hold_as_many_entries_as_in_the_model_and_steps_read_other_rows() -> None:
    """Steps over the blocks of one set differ in what they select, and in their windows."""
    blocks, num_blocks, first_entry, listed = run_ranks(1, rows_of_stacks)[0]
    block_tokens = DCPConfig().block_size * tiny().row_tokens
    assert blocks == [(block_tokens, block_tokens // ratio) for ratio in (1, 4, 128)]
    assert num_blocks == 2 * 2
    assert [len(rows) for rows in listed] == [16 + 8] * 3
    assert len({row for rows in listed for row in rows if row < first_entry}) == 3 * 16
    assert len({frozenset(row for row in rows if row >= first_entry) for rows in listed}) == 3


# ---- geometries


@pytest.mark.parametrize("name", ["flash", "pro"])
def test_geometries_have_the_attention_of_the_published_configs(name: str) -> None:
    published, config = load_config(CONFIGS / f"deepseek_v4_{name}.json"), config_of(f"deepseek-v4-{name}")
    assert attention_of(config).config == attention_of(published).config
    for field in ("hidden_size", "n_routed_experts", "moe_intermediate_size", "num_experts_per_tok", "rope_parameters"):
        assert getattr(config, field) == getattr(published, field)


def test_geometries_are_the_published_ones() -> None:
    """By the parameters of their checkpoints, in billions."""
    billions = {
        "deepseek-v3": 671,
        "deepseek-v3.2": 671.9,  # with indexers
        "kimi-k2": 1026,
        "v2-lite": 15.7,
        "deepseek-v4-flash": 284.3,
        "deepseek-v4-pro": 1573,
    }
    for name, number in billions.items():
        parameters = read_model(config_of(name)).parameters
        found = sum(parameter.count * torch.Size(parameter.shape).numel() for parameter in parameters)
        assert found / 1e9 == pytest.approx(number, rel=0.005), name


@pytest.mark.alone
@pytest.mark.gpu_2
def test_two_gpus_in_graphs(tmp_path: Path) -> None:
    variants = "-tp 2 -dcp 1,2 --variants ,pbm,q_replicate,fp8 --kv-cache-dtype bf16,fp8 --decode-query-dtype fp8"
    loads = f"--geometry v2-lite --num-layers 2 --batch 1,{PROJECT_FIRST_TOKENS} --context 1024"
    content = measure_on_gpus(tmp_path, f"layer {loads} {variants}", 2)
    totals = [row for row in content["rows"] if row["part"] == "total"]
    steps, of_fp8 = (
        Counter((row["exchange"], row["variant"]) for row in totals if row["kv_cache_dtype"] == name)
        for name in ("bf16", "fp8")
    )
    assert of_fp8 == steps
    of_backend = {"": 2, "pbm": 1, "q_replicate": 2}  # one of the batches projects first
    expected = {("none", ""): 2, **{("a2a", variant): number for variant, number in of_backend.items()}}
    if ("direct", "") in steps:  # where the GPUs have NVLink
        expected |= {("direct", variant): number for variant, number in {**of_backend, "fp8": 2}.items()}
    assert steps == expected
    assert len(content["crossover"]) == 2 * (len(expected) - 1)
