"""The planner and the exchange `direct`: where a plan has it, what it takes, machines that are measured with it or lack
it.
"""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dcpmla.cli.plan import load_machine
from dcpmla.comm.direct_ops import MAX_SIZE
from dcpmla.planning.deployment import Deployment
from dcpmla.planning.exchange import ExchangeCosts
from dcpmla.planning.machine import H200X8, Direct
from dcpmla.planning.measured import calibrate, predict_row
from dcpmla.planning.recommend import make_plan
from dcpmla.planning.weights import ModelSize
from tests.support.plan_cases import DIRECT, NUM_TOKENS, exchange_row, layer_row, setting_of, within, write


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
