"""Machines from files and from measurements; predictions beside measured rows."""

import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from dcpmla.cli.output import write_json
from dcpmla.planning.calibrate import calibrate, load_machine
from dcpmla.planning.exchange import exchange_us
from dcpmla.planning.machine import H200X8, Collective
from dcpmla.planning.measured import compare, predict_row, read_rows, summarize
from dcpmla.planning.predict import Setting, predict_step
from dcpmla.planning.weights import ModelSize
from tests.support.plan_cases import NUM_TOKENS, RESULTS, scaling_rows, within, write


def test_calibrated_machine_predicts_the_layers_that_were_measured(v3: ModelSize) -> None:
    """Our attention is far slower than the preset's; fitted to the file, its stacks come within 1.25, and DCP sizes in
    their order.
    """
    rows = scaling_rows()
    machine = calibrate(H200X8, v3, rows)
    assert not machine.has_best_attention
    assert machine.name == "h200x8, calibrated (exchange, attention, layers)"
    for part, factor in (("total", 1.25), ("attention", 1.35)):
        comparisons = [c for c in compare(machine, v3, rows) if c.row.get("part") == part]
        assert len(comparisons) == 20
        assert all(within(c.ratio, 1, factor) for c in comparisons)
    totals = [c for c in compare(machine, v3, rows) if c.row.get("part") == "total" and c.row["tp"] == 4]
    pairs = [
        (a, b)
        for a, b in combinations(totals, 2)
        if a.row["batch"] == b.row["batch"] and not within(a.measured_us / b.measured_us, 1, 1.1)
    ]
    assert len(pairs) == 9  # with one request all sizes are within 10 %
    assert all((a.measured_us < b.measured_us) == (a.predicted_us < b.predicted_us) for a, b in pairs)
    preset = [c for c in compare(H200X8, v3, rows) if c.row.get("part") == "total"]
    assert all(c.ratio < 0.5 for c in preset)


def test_calibration_finds_the_attention_and_layers_that_were_measured(v3: ModelSize) -> None:
    other = replace(H200X8, attention_overhead_us=70.0, attention_read_share=0.04, attention_tflops=30.0, layer_us=55.0)
    rows = []
    for tp, dcp in ((1, 1), (2, 2), (4, 1), (8, 8)):
        for batch in (1, 16, 128):
            row = {"tp": tp, "dcp": dcp, "num_layers": 4, "batch": batch, "context": 8192}
            rows += [
                {**row, "part": part, "median_us": predict_row(other, v3, {**row, "part": part})}
                for part in ("total", "attention")
            ]
    found = calibrate(H200X8, v3, rows)
    assert found.name == "h200x8, calibrated (attention, layers)"
    assert found.all_gather == H200X8.all_gather
    assert found.attention_overhead_us == pytest.approx(70, rel=0.1)
    assert found.attention_read_share == pytest.approx(0.04, rel=0.1)
    assert found.attention_tflops == pytest.approx(30, rel=0.1)
    assert found.layer_us == pytest.approx(55, rel=0.01)
    alone = calibrate(
        H200X8, v3, [row for row in rows if row["part"] == "attention" and row["tp"] == row["batch"] == 1]
    )
    assert compare(alone, v3, rows[1:2])[0].ratio == pytest.approx(1)  # one row cannot tell overhead and rates apart


def test_layers_of_another_model_calibrate_attention_alone(v3: ModelSize) -> None:
    row = {
        "part": "total",
        "tp": 1,
        "dcp": 1,
        "num_layers": 4,
        "batch": 1,
        "context": 8192,
        "num_heads": 64,
        "query_dim": 576,
        "latent_dim": 512,
    }
    rows = [{**row, "median_us": 900.0}, {**row, "part": "attention", "median_us": 400.0}]
    found = calibrate(H200X8, v3, rows)
    assert found.name == "h200x8, calibrated (attention)"
    assert found.layer_us == H200X8.layer_us
    assert compare(H200X8, v3, rows) == []


