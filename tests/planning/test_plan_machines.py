"""Machines from files and from measurements; predictions beside measured rows. The exchange `direct`: where a plan has
it, what it takes, machines that lack it.
"""

import re
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from dcpmla.cli.output import write_json
from dcpmla.cli.plan import load_machine
from dcpmla.comm.direct_ops import MAX_SIZE
from dcpmla.planning.deployment import Deployment
from dcpmla.planning.exchange import ExchangeCosts
from dcpmla.planning.machine import H200X8, Collective, Direct, Machine
from dcpmla.planning.measured import Row, calibrate, predict_row, read_rows
from dcpmla.planning.presets import PRESETS
from dcpmla.planning.recommend import make_plan
from dcpmla.planning.weights import ModelSize
from tests.support.plan_cases import (
    DIRECT,
    LAYER,
    NUM_TOKENS,
    RESULTS,
    exchange_row,
    layer_row,
    read_v32,
    setting_of,
    within,
    write,
)


def layer_rows(v3: ModelSize) -> list[Row]:
    """Rows that have a prediction of DeepSeek-V3's layers on 4 H200s."""
    return [row for row in read_rows(LAYER, "--measured", v3) if predict_row(H200X8, v3, row)]


def ratio(machine: Machine, model: ModelSize, row: Row) -> float:
    """Predicted over measured."""
    predicted = predict_row(machine, model, row)
    assert predicted is not None
    return predicted / row["median_us"]


def test_the_preset_predicts_the_layers_that_were_measured(v3: ModelSize) -> None:
    """Whole steps, and attention; a row of the exchange is a single call's, early in a step or late."""
    rows = layer_rows(v3)
    assert len(rows) == 80
    assert all(within(ratio(H200X8, v3, row), 1, 1.35) for row in rows if row["part"] in ("total", "attention"))
    assert all(within(ratio(H200X8, v3, row), 1, 1.5) for row in rows)


def test_a_calibrated_machine_predicts_them_better(v3: ModelSize) -> None:
    """And keeps the order of steps that differ by 10 %, whatever their exchange and DCP size."""
    rows = layer_rows(v3)
    machine = calibrate(H200X8, v3, rows)
    assert machine.name == "h200x8, calibrated"
    totals = [row for row in rows if row["part"] == "total"]
    assert all(within(ratio(machine, v3, row), 1, 1.1) for row in totals)
    squares = [sum((ratio(each, v3, row) - 1) ** 2 for row in rows) for each in (machine, H200X8)]
    assert squares[0] < 0.4 * squares[1]
    pairs = [
        (a, b)
        for a, b in combinations(totals, 2)
        if (a["batch"], a["context"]) == (b["batch"], b["context"])
        and not within(a["median_us"] / b["median_us"], 1, 1.1)
    ]
    assert len(pairs) > 15

    def is_first(a: Row, b: Row) -> bool:
        return (predict_row(machine, v3, a) or 0) < (predict_row(machine, v3, b) or 0)

    assert all(is_first(a, b) == (a["median_us"] < b["median_us"]) for a, b in pairs)


def test_calibration_finds_the_attention_and_layers_that_were_measured(v3: ModelSize) -> None:
    other = replace(H200X8, attention_overhead_us=70.0, attention_read_share=0.04, attention_tflops=30.0, layer_us=55.0)
    rows = []
    for tp, dcp in ((1, 1), (2, 2), (4, 1), (8, 8)):
        for batch in (1, 16, 128):
            for part in ("total", "attention", *(("gather", "combine") if dcp > 1 else ())):
                row = layer_row(part, tp=tp, dcp=dcp, batch=batch)
                rows.append({**row, "median_us": predict_row(other, v3, row)})
    found = calibrate(H200X8, v3, rows)
    assert found.attention_overhead_us == pytest.approx(70, rel=0.02)
    assert found.attention_read_share == pytest.approx(0.04, rel=0.02)
    assert found.attention_tflops == pytest.approx(30, rel=0.02)
    assert found.layer_us == pytest.approx(55, rel=0.02)
    assert asdict(found.all_to_all) == pytest.approx(asdict(H200X8.all_to_all))  # no row depends on it
    assert asdict(found.direct or 0) == pytest.approx(asdict(H200X8.direct or 0), rel=0.02)
    alone = calibrate(H200X8, v3, rows[1:2])
    assert ratio(alone, v3, rows[1]) == pytest.approx(1)  # one row cannot tell overhead and rates apart, but is met


