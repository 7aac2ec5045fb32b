"""`bench sparse` on CPUs: alone, beside a peer written in torch, and on two ranks; what it measures, and what it finds
wrong.
"""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.peers.attention import load_kernel
from dcpmla.__main__ import main
from dcpmla.attention.select.candidates import EMPTY, unpack_positions
from dcpmla.bench.decode_inputs import Answer, Ours
from dcpmla.bench.sparse import SparseBenchmark
from dcpmla.bench.sparse_inputs import AttentionInputs, SelectedRows, SelectionInputs, SparseCase
from dcpmla.comm.exchange import LocalExchange
from tests.support.fake_peers import write_peers
from tests.support.launchers import run_forked, unattended

CPU = torch.device("cpu")
OPERATIONS = ["index_scores_us", "local_candidates_us", "gather_candidates_us", "choose_tokens_us", "median_us"]
TINY = ["bench", "sparse", "--topk", "16", "--index-heads", "2", "--context", "70"]
alone = pytest.mark.usefixtures("one_process_on_cpu")


def read(
    path: Path,
) -> tuple[dict[str, Any], dict[tuple[Any, ...], dict[str, Any]], dict[tuple[Any, ...], dict[str, Any]]]:
    """Read a file, and its rows of selections and of attention, which differ in dcp, format, and exchange or heads."""
    content = json.loads(path.read_text())
    selections = [row for row in content["rows"] if row["operation"] == "selection"]
    attentions = [row for row in content["rows"] if row["operation"] == "attention"]
    assert len(selections) + len(attentions) == len(content["rows"])
    return (
        content,
        {(row["dcp"], row["index_cache_dtype"], row["exchange"]): row for row in selections},
        {(row["dcp"], row["kv_cache_dtype"], row["heads"]): row for row in attentions},
    )


def check_rows(rows: Sequence[dict[str, Any]], batch: int) -> None:
    for row in rows:
        assert (row["batch"], row["context"], row["topk"], row["dtype"], row["in_graph"]) == (
            batch,
            70,
            16,
            "float32",
            False,
        )
        assert row["num_sets"] > 1
        assert not SparseBenchmark.wrong(row)


@alone
def test_one_process_stands_for_a_rank_of_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sparse.json"
    sizes = [
        "--batch",
        "2",
        "-dcp",
        "4,1",
        "--heads",
        "3,64",
        "--kv-cache-dtype",
        "bf16,fp8,fp8_ds_mla",
        "--index-cache-dtype",
        "auto,fp8",
    ]
    files = ["--peers", str(write_peers(tmp_path)), "--json", str(out), "--commit", "abc"]
    assert main([*TINY, "--device", "cpu", *sizes, *files]) == 0
    content, selections, attentions = read(out)
    assert list(content) == ["commit", "machine", "versions", "rows"]
    assert (content["commit"], content["machine"]) == ("abc", "1 x CPU")
    check_rows(content["rows"], 2)
    assert set(selections) == set(product((1,), ("auto", "fp8"), ("none",))) | set(
        product((4,), ("auto", "fp8"), ("made up",))
    )
    for (dcp, dtype, _), row in selections.items():
        assert [row[key] is None for key in OPERATIONS] == [False, False, True, False, False]  # nothing moves
        # Of 70 tokens rank 0 of 4 has 18; a key is 128 float32, or bytes with a scale.
        assert row["index_bytes"] == 2 * (70 if dcp == 1 else 18) * (512 if dtype == "auto" else 132)
        assert row["index_gb_per_s"] == pytest.approx(row["index_bytes"] / row["index_scores_us"] / 1e3, abs=0.06)
        if dcp == 1:
            assert row["speedup_over_dcp_1"] is None
        else:
            assert row["speedup_over_dcp_1"] == pytest.approx(
                selections[1, dtype, "none"]["median_us"] / row["median_us"], abs=2e-3
            )
    assert set(attentions) == set(product((1, 4), ("bf16", "fp8", "fp8_ds_mla"), (3, 64)))
    for (dcp, dtype, num_heads), row in attentions.items():
        assert row["num_selected"] == 16 if dcp == 1 else 1 <= row["num_selected"] < 16
        assert (
            (row["flashmla_us"] is None)
            == (row["speedup_over_flashmla"] is None)
            == ((dtype, num_heads) != ("fp8_ds_mla", 64))
        )
        if row["flashmla_us"] is not None:
            assert row["speedup_over_flashmla"] == pytest.approx(row["flashmla_us"] / row["median_us"], abs=2e-3)
    report = capsys.readouterr().out
    assert "WRONG" not in report
    assert "selection, dcp 4, made up, fp8 index cache: 0 of 1 wrong; " in report
    assert "x flashmla's speed in the median" in report