def test_measured_steps_count_the_nodes_of_their_job(v3: ModelSize) -> None:
    row = {"part": "total", "tp": 8, "dcp": 8, "num_layers": 4, "batch": 32, "context": 8192, "num_nodes": 2}
    times = [
        predict_row(H200X8, v3, {**row, **job}) or 0
        for job in ({}, {"gpus_per_node": 4}, {"gpus_per_node": 4, "num_ranks": 16})
    ]
    assert times[0] + 4 * 3 * H200X8.network_us < times[1]
    assert times[1] == times[2]


def test_calibration_finds_the_machine_that_was_measured(v3: ModelSize, tmp_path: Path) -> None:
    other = load_machine(
        write(
            tmp_path / "slow.json",
            {"all_gather": {"overhead_us": 15.0, "per_rank_us": 3.0, "gb_per_s": 90}, "all_to_all": {"gb_per_s": 40}},
        ),
        v3,
    )
    sizes = [
        (operation, width, t) for operation, width in (("gather_heads", 576), ("combine", 512)) for t in NUM_TOKENS
    ]
    rows = [
        {
            "operation": operation,
            "backend": "a2a",
            "num_tokens": t,
            "dcp": 4,
            "median_us": exchange_us(other, operation, t, 128, width, 4),
        }
        for operation, width, t in sizes
    ]
    found = load_machine(f"h200x8,{write(tmp_path / 'bench.json', {'rows': rows})}", v3)
    assert found.name == "h200x8, calibrated (exchange)"
    assert found.all_gather.gb_per_s == pytest.approx(90)
    assert found.all_gather.overhead_us == pytest.approx(15)
    assert found.all_gather.per_rank_us == pytest.approx(3)
    assert found.all_to_all.gb_per_s == pytest.approx(40)
    assert all(c.ratio == pytest.approx(1) for c in compare(found, v3, rows))


def test_machine_files_change_what_stands_before_them(v3: ModelSize, tmp_path: Path) -> None:
    path = write(tmp_path / "b200.json", {"memory_bytes": 180 * 2**30, "all_gather": {"gb_per_s": 600}})
    machine = load_machine(f"h200x8,{path}", v3)
    assert (machine.name, machine.memory_bytes, machine.hbm_gb_per_s) == ("b200", 180 * 2**30, H200X8.hbm_gb_per_s)
    assert machine.all_gather == Collective(
        overhead_us=H200X8.all_gather.overhead_us, per_rank_us=H200X8.all_gather.per_rank_us, gb_per_s=600
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"memory": 1}, "has memory; a machine's numbers are"),
        ({"all_gather": {"latency": 1}}, "all_gather has latency"),
        ({"all_gather": 3}, "all_gather has 3"),
        ({"all_gather": None}, "all_gather has None"),
        ({"direct": {"combine_us": None}}, "combine_us is None"),
        ({"direct": {"overhead_us": 1}}, "direct has overhead_us"),
        ({"hbm_gb_per_s": "fast"}, "hbm_gb_per_s is 'fast'"),
        ({"hbm_gb_per_s": 0}, "hbm_gb_per_s is 0"),
        ({"workspace_share": 1}, "workspace_share is 1"),
        ({"gpus_per_node": 0}, "gpus_per_node is 0"),
        ({"gpus_per_node": 1.5}, "gpus_per_node is 1.5"),
        ({"all_to_all": {"per_rank_us": -1}}, "per_rank_us is -1"),
        ({"rows": []}, "no measured rows"),
        ({"rows": [{"median_us": 1.0}]}, "no rows of one node to calibrate by"),
        ({"memory_bytes": float("nan")}, "memory_bytes is nan"),
        ({"hbm_gb_per_s": float("inf")}, "hbm_gb_per_s is inf"),
        ({"kernel_us": 1e308}, "kernel_us is 1e+308"),
        ({"memory_bytes": True}, "memory_bytes is True"),
        ({"attention_read_share": 1.5}, "attention_read_share is 1.5"),
        ({"name": 5}, "name is 5"),
        ([], "must hold a JSON object"),
    ],
)
def test_bad_machine_files_are_refused(content: Any, message: str, v3: ModelSize, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        load_machine(write(tmp_path / "machine.json", content), v3)


def test_calibration_by_few_rows(v3: ModelSize, tmp_path: Path) -> None:
    """One row cannot tell latency and bandwidth apart, but is met; rows over several nodes say nothing of one."""
    row = {"operation": "gather_heads", "dcp": 8, "num_tokens": 64, "median_us": 200.0}
    assert compare(calibrate(H200X8, v3, [row]), v3, [row])[0].ratio == pytest.approx(1)
    with pytest.raises(ValueError, match="no rows of one node"):
        calibrate(H200X8, v3, [{**row, "num_nodes": 2}])
    stack = {"part": "attention", "tp": 1, "dcp": 1, "num_layers": 1, "batch": 1, "context": 8192}
    steep = [
        {**stack, "median_us": 10.0},
        {**stack, "batch": 2, "median_us": 100.0},
    ]  # a straight line through both begins below 0
    assert calibrate(H200X8, v3, steep).attention_overhead_us == 0


def test_no_file_holds_numbers_that_json_lacks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "out.json", {"step": float("inf")})
    assert list(tmp_path.iterdir()) == []