def test_calibration_finds_the_machine_that_was_measured(v3: ModelSize, tmp_path: Path) -> None:
    slow = {"all_gather": {"overhead_us": 15.0, "per_rank_us": 3.0, "gb_per_s": 90}, "all_to_all": {"gb_per_s": 40}}
    other = load_machine(write(tmp_path / "slow.json", slow), v3)
    rows = []
    for operation, width in (("gather_heads", 576), ("combine", 512)):
        for tokens in NUM_TOKENS:
            time = ExchangeCosts(other, 4).time_us(operation, tokens, 128, width)
            rows.append(exchange_row(operation, "a2a", tokens, row_width=width, tp=4, dcp=4, median_us=time))
    found = load_machine(f"h200x8,{write(tmp_path / 'bench.json', {'rows': rows})}", v3)
    assert found.name == "h200x8, calibrated"
    assert found.all_gather.gb_per_s == pytest.approx(90)
    assert found.all_gather.latency_us(4) == pytest.approx(15 + 3 * 3)
    assert found.all_to_all.gb_per_s == pytest.approx(40)
    assert [ratio(found, v3, row) for row in rows] == pytest.approx([1] * len(rows))


_FP8 = {"part": "attention", "kv_cache_dtype": "fp8"}


@pytest.mark.parametrize(
    ("changes", "is_predicted"),
    [
        ({"heads": 64}, False),  # of another model
        (_FP8, True),
        (_FP8 | {"decode_query_dtype": "fp8"}, False),
        ({"tp": 8, "dcp": 8, "exchange": "a2a", "gpus_per_node": 4}, True),  # of several nodes
    ],
)
def test_rows_that_do_not_calibrate(changes: Row, is_predicted: bool, v3: ModelSize) -> None:
    row = {**layer_row("total"), **changes, "median_us": 900.0}
    assert (predict_row(H200X8, v3, row) is not None) == is_predicted
    with pytest.raises(ValueError, match="nothing calibrates the machine"):
        calibrate(H200X8, v3, [row])


def test_dense_layers_speak_of_sparse_models_too(v3: ModelSize) -> None:
    """Benchmarks of layers leave the indexer out: their rows are predicted alike for V3.2, which has V3's machine."""
    rows = layer_rows(v3)
    assert [predict_row(H200X8, read_v32(), row) for row in rows] == [predict_row(H200X8, v3, row) for row in rows]
    some = rows[::5]  # a fit over all takes five times as long
    assert calibrate(H200X8, read_v32(), some) == calibrate(H200X8, v3, some)


def test_measured_steps_count_the_nodes_of_their_job(v3: ModelSize) -> None:
    row = layer_row("total", tp=8, dcp=8, exchange="a2a")
    times = [predict_row(H200X8, v3, {**row, **job}) or 0 for job in ({}, {"gpus_per_node": 8}, {"gpus_per_node": 4})]
    assert times[0] == times[1]
    assert times[1] + 4 * 3 * H200X8.network_us < times[2]


def test_machine_files_change_what_comes_before_them(v3: ModelSize, tmp_path: Path) -> None:
    changes = {"memory_bytes": 180 * 2**30, "host_gb_per_s": 350, "all_gather": {"gb_per_s": 600}}
    machine = load_machine(f"h200x8,{write(tmp_path / 'b200.json', changes)}", v3)
    assert (machine.name, machine.memory_bytes, machine.host_gb_per_s) == ("b200", 180 * 2**30, 350)
    assert (machine.hbm_gb_per_s, machine.disk_gb_per_s) == (H200X8.hbm_gb_per_s, H200X8.disk_gb_per_s)
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
        ({"host_gb_per_s": 0}, "host_gb_per_s is 0"),
        ({"disk_gb_per_s": "slow"}, "disk_gb_per_s is 'slow'"),
        ({"gpus_per_node": 0}, "gpus_per_node is 0"),
        ({"gpus_per_node": 1.5}, "gpus_per_node is 1.5"),
        ({"all_to_all": {"per_rank_us": -1}}, "per_rank_us is -1"),
        ({"rows": []}, "has no list of rows"),
        ({"rows": "row"}, "has no list of rows"),
        ({"rows": ["row"]}, "has no list of rows"),
        ({"rows": [{"median_us": 1.0}]}, "nothing calibrates the machine"),
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


def test_calibration_by_few_rows(v3: ModelSize) -> None:
    """One row cannot tell latency and bandwidth apart, but is met; an overhead never falls below 0."""
    row = exchange_row("gather_heads", "a2a", 64, median_us=200.0)
    assert ratio(calibrate(H200X8, v3, [row]), v3, row) == pytest.approx(1)
    steep = [
        {**layer_row("attention", tp=1, dcp=1, batch=batch), "median_us": time}
        for batch, time in ((1, 40.0), (2, 400.0))
    ]
    assert 0 <= calibrate(H200X8, v3, steep).attention_overhead_us < 15


