"""`bench sparse` on CPUs: alone, beside a peer written in torch, and on two ranks; what it measures, and what it finds
wrong.
"""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.peers.attention import load_kernel
from dcpmla.attention.select.candidates import EMPTY, unpack_positions
from dcpmla.bench.decode_inputs import Answer
from dcpmla.bench.peers import Ours
from dcpmla.bench.sparse import SelectedRows, SelectionInputs, SparseBenchmark, SparseCase, attention_inputs
from dcpmla.comm.exchange import LocalExchange
from tests.support.benches import Rows, measure
from tests.support.fake_peers import write_peers
from tests.support.launchers import run_forked, unattended

pytestmark = pytest.mark.thorough
CPU = torch.device("cpu")
OPERATIONS = {"index_scores_us", "local_candidates_us", "choose_tokens_us"}
TINY = "sparse --topk 16 --index-heads 2"
DCP, PEER = {1: "none", 4: "made up"}, "flashmla-sparse"
alone = pytest.mark.usefixtures("one_process_on_cpu")


def by_case(rows: Rows, operation: str, *fields: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return the rows of an operation by some fields, which tell them apart."""
    found = [row for row in rows if row["operation"] == operation]
    cases = {tuple(row[field] for field in fields): row for row in found}
    assert len(cases) == len(found)
    return cases


@alone
def test_one_process_stands_for_a_rank_of_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--batch 2 --context 70 -dcp 4,1 --heads 3,64 --kv-cache-dtype bf16,fp8,fp8_ds_mla"
    rows = measure(tmp_path, f"{TINY} {sizes} --index-cache-dtype auto,fp8 --peers {write_peers(tmp_path)}")
    selections = by_case(rows, "selection", "dcp", "index_cache_dtype", "exchange")
    attentions = by_case(rows, "attention", "dcp", "kv_cache_dtype", "heads", "kernel")
    assert set(selections) == {(dcp, name, exchange) for dcp, exchange in DCP.items() for name in ("auto", "fp8")}
    for (dcp, dtype, _), row in selections.items():
        assert row["num_sets"] > 1
        assert row.keys() >= OPERATIONS
        assert "gather_candidates_us" not in row  # nothing moves
        # Of 70 tokens rank 0 of 4 has 18; a key is 128 float32, or bytes with a scale.
        assert row["index_bytes"] == 2 * (70 if dcp == 1 else 18) * (512 if dtype == "auto" else 132)
        assert row["index_gb_per_s"] == pytest.approx(row["index_bytes"] / row["index_scores_us"] / 1e3, abs=0.06)
        assert ("speedup_over_dcp_1" in row) == (dcp == 4)
        if dcp == 4:
            ratio = selections[1, dtype, "none"]["median_us"] / row["median_us"]
            assert row["speedup_over_dcp_1"] == pytest.approx(ratio, abs=2e-3)
    cases = product((1, 4), ("bf16", "fp8", "fp8_ds_mla"), (3, 64), ("dcpmla",))
    assert set(attentions) == {*cases, *((dcp, "fp8_ds_mla", 64, PEER) for dcp in (1, 4))}
    for (dcp, *case, kernel), row in attentions.items():
        assert row["num_selected"] == 16 if dcp == 1 else 1 <= row["num_selected"] < 16
        assert (f"speedup_over_{PEER}" in row) == ((*case, kernel) == ("fp8_ds_mla", 64, "dcpmla"))
    report = capsys.readouterr().out
    assert "WRONG" not in report
    assert (
        "left out: flashmla-sparse of batch 2, context 16, heads 3, query_len 1, kv_cache_dtype fp8_ds_mla: takes 64"
        in report
    )
    assert "selection, dcp 4, made up, heads 2, topk 16, index_cache_dtype fp8: 0 of 1 wrong, " in report
    assert "speedup_over_flashmla-sparse " in report


@alone
def test_attention_to_shared_keys(tmp_path: Path) -> None:
    """Nothing else is measured; FlashMLA takes fp8_ds_mla and 64 heads."""
    sizes = "--batch 2 --context 70 -dcp 1,2 --heads 3,64 --shared-keys 16,40"
    rows = measure(tmp_path, f"{TINY} {sizes} --peers {write_peers(tmp_path)}")
    found = by_case(rows, "shared_attention", "topk", "dcp", "kv_cache_dtype", "heads", "kernel")
    ours = {*product((16, 40), (1, 2), ("bf16", "fp8_ds_mla"), (3, 64), ("dcpmla",))}
    assert set(found) == ours | {*product((16, 40), (1, 2), ("fp8_ds_mla",), (64,), (PEER,))}
    for (topk, dcp, *_), row in found.items():
        assert not SparseBenchmark.wrong(row)
        assert row["num_selected"] == topk if dcp == 1 else 1 <= row["num_selected"] < topk


def test_two_ranks_exchange_candidates(tmp_path: Path) -> None:
    out = tmp_path / "sparse.json"
    sizes = "-tp 2 -dcp 1,2 --batch 3 --heads 4 --kv-cache-dtype bf16 --index-cache-dtype fp8 --context 70,100000000000"
    options = [*TINY.split(), *sizes.split(), "--dcp-comm-backend", "ag_rs,a2a", "--json", out]
    result, _ = run_forked(unattended(["-m", "dcpmla", "bench", *options], 2))
    rows = json.loads(out.read_text())["rows"]
    assert not any(SparseBenchmark.wrong(row) for row in rows)
    selections = by_case(rows, "selection", "dcp", "index_cache_dtype", "exchange")
    assert set(selections) == {(1, "fp8", "none"), (2, "fp8", "ag_rs"), (2, "fp8", "a2a")}
    for (dcp, *_), row in selections.items():
        assert row.keys() >= OPERATIONS
        assert ("gather_candidates_us" in row) == ("speedup_over_dcp_1" in row) == (dcp == 2)
    assert set(by_case(rows, "attention", "dcp", "kv_cache_dtype", "heads")) == {(1, "bf16", 4), (2, "bf16", 4)}
    assert (
        "skipped: selection, batch 3, context 100,000,000,000, topk 16, dcp 2, a2a, index_cache_dtype fp8: "
        in result.stdout
    )


# ---- its parts


def test_a_wrong_slot_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = SelectionInputs(SparseCase(2, 200, 16), 4, "fp8", torch.float32, CPU, LocalExchange())
    assert inputs.difference() == 0.0
    choose = inputs.choose

    def misplace(index: int, candidates: torch.Tensor) -> None:
        choose(index, candidates)
        inputs.selection.slots[:, 0] += 1

    monkeypatch.setattr(inputs, "choose", misplace)
    assert 0 < inputs.difference() <= 1 / 16  # one slot, where the positions are right


def test_other_ranks_candidates_have_places_of_their_own() -> None:
    inputs = SelectionInputs(SparseCase(2, 202, 60, dcp=4), 4, "auto", torch.float32, CPU, None)
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
    case = SparseCase(3, context, topk, dcp_size, rank=dcp_size - 1)
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
    inputs = attention_inputs(case, 64, rows)
    for kernel in (Ours(inputs), load_kernel("flashmla-sparse", write_peers(tmp_path))(inputs)):
        assert max(Answer(inputs, 1).errors(*kernel.result(*kernel.launch(1)))) < 1e-4
        assert min(Answer(inputs, 0).errors(*kernel.result(*kernel.launch(1)))) > 0.05  # the set of another call
