"""`bench layer` on two ranks, its parts against whole steps, what it says of DCP against the definitions, its
geometries.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from dcpmla.attention.mla.layer import PROJECT_FIRST_TOKENS
from dcpmla.bench.geometries import config_of
from dcpmla.bench.layer_stack import LayerStack
from dcpmla.bench.layouts import crossovers
from dcpmla.bench.stack import PARTS as ALL_PARTS
from dcpmla.bench.stack import StackSizes
from dcpmla.integrations.families.table import attention_of
from dcpmla.integrations.model_size import read_model
from dcpmla.parallel.mesh import init_mesh
from dcpmla.planning.machine import H200X8
from dcpmla.planning.measured import predict_row
from tests.support.launchers import run_forked, run_together, srun, torchrun, unattended
from tests.support.models import tiny_config
from tests.support.ranks import run_ranks
from tests.support.stack_operators import operators_of

pytestmark = pytest.mark.thorough
CPU = torch.device("cpu")
PARTS = tuple(part for part in ALL_PARTS if part != "selection")
UNSHARDED = ("total", "projections", "attention", "output")
TINY = ["bench", "layer", "--geometry", "tiny", "--num-layers", "2"]


def test_two_ranks_measure_each_part(tmp_path: Path) -> None:
    out, plot = tmp_path / "layer.json", tmp_path / "layer.png"
    few, many = 1, PROJECT_FIRST_TOKENS
    loads = ["--batch", f"{few},{many}", "--context", "70,100000000000"]
    options = ["-tp", 2, "-dcp", "2,1", "--variants", ",pbm,q_replicate,fp8", *loads]
    program = ["-m", "dcpmla", *TINY, *options, "--json", out, "--plot", plot, "--commit", "abc"]
    result, _ = run_forked(unattended(program, 2))
    content = json.loads(out.read_text())
    assert list(content) == ["commit", "machine", "versions", "rows", "crossover"]
    assert (content["commit"], content["machine"]) == ("abc", "2 x CPU")
    found = {(row["dcp"], row["exchange"], row["variant"], row["batch"], row["part"]): row for row in content["rows"]}
    parts_of = {
        **{(1, "none", "", batch): UNSHARDED for batch in (few, many)},
        **{(2, "a2a", "", batch): ("total", *PARTS) for batch in (few, many)},
        **{
            (2, "a2a", "q_replicate", batch): ("total", "projections", "attention", "combine", "output")
            for batch in (few, many)
        },
        (2, "a2a", "pbm", many): ("total", *PARTS),
    }
    assert set(found) == {(*setting, part) for setting, parts in parts_of.items() for part in parts}
    assert len(found) == len(content["rows"])

    def beside_attention(*setting: Any) -> float:
        return float(found[*setting, "total"]["median_us"] - found[*setting, "attention"]["median_us"])

    for *setting, part in found:
        row = found[*setting, part]
        assert (row["geometry"], row["tp"], row["num_layers"], row["context"]) == ("tiny", 2, 2, 70)
        assert row["median_us"] > 0
        assert ("added_us_per_layer" in row) == (part == "total" and setting[0] == 2)
        if part == "total":
            parts = sum(found[*setting, other]["median_us"] for other in PARTS if (*setting, other) in found)
            assert row["sum_of_parts_us"] == pytest.approx(parts, abs=0.3)
        compared = setting[0] == 2 and part in ("total", "attention")
        assert ("scaling_efficiency" in row) == compared
        if compared:
            plain = found[1, "none", "", setting[-1], part]["median_us"]
            assert row["scaling_efficiency"] == pytest.approx(plain / (2 * row["median_us"]), abs=1e-3)
        if part == "total" and setting[0] == 2:
            added = (beside_attention(*setting) - beside_attention(1, "none", "", setting[-1])) / 2
            assert row["added_us_per_layer"] == pytest.approx(added, abs=0.1)
            assert f"  added {row['added_us_per_layer']:,.1f} us a layer\n" in result.stdout
    layouts = [(2, "a2a", variant, "bf16", "auto") for variant in ("", "q_replicate", "pbm")]
    assert [tuple(entry.values())[:5] for entry in content["crossover"]] == layouts
    assert content["crossover"] == crossovers(content["rows"])
    too_few = f": a step of fewer than {many} tokens does not project before it merges\n"
    assert result.stdout.count(f"skipped: dcp 2, a2a, pbm, batch {few}, context 70{too_few}") == 1
    assert result.stdout.count("skipped: dcp ") == 2 + 7  # contexts too long, for each layout that a batch has
    assert result.stdout.count("is faster than tp 2: ") == 3
    efficient = r"^total, dcp 2, a2a(, \w+)?, mla: .*% scaling efficiency in the median \(\d+% to \d+%\)$"
    assert len(re.findall(efficient, result.stdout, re.MULTILINE)) == 3
    assert plot.read_bytes().startswith(b"\x89PNG")


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


Cut = tuple[int, int, dict[str, Any]]  # tp, dcp, fields of DCPConfig


def parts_of_steps(cuts: list[Cut]) -> list[tuple[Counter[str], Counter[str]]]:
    """Operators of a whole step, and of its parts together, without views and what the residual adds."""
    config = attention_of(config_of("tiny")).config
    found = []
    with torch.inference_mode():
        for tp, dcp, options in cuts:
            sizes = StackSizes(init_mesh(tp, dcp), 2, PROJECT_FIRST_TOKENS, 70, CPU, torch.float32)
            stack = LayerStack(config, sizes, **options)
            found.append(operators_of(stack))
    return found


def test_the_parts_are_the_step() -> None:
    """Same operators, same number of times: nothing is left out, nothing measured twice."""
    options: list[dict[str, Any]] = [
        {"dcp_comm_backend": "ag_rs"},
        {},
        {"dcp_q_replicate": True},
        {"dcp_project_before_merge": True},
    ]
    quantized = {"kv_cache_dtype": "fp8", "decode_query_dtype": "fp8"}
    cuts: list[Cut] = [(2, 1, {}), *((2, 2, option) for option in (*options, quantized))]
    for cut, (whole, parts) in zip(cuts, run_ranks(2, parts_of_steps, cuts)[0], strict=True):
        assert whole == parts, cut
        assert {"dcpmla.mla_decode.default", "c10d.allreduce_.default"} <= whole.keys()


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        *(("deepseek-v3", 671), ("kimi-k2", 1026), ("v2-lite", 15.7)),
        *(("deepseek-v4-flash", 284.3), ("deepseek-v4-pro", 1573)),
    ],
)
def test_geometries_are_the_published_ones(name: str, billions: float) -> None:
    """By the parameters of their checkpoints."""
    model = read_model(config_of(name))
    assert sum(
        parameter.count * torch.Size(parameter.shape).numel() for parameter in model.parameters
    ) / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.alone
@pytest.mark.gpu
def test_one_gpu_in_graphs(tmp_path: Path) -> None:
    out = tmp_path / "layer.json"
    options = ["--geometry", "v2-lite", "--num-layers", "2", "--batch", "1,8", "--context", "1024,8192"]
    options += ["--kv-cache-dtype", "bf16,fp8,fp8_ds_mla"]  # fp8 with both kinds of queries: four layouts
    (_,) = run_together([(torchrun(["-m", "dcpmla", "bench", "layer", *options, "--json", out], 1), {})])
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 4 * 4 * len(UNSHARDED)
    for row in rows:
        assert row["in_graph"]
        assert 0 < row["median_us"] < 1e5


@pytest.mark.alone
@pytest.mark.gpu_2
def test_two_gpus_in_graphs(tmp_path: Path) -> None:
    out = tmp_path / "layer.json"
    loads = ["--batch", f"1,{PROJECT_FIRST_TOKENS}", "--context", "1024"]
    variants = ["--variants", ",pbm,q_replicate,fp8", "--kv-cache-dtype", "bf16,fp8", "--decode-query-dtype", "fp8"]
    options = ["--geometry", "v2-lite", "--num-layers", "2", "-tp", "2", "-dcp", "1,2", *variants, *loads]
    (_,) = run_together([(torchrun(["-m", "dcpmla", "bench", "layer", *options, "--json", out], 2), {})])
    content = json.loads(out.read_text())
    assert all(row["in_graph"] for row in content["rows"])
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
