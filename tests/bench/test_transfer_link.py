"""The benchmark of transfers without engines, between two processes on CPUs."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import transfer_link
from benchmarks.transfer_link import Case, measure, protocol_lines

pytest.importorskip("dcpmla.transfer.nixl", reason="nixl is not installed", exc_type=ImportError)

ROW_BYTES = 2 * 576 * 2  # of a token, in two layers


def test_reads_and_transfers_between_two_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A prompt of 500 tokens has 18 parts of 64 KiB at most; slots are read whole."""
    out, slot_bytes = tmp_path / "out.json", 1 << 16
    command = f"transfer_link.py --device cpu --layers 2 --tokens 500 --slot-kib 64 --repeats 2 --json {out}"
    monkeypatch.setattr(sys, "argv", [*command.split(), "--commit", "abc", "--variant", "UCX_TLS=tcp,self"])
    transfer_link.main()
    read, transfer = json.loads(out.read_text())["rows"]
    assert (read["operation"], read["bytes_read"]) == ("read", -(-500 * ROW_BYTES // slot_bytes) * slot_bytes)
    assert transfer["operation"] == "transfer"
    assert 500 * ROW_BYTES <= transfer["bytes_read"] < 500 * ROW_BYTES + 18 * 16  # pieces begin at multiples of 16
    for row in (read, transfer):
        assert (row["variant"], row["slot_bytes"]) == ("UCX_TLS=tcp,self", slot_bytes)
        assert row["seconds"] > 0
        assert row["part_us"] == pytest.approx(1e6 * row["seconds"] / 18, rel=0.01)
        assert row["gb_per_s"] == pytest.approx(row["bytes_read"] / row["seconds"] / 1e9, rel=0.01, abs=1e-3)


@pytest.mark.gpu
def test_reads_between_processes_on_gpus_pass_no_host() -> None:
    _, lines = measure(Case("read", "", "cuda", num_layers=2, tokens=2000, slot_bytes=1 << 20, repeats=2))
    assert any("cuda_ipc" in line for line in lines), lines


def test_a_process_that_fails_ends_the_case() -> None:
    with pytest.raises(RuntimeError, match="slot_bytes is 10"):
        measure(Case("transfer", "", "cpu", 1, 64, 10, 1))


def test_lines_of_reads_alone_are_kept() -> None:
    log = """
[17.1] [vm:1 :0]   +------+
[17.1] [vm:1 :0]   | True/0 self cfg#0 | remote memory write by ucp_put* from host memory to host |
[17.1] [vm:1 :0]   | 0..inf | zero-copy | cma/memory |
[17.2] [vm:1 :1]   | remote memory read by ucp_get*(multi) into cuda memory from cuda |
[17.2] [vm:1 :1]   | 0..inf | zero-copy | cuda_ipc/cuda |
[17.2] [vm:1 :1]   | active message by ucp_am_send* from host memory |
[17.2] [vm:1 :1]   | 0..inf | short | tcp/lo |
"""
    assert protocol_lines(log.splitlines()) == [
        "| remote memory read by ucp_get*(multi) into cuda memory from cuda |",
        "| 0..inf | zero-copy | cuda_ipc/cuda |",
    ]
