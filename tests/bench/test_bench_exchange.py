"""`bench exchange` on two ranks: its rows, its check of what backends give, its mistakes."""

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.exchange import load_vllm_direct
from dcpmla.__main__ import build_parser
from dcpmla.bench.exchange import ExchangeBenchmark, group_sizes
from tests.support.benches import measure_on_gpus
from tests.support.fake_peers import write_exchange_peer
from tests.support.launchers import run_forked, unattended

WIDTH, VALUE_WIDTH, HEADS = 40, 16, 4
SIZES = f"--heads {HEADS},{2 * HEADS} --row-width {WIDTH} --value-width {VALUE_WIDTH}"
EXCHANGE = ["bench", "exchange", *SIZES.split()]


def received_bytes(op: str, tokens: int, heads: int | None, row_width: int) -> int:
    """Count what a rank of two gets from the other one, in float32."""
    if op == "gather_context":
        return -(-tokens // 2) * (WIDTH + 64) * 4
    assert heads is not None
    return tokens * heads // 2 * 4 * (WIDTH + 64 if op == "gather_heads" else row_width + 1)


def is_right(row: dict[str, Any]) -> bool:
    return not ExchangeBenchmark.wrong(row)


WRONG = """
import sys
from dcpmla.__main__ import main
from dcpmla.comm.nccl import AllToAll

def combine(self, out, lse, right=AllToAll.combine):
    merged, merged_lse = right(self, out, lse)
    return merged + self.rank, merged_lse

AllToAll.combine = combine
AllToAll.gather_heads = lambda self, q, right=AllToAll.gather_heads: right(self, q)[:, :1]
start_context = AllToAll.start_context
AllToAll.start_context = lambda *given: (lambda finish: lambda: -finish())(start_context(*given))
sys.exit(main())
"""


def test_two_ranks_measure_and_check_each_operation(tmp_path: Path) -> None:
    """One backend gives wrong rows, merged ones on rank 1 alone: it is reported, and the rest as well.

    A peer only merges, and not all sizes.
    """
    program, out, plot, peers = (tmp_path / name for name in ("program.py", "exchange.json", "exchange.png", "peers"))
    program.write_text(WRONG)
    peers.mkdir()
    options = ["--tokens", "1,257", "--dcp-comm-backend", "ag_rs,a2a", "--peers", write_exchange_peer(peers)]
    options += ["--json", out, "--plot", plot]
    result, other = run_forked(unattended([program, *EXCHANGE, *options, "--commit", "abc"], 2), check=False)
    assert result.returncode == other.returncode == 1
    content = json.loads(out.read_text())
    assert (content["commit"], content["machine"]) == ("abc", "2 x CPU")
    rows = {
        (row["operation"], row["exchange"], row["variant"], row["tokens"], row["heads"]): row for row in content["rows"]
    }
    assert len(rows) == len(content["rows"])
    merges = [*product(("ag_rs", "a2a"), ("", "pbm"), (1, 257)), ("vllm_direct", "", 1)]
    gathers = list(product(("ag_rs", "a2a"), [""], (1, 257)))
    assert set(rows) == {
        *(("gather_heads", *gather, heads) for gather in gathers for heads in (HEADS, 2 * HEADS)),
        *(("combine", *merge, heads) for merge in merges for heads in (HEADS, 2 * HEADS)),
        *(("gather_context", *gather, None) for gather in gathers),
    }
    for (op, backend, variant, tokens, heads), row in rows.items():
        width = VALUE_WIDTH if variant == "pbm" else WIDTH
        assert row["row_width"] == (width if op == "combine" else WIDTH + 64)
        assert (row["tp"], row["dcp"], row["gpus_per_node"], row["dtype"]) == (2, 2, 2, "float32")
        assert (row["in_graph"], row["wire_us"]) == (False, None)
        assert row["median_us"] > 0
        assert row["gb_per_s"] == pytest.approx(
            received_bytes(op, tokens, heads, width) / row["median_us"] / 1e3, abs=6e-4
        )
        assert is_right(row) == (backend != "a2a")
        if op == "combine":
            assert row["error"] > (0.1 if backend == "a2a" else 0)  # float32 against float64
    lines = [line for line in result.stdout.splitlines() if line.startswith("dcp 2, ")]
    assert [", a2a, " in line for line in lines] == ["WRONG: error " in line for line in lines]
    counts = {"ag_rs": "0 of 4", "a2a": "4 of 4", "ag_rs, pbm": "0 of 4", "a2a, pbm": "4 of 4", "vllm_direct": "0 of 2"}
    assert all(f"\ncombine, {series}: {count} wrong\n" in result.stdout for series, count in counts.items())
    skipped = "skipped: dcp 2, combine, vllm_direct, tokens 257, heads 4, row_width 40: vllm_direct takes 256 tokens"
    assert result.stdout.count(skipped) == 1
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_rows_in_fp8_may_be_coarser() -> None:
    """The same of gathers, which are exact otherwise."""
    row = {"operation": "gather_heads", "variant": "fp8", "dtype": "bfloat16", "error": 0.06}
    wrong = [row | change for change in ({"variant": ""}, {"error": 0.07}, {"error": None})]
    assert [is_right(each) for each in (row, *wrong)] == [True, False, False, False]


@pytest.mark.thorough
def test_peers_that_cannot_be_had(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="which has no direct/peer_direct.py; give the directory that has it"):
        load_vllm_direct(tmp_path)
    write_exchange_peer(tmp_path, "of another version")
    with pytest.raises(ValueError, match=r"--peers is .*, whose direct/ cannot be loaded here: undefined symbol$"):
        load_vllm_direct(tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-dcp", "2,3"], "decode_context_parallel_size (-dcp) has 3; it must be 2 or more, and divide the 4 ranks"),
        (["-dcp", "1"], "decode_context_parallel_size (-dcp) has 1; it must be 2 or more"),
        (["--heads", "64,6"], "--heads has 6; a group of 4 ranks must divide it"),
    ],
)
def test_sizes_that_do_not_divide_are_named(options: list[str], message: str) -> None:
    args = build_parser().parse_args(["bench", "exchange", *options])
    with pytest.raises(ValueError, match=re.escape(message)):
        group_sizes(args, 4)


@pytest.mark.alone
@pytest.mark.gpu_2
def test_two_gpus_in_graphs(tmp_path: Path) -> None:
    command = "exchange --tokens 1,64,512 --dcp-comm-backend ag_rs,a2a"
    rows = measure_on_gpus(tmp_path, command, 2)["rows"]
    assert len(rows) == 3 * 2 * (2 * 3 + 1)
    assert [row for row in rows if not is_right(row)] == []