def test_a_collective_without_overhead_can_be_calibrated(v3: ModelSize, tmp_path: Path) -> None:
    free = write(tmp_path / "free.json", {"all_gather": {"overhead_us": 0, "per_rank_us": 0}})
    machine = load_machine(f"{free},{RESULTS / 'h200x4' / 'exchange.json'}", v3)
    assert machine.all_gather.overhead_us == 0
    assert machine.all_gather.gb_per_s < H200X8.all_gather.gb_per_s


def test_no_file_holds_numbers_that_json_lacks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "out.json", {"step": float("inf")})
    assert list(tmp_path.iterdir()) == []


STEP = {**layer_row("total", tp=8, dcp=8), "median_us": 1.0}
GATHER = exchange_row("gather_heads", "a2a", 1, median_us=1.0)


@pytest.mark.parametrize(
    "row",
    [
        *({**GATHER, "tokens": value} for value in ("x", -1, None, [1], float("nan"), 10**400)),
        *({**GATHER, "dcp": value} for value in ("4", -4, 1.5, None)),
        *({**GATHER, "median_us": value} for value in (0, -1.0, None, "1", float("nan"), float("inf"))),
        *(
            {key: value for key, value in GATHER.items() if key != missing}
            for missing in ("row_width", "tp", "variant")
        ),
        *({**STEP, "dcp": value} for value in (3, 0, "8")),
        *({**STEP, "batch": value} for value in (-4, "x", None)),
        {**STEP, "kv_cache_dtype": "x"},
        {**STEP, "num_layers": "a"},
        {**STEP, "gpus_per_node": 0},
        {key: value for key, value in STEP.items() if key not in ("context", "median_us")},
    ],
)
def test_bad_rows_are_refused(row: Row, v3: ModelSize, tmp_path: Path) -> None:
    path = write(tmp_path / "bench.json", {"rows": [STEP, row]})
    with pytest.raises(ValueError, match="^--measured is .*bench.json, which has a "):
        read_rows(Path(path), "--measured", v3)


def test_rows_of_other_benchmarks_and_models_have_no_prediction(v3: ModelSize) -> None:
    for path in (
        RESULTS / "h200" / "decode.json",
        RESULTS / "h200" / "sparse.json",
        RESULTS / "h200" / "step.json",
    ):
        assert {predict_row(H200X8, v3, row) for row in read_rows(path, "--measured", v3)} == {None}


def test_direct_is_as_measured() -> None:
    for (operation, width, num_ranks), times in DIRECT.items():
        for num_tokens, time in times.items():
            predicted = ExchangeCosts(H200X8, num_ranks, backend="direct").time_us(operation, num_tokens, 128, width)
            assert within(predicted, time, 1.3), (
                f"{operation} {width} of {num_ranks}, {num_tokens} tokens: {predicted:.1f} us, not {time}"
            )


def test_exchange_is_what_auto_takes(v3: ModelSize) -> None:
    """Inside a node `direct`, up to its ranks; `a2a` across nodes, and on a machine without numbers for `direct`."""
    wide, without = replace(H200X8, gpus_per_node=2 * MAX_SIZE), replace(H200X8, direct=None)
    for machine, tp, dcp, expected in (
        (H200X8, 8, 8, "direct"),
        (H200X8, 32, 4, "direct"),
        (H200X8, 16, 16, "a2a"),
        (wide, 16, MAX_SIZE, "direct"),
        (wide, 16, 2 * MAX_SIZE, "a2a"),
        (without, 8, 8, "a2a"),
        (H200X8, 8, 1, "none"),
    ):
        setting = setting_of(tp, dcp)
        plan = make_plan(Deployment(machine, v3, setting), 8, 4096)
        assert plan.exchange == expected
        for part, operation, width in (("gather", "gather_heads", 576), ("combine", "combine", 512)):
            time = ExchangeCosts(machine, dcp, plan.dcp_num_nodes, expected).time_us(
                operation, 8, 128 // tp * dcp, width
            )
            assert plan.step_us[part] == pytest.approx(61 * time, abs=0.01)


