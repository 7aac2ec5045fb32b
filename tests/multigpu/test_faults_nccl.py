"""Faults of `generate` over NCCL without a launcher that would end the other rank: one line each, and all end."""

import re
import signal
from pathlib import Path

import pytest

from tests.support.faulty import begins_with
from tests.support.generate_jobs import MARGIN, at, direct
from tests.support.models import save_tiny

TIMEOUT = 15  # seconds: the first step starts NCCL and loads kernels
FAULTY = "decode step 8"
STEP = r"decode step [89]\b"  # no host waits for another: one may be a step ahead

FAULTS = {
    "killed": (at(FAULTY, "kill"), None, [1, -9], f"rank 0 .* in {STEP} .*: rank 1 is missing, last seen .* in {STEP}"),
    "asleep": (at(FAULTY, "sleep"), None, [1, 1], rf"rank [01] (waited|has not come back) .*{STEP} .*at faulty.py"),
    "told to stop": (
        at(FAULTY, "sleep"),
        (signal.SIGTERM, 0),
        [143, 143],
        rf"rank 0 was asked to stop \(SIGTERM\) in {STEP}",
    ),
}


def test_a_fault_waits_for_its_own_step() -> None:
    """Steps have more digits before it: the warm-up counts its own."""
    assert begins_with(f"{FAULTY} (2 requests, 2 tokens)", FAULTY)
    assert not any(begins_with(f"decode step {number} (2 requests)", FAULTY) for number in (80, 81, 88, 812, 18))


@pytest.mark.gpu_2
@pytest.mark.parametrize("name", FAULTS)
def test_both_end_with_one_line(name: str, tmp_path: Path) -> None:
    save_tiny("deepseek_v3", tmp_path)
    fault, sent, codes, line = FAULTS[name]
    ended = direct(tmp_path, fault, sent, device="cuda", timeout=TIMEOUT)
    assert ended.codes == codes, ended.text
    assert len(ended.lines) == 1, ended.text
    assert re.search(f"dcpmla: error: {line}", ended.lines[0]), ended.lines[0]
    assert ended.seconds < TIMEOUT + MARGIN
    assert len(ended.ids) == 2
