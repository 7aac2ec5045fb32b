"""The planner and the exchange `direct`: where a plan has it, what it takes, machines that are measured with it or lack
it.
"""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dcpmla.comm.direct import MAX_SIZE
from dcpmla.planning.calibrate import calibrate, load_machine
from dcpmla.planning.exchange import exchange_us
from dcpmla.planning.machine import H200X8, Direct
from dcpmla.planning.measured import compare, predict_row, read_rows
from dcpmla.planning.predict import Setting
from dcpmla.planning.recommend import make_plan
from dcpmla.planning.weights import ModelSize
from tests.support.plan_cases import DIRECT, NUM_TOKENS, within, write


def test_direct_is_as_measured() -> None:
    for (operation, width, num_ranks), times in DIRECT.items():
        for num_tokens, time in times.items():
            predicted = exchange_us(H200X8, operation, num_tokens, 128, width, num_ranks, backend="direct")
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
        setting = Setting(tp=tp, dcp=dcp, kv_cache_dtype="bf16")
        plan = make_plan(machine, v3, setting, 8, 4096)
        assert plan.exchange == expected
        for part, operation, width in (("gather", "gather_heads", 576), ("combine", "combine", 512)):
            time = exchange_us(machine, operation, 8, 128 // tp * dcp, width, dcp, plan.dcp_num_nodes, expected)
            assert plan.step_us[part] == pytest.approx(61 * time, abs=0.01)


def test_calibration_finds_the_direct_exchange_that_was_measured(v3: ModelSize, tmp_path: Path) -> None:
    """By the rows of `bench exchange`; those of other variants and operations are no part of it."""
    direct = Direct(gather_us=6.0, combine_us=8.1, gb_per_s=550)  # as h200x8, but 1.5 times as late and twice as fast
    other = replace(H200X8, direct=direct)
    rows = []
    for tokens in NUM_TOKENS:
        row = {
            "backend": "direct",
            "variant": "",
            "tokens": tokens,
            "heads": 64,
            "row_width": 512,
            "world_size": 4,
            "max_error": None,
        }
        for op, variant, width in (("gather_heads", "", 576), ("combine", "", 512), ("combine", "pbm", 128)):
            time = exchange_us(other, op, tokens, 64, width, 4, backend="direct")
            rows.append({**row, "op": op, "variant": variant, "row_width": 128 if variant else 512, "median_us": time})
        rows.append({**row, "op": "combine", "variant": "fp8", "median_us": 1000.0})
        rows.append({**row, "op": "gather_context", "heads": None, "median_us": 1000.0})
        rows.append({**row, "op": "combine", "backend": "vllm_direct", "median_us": 1000.0})
    content = {"machine": "8 x NVIDIA H200", "rows": rows}
    found = load_machine(f"h200x8,{write(tmp_path / 'exchange.json', content)}", v3)
    assert found.direct is not None
    assert asdict(found.direct) == pytest.approx(asdict(direct))
    assert found.all_to_all == H200X8.all_to_all
    comparisons = compare(found, v3, read_rows(content, "exchange.json"))
    assert {c.subject for c in comparisons} == {"direct gather_heads", "direct combine", "direct pbm combine"}
    assert [c.ratio for c in comparisons] == pytest.approx([1] * 3 * len(NUM_TOKENS))


def test_a_machine_can_lack_direct(v3: ModelSize, tmp_path: Path) -> None:
    without = write(tmp_path / "pcie.json", {"direct": None})
    machine = load_machine(without, v3)
    assert machine.direct is None
    row = {"operation": "gather_heads", "backend": "direct", "dcp": 8, "num_tokens": 1, "median_us": 1.0}
    assert compare(machine, v3, [row]) == []
    with pytest.raises(ValueError, match="no rows of one node"):
        calibrate(machine, v3, [row])
    again = load_machine(f"{without},{write(tmp_path / 'nvlink.json', {'direct': {'gb_per_s': 100}})}", v3)
    assert again.direct == Direct(gather_us=4.0, combine_us=5.4, gb_per_s=100)


def test_measured_steps_have_the_exchange_that_they_name(v3: ModelSize) -> None:
    """Rows of `bench layer`; what it varies beyond the backend has no prediction."""
    setting = {"tp": 8, "dcp": 8, "num_layers": 4, "batch": 32, "context": 8192}
    for backend in ("a2a", "ag_rs", "direct", "auto"):
        row = {**setting, "part": "combine", "dcp_comm_backend": backend, "variant": ""}
        assert predict_row(H200X8, v3, row) == pytest.approx(
            4 * exchange_us(H200X8, "combine", 32, 128, 512, 8, backend=backend)
        )
        assert predict_row(H200X8, v3, {**row, "variant": "pbm"}) is None
    assert predict_row(H200X8, v3, {**setting, "part": "total", "dcp_comm_backend": "other"}) is None
    unsharded = {**setting, "dcp": 1, "part": "total"}
    assert predict_row(H200X8, v3, {**unsharded, "dcp_comm_backend": "none"}) == predict_row(H200X8, v3, unsharded)