@alone
def test_attention_to_shared_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing else is measured; FlashMLA's time is there for fp8_ds_mla and 64 heads."""
    out = tmp_path / "sparse.json"
    sizes = ["--batch", "2", "-dcp", "1,2", "--heads", "3,64", "--shared-keys", "16,40", "--peers"]
    assert main([*TINY, "--device", "cpu", *sizes, str(write_peers(tmp_path)), "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 2 * 2 * 2 * 2
    for row in rows:
        assert (row["operation"], row["context"]) == ("shared_attention", 70)
        assert not SparseBenchmark.wrong(row)
        assert row["num_selected"] == row["topk"] if row["dcp"] == 1 else 1 <= row["num_selected"] < row["topk"]
        assert (row["flashmla_us"] is None) == ((row["kv_cache_dtype"], row["heads"]) != ("fp8_ds_mla", 64))
        assert (row["speedup_over_flashmla"] is None) == (row["flashmla_us"] is None)
    report = capsys.readouterr().out
    assert "attention to 40 shared keys, dcp 1, 64 heads, fp8_ds_mla cache: 0 of 1 wrong; " in report


def test_two_ranks_exchange_candidates(tmp_path: Path) -> None:
    out = tmp_path / "sparse.json"
    sizes = [
        "-tp",
        2,
        "-dcp",
        "1,2",
        "--batch",
        3,
        "--heads",
        4,
        "--kv-cache-dtype",
        "bf16",
        "--index-cache-dtype",
        "fp8",
    ]
    program = [
        "-m",
        "dcpmla",
        *TINY,
        *sizes,
        "--dcp-comm-backend",
        "ag_rs,a2a",
        "--context",
        "70,100000000000",
        "--json",
        out,
    ]
    result, _ = run_forked(unattended(program, 2))
    content, selections, attentions = read(out)
    assert content["machine"] == "2 x CPU"
    check_rows(content["rows"], 3)
    assert set(selections) == {(1, "fp8", "none"), (2, "fp8", "ag_rs"), (2, "fp8", "a2a")}
    for (dcp, *_), row in selections.items():
        assert [key for key in OPERATIONS if row[key] is None] == (["gather_candidates_us"] if dcp == 1 else [])
        assert (row["speedup_over_dcp_1"] is None) == (dcp == 1)
    assert set(attentions) == {(1, "bf16", 4), (2, "bf16", 4)}
    assert "skipped: selection of 3 x 100,000,000,000, dcp 2, fp8 index cache, a2a: " in result.stdout


@alone
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--context", "70,16"], "--context has 16 and --topk is 16; there must be more tokens than are selected"),
        (["--shared-keys", "40,70"], "--context has 70 and --shared-keys is 70; there must be more tokens"),
        (["--shared-keys", "16", "--kv-cache-dtype", "fp8"], "--kv-cache-dtype has fp8, which shared keys do not"),
        (["-dcp", "1,71"], "--context has 70 and -dcp 71; each rank must have a token"),
        (["-tp", "2"], "tensor_parallel_size (-tp) is 2, but 1 ranks were started"),
        (["--index-cache-dtype", "bf16"], "'bf16' is not an index cache's format; choose from auto, fp8"),
        (["--kv-cache-dtype", "fp8,int8"], "'int8' is not a cache format; choose from bf16, fp8, fp8_ds_mla"),
        (["--dcp-comm-backend", "mpi"], "'mpi' is not an exchange"),
        (["--peers", "/nowhere"], "--peers is /nowhere, which has no peers.py"),
        (["--json", "/nowhere/out.json"], "--json is /nowhere/out.json"),
    ],
)
def test_mistakes_are_one_line(options: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--device", "cpu", *options]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert len(captured.err.strip().splitlines()) == 1


@alone
def test_what_cannot_be_measured_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ["--device", "cpu", "--batch", "1", "-dcp", "1", "--heads", "64", "--kv-cache-dtype", "fp8_ds_mla"]
    peers = write_peers(tmp_path) / "peers.py"
    broken = peers.read_text().replace("tokens = kv.flatten(0, 2)", "raise RuntimeError('no kernel\\nfor this')")
    peers.write_text(broken)
    assert (
        main(
            [
                *TINY,
                *sizes,
                "--index-cache-dtype",
                "fp8",
                "--peers",
                str(tmp_path),
                "--json",
                str(tmp_path / "out.json"),
            ]
        )
        == 0
    )
    assert "left out: flashmla of 1 x 70, dcp 1, 64 heads: no kernel\n" in capsys.readouterr().out
    _, _, attentions = read(tmp_path / "out.json")
    assert attentions[1, "fp8_ds_mla", 64]["flashmla_us"] is None
    peers.write_text("def load_flashmla(): open('/gone.so')")
    monkeypatch.setattr("dcpmla.bench.runner.TimeLimit.is_over", lambda _: True)
    assert main([*TINY, *sizes, "--peers", str(tmp_path)]) == 0
    report = capsys.readouterr().out
    assert "left out: flashmla-sparse: [Errno 2] No such file or directory: '/gone.so'" in report
    assert (
        "time is over (--time-limit): attention of 1 x 70, dcp 1, fp8_ds_mla cache and what follows is left out"
        in report
    )


# ---- its parts


@pytest.mark.parametrize("index_cache_dtype", ["auto", "fp8"])
def test_a_wrong_selection_is_found(index_cache_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = SparseCase(2, 200, 16)
    inputs = SelectionInputs(case, 4, index_cache_dtype, torch.float32, CPU, LocalExchange())
    assert inputs.difference() == 0.0
    right, choose = inputs.score, inputs.choose
    monkeypatch.setattr(inputs, "score", lambda index: -right(index))
    assert inputs.difference() > 0.5
    monkeypatch.setattr(inputs, "score", right)

    def misplace(index: int, candidates: torch.Tensor) -> None:
        choose(index, candidates)
        inputs.selection.slots[:, 0] += 1

    monkeypatch.setattr(inputs, "choose", misplace)
    assert 0 < inputs.difference() <= 1 / 16  # one slot, where the positions are right


def test_other_ranks_candidates_have_places_of_their_own() -> None:
    inputs = SelectionInputs(SparseCase(2, 202, 60, dcp_size=4), 4, "auto", torch.float32, CPU, None)
    mine, of_ranks = inputs.nominate(inputs.score(1)), inputs._of_ranks[1]
    assert torch.equal(of_ranks[:, 0], mine)
    assert bool((mine == EMPTY).any())  # 51 tokens here
    assert torch.equal(of_ranks == EMPTY, (mine == EMPTY)[:, None].expand(-1, 4, -1))
    for rank in range(4):
        found = unpack_positions(of_ranks[:, rank])[mine != EMPTY]
        assert found.unique().tolist() == list(range(rank, 201 + rank, 4))
    inputs.select(1)
    assert inputs.difference() == 0.0
    assert 60 / 8 < float(inputs.selection.num_slots.double().mean()) < 60 / 2


@pytest.mark.parametrize(("context", "topk", "dcp_size"), [(2000, 64, 1), (90, 8, 4)])
def test_selected_rows(context: int, topk: int, dcp_size: int, tmp_path: Path) -> None:
    """Slots are of the request's blocks, side by side; none comes again before nearly all came; ours and the peer
    attend to them.
    """
    case = SparseCase(3, context, topk, dcp_size, dcp_rank=dcp_size - 1)
    rows = SelectedRows(case, torch.float32, CPU, "fp8_ds_mla")
    slots = rows.block_tables
    assert (rows.num_slots.tolist() == [topk] * 3) == (dcp_size == 1)
    assert slots.shape == (len(rows), 3, topk)
    is_slot = torch.arange(topk) < rows.num_slots[:, None]
    assert torch.equal(slots >= 0, is_slot.expand_as(slots))
    stride = case.num_local // int(rows.num_slots.max())
    num_caches = rows.blocks.shape[0] // (3 * case.max_blocks)
    assert (num_caches > 1) == (dcp_size > 1)
    until_again = min(len(rows), stride * num_caches)
    assert until_again > num_caches
    for request in range(3):
        of_request = slots[:until_again, request][:, is_slot[request]]
        assert len(of_request.unique()) == of_request.numel()
    blocks = [(slots[0, request][is_slot[request]] // 64).unique() for request in range(3)]
    assert torch.cat(blocks).unique().numel() == sum(map(len, blocks))  # no two requests' are the same
    inputs = AttentionInputs(case, 64, rows)
    for kernel in (Ours(inputs), load_kernel("flashmla-sparse", write_peers(tmp_path))(inputs)):
        assert max(Answer(inputs, 1).errors(*kernel.result(*kernel.launch(1)))) < 1e-4
        assert min(Answer(inputs, 0).errors(*kernel.result(*kernel.launch(1)))) > 0.05  # the set of another call