def test_calibration_finds_the_direct_exchange_that_was_measured(v3: ModelSize, tmp_path: Path) -> None:
    """By the rows of `bench exchange`; rows in fp8, other operations and peers are no part of it."""
    direct = Direct(gather_us=6.0, combine_us=8.1, gb_per_s=550)  # as h200x8, but 1.5 times as late and twice as fast
    other = replace(H200X8, direct=direct)
    rows, others = [], []
    for tokens in NUM_TOKENS:
        row = exchange_row("combine", "direct", tokens, heads=64, tp=4, dcp=4, median_us=1000.0)
        for operation, variant, width in (("gather_heads", "", 576), ("combine", "", 512), ("combine", "pbm", 128)):
            time = ExchangeCosts(other, 4, backend="direct").time_us(operation, tokens, 64, width)
            named = {"operation": operation, "variant": variant, "row_width": width}
            rows.append({**row, **named, "median_us": time})
        others.append({**row, "variant": "fp8"})
        others.append({**row, "operation": "gather_context", "heads": None})
        others.append({**row, "exchange": "vllm_direct"})
    found = load_machine(f"h200x8,{write(tmp_path / 'exchange.json', {'rows': [*others, *rows]})}", v3)
    assert found.direct is not None
    assert asdict(found.direct) == pytest.approx(asdict(direct))
    assert found.all_to_all == H200X8.all_to_all
    assert [predict_row(found, v3, row) for row in others] == [None] * len(others)
    times = [predict_row(found, v3, row) for row in rows]
    assert times == pytest.approx([row["median_us"] for row in rows])


def test_a_machine_can_lack_direct(v3: ModelSize, tmp_path: Path) -> None:
    without = write(tmp_path / "pcie.json", {"direct": None})
    machine = load_machine(without, v3)
    assert machine.direct is None
    row = exchange_row("gather_heads", "direct", 1, median_us=1.0)
    assert predict_row(machine, v3, row) is None
    with pytest.raises(ValueError, match="nothing calibrates the machine"):
        calibrate(machine, v3, [row])
    assert calibrate(machine, v3, [{**row, "exchange": "a2a"}]).direct is None
    again = load_machine(f"{without},{write(tmp_path / 'nvlink.json', {'direct': {'gb_per_s': 100}})}", v3)
    assert again.direct == Direct(gather_us=4.0, combine_us=5.4, gb_per_s=100)


def test_measured_steps_have_the_exchange_that_they_name(v3: ModelSize) -> None:
    """Rows of `bench layer`; what it varies beyond the backend has no prediction."""
    for backend in ("a2a", "ag_rs", "direct"):
        row = layer_row("combine", tp=8, dcp=8, exchange=backend)
        time = ExchangeCosts(H200X8, 8, backend=backend).time_us("combine", 32, 128, 512)
        assert predict_row(H200X8, v3, row) == pytest.approx(4 * time)
        assert predict_row(H200X8, v3, {**row, "variant": "pbm"}) is None
        assert predict_row(H200X8, v3, {**row, "part": "output"}) is None
    assert predict_row(H200X8, v3, layer_row("total", tp=8, dcp=8, exchange="other")) is None
    assert predict_row(H200X8, v3, layer_row("total", tp=8, exchange="none")) is not None


def test_presets_are_1_to_16_gpus_of_three_kinds() -> None:
    assert [*PRESETS] == [f"{gpu}x{number}" for gpu in ("h100", "h200", "b200") for number in (1, 2, 4, 8, 16)]
    assert PRESETS["h200x8"] == H200X8
    for name, machine in PRESETS.items():
        assert machine.name == name
        assert name.endswith(f"x{machine.num_gpus}")
        assert machine.num_nodes(machine.num_gpus, machine.num_gpus) == (2 if machine.num_gpus == 16 else 1)
        assert ("two hosts of 8, whose network is assumed: 45 GB/s" in machine.source) == (machine.num_gpus == 16)
        assert machine.source.startswith("measured on" if "h200" in name else "from the datasheet")


def test_presets_of_datasheets_by_hand() -> None:
    """The published rates times the shares that H200s reach of theirs: 4.8 TB/s, 989 TFLOP/s, 450 GB/s each way."""
    h100, b200 = PRESETS["h100x8"], PRESETS["b200x8"]
    assert h100.hbm_gb_per_s == pytest.approx(3113, rel=1e-3)
    assert (h100.matmul_tflops, h100.direct, h100.all_gather) == (700, H200X8.direct, H200X8.all_gather)
    assert b200.hbm_gb_per_s == pytest.approx(7433, rel=1e-3)
    assert b200.copy_gb_per_s == pytest.approx(4500, rel=1e-3)
    assert (b200.matmul_tflops, b200.attention_tflops) == pytest.approx((1593, 1479), rel=1e-3)
    assert b200.direct is not None
    assert (b200.direct.gb_per_s, b200.all_to_all.gb_per_s, b200.nvlink_gb_per_s) == (550, 540, 900)
    assert (b200.direct.gather_us, b200.kernel_us) == (4.0, 1.5)
    assert [machine.memory_bytes / 2**30 for machine in (h100, b200)] == [79, 178]