def test_a_collective_without_overhead_can_be_calibrated(v3: ModelSize, tmp_path: Path) -> None:
    free = write(tmp_path / "free.json", {"all_gather": {"overhead_us": 0, "per_rank_us": 0}})
    machine = load_machine(f"{free},{RESULTS / 'h200x4' / 'collectives.json'}", v3)
    assert machine.all_gather.overhead_us == 0
    assert machine.all_gather.gb_per_s < H200X8.all_gather.gb_per_s


STEP = {"part": "total", "tp": 8, "dcp": 8, "batch": 1, "context": 1, "median_us": 1.0}
GATHER = {"operation": "gather_heads", "dcp": 8, "num_tokens": 1, "median_us": 1.0}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**GATHER, "num_tokens": "x"}, "num_tokens 'x', which must be a whole number"),
        ({**GATHER, "dcp": "4"}, "dcp '4'"),
        ({**GATHER, "dcp": 0}, "dcp 0"),
        ({**GATHER, "dcp": True}, "dcp True"),
        ({**GATHER, "median_us": True}, "median_us True"),
        ({**GATHER, "median_us": float("nan")}, "median_us nan"),
        ({**GATHER, "median_us": float("inf")}, "median_us inf"),
        ({"op": "gather_heads", "tokens": 1, "world_size": 8, "row_width": "x", "median_us": 1.0}, "latent_dim 'x'"),
        ({**GATHER, "operation": ["gather_heads"]}, "operation ['gather_heads'], which must be a name"),
        ({"operation": "combine", "median_us": 1.0}, "no dcp and no num_tokens"),
        ({"operation": "all_reduce", "dcp": 8, "hidden_size": 1, "median_us": 1.0}, "no num_tokens"),
        ({"part": "total", "median_us": 1.0}, "no tp and no dcp"),
        ({**STEP, "dcp": 3}, "decode_context_parallel_size (-dcp) is 3"),
        ({**STEP, "num_ranks": 12}, "num_gpus (--num-gpus) is 12"),
        ({**STEP, "batch": -4}, "batch -4"),
        ({**STEP, "context": 10**30}, "context 1000"),
        ({**STEP, "num_layers": "a"}, "num_layers 'a'"),
        ({**STEP, "kv_cache_dtype": "x"}, "kv_cache_dtype (--kv-cache-dtype) is 'x'"),
        ("row", "has no list of rows"),
    ],
)
def test_bad_rows_are_refused(row: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        read_rows({"rows": [row]}, "bench.json")
    assert str(raised.value).startswith("bench.json has ")


def test_summary_names_the_rows_that_differ(v3: ModelSize) -> None:
    setting = {"tp": 8, "dcp": 8, "batch": 32, "context": 65536}
    step = predict_step(H200X8, v3, Setting(tp=8, dcp=8, kv_cache_dtype="bf16"), 32, 65536)
    rows = [
        {"part": "attention", **setting, "median_us": step["attention"] * 2},
        {"part": "total", **setting, "median_us": step["total"]},
        {"part": "loading", "median_us": 1.0},
    ]
    comparisons = compare(H200X8, v3, rows)
    assert [round(c.ratio, 6) for c in comparisons] == [0.5, 1.0]
    differing = [line for line in summarize(comparisons) if line.startswith("differs")]
    assert len(differing) == 1
    assert "part attention (tp 8, dcp 8, batch 32, context 65536)" in differing[0]
