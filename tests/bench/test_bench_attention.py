"""Benchmarks of attention on CPUs: `bench decode` and `bench sparse` alone, beside peers written in torch, and on two
ranks; their inputs, `bench prefill`'s masks, and what answers find wrong.
"""

import json
import math
import re
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.peers.attention import FlashMLA, load_kernel
from dcpmla.attention.backends.mask import unpack_mask
from dcpmla.attention.select.candidates import EMPTY, unpack_positions
from dcpmla.bench import prefill as bench_prefill
from dcpmla.bench.ceilings import Ceilings
from dcpmla.bench.decode_inputs import SCALE, Answer, Caches, DecodeCase, DecodeInputs
from dcpmla.bench.peers import Ours
from dcpmla.bench.sparse import SelectedRows, SelectionInputs, SparseBenchmark, SparseCase, attention_inputs
from dcpmla.bench.timing import ROTATED_BYTES
from dcpmla.cache.formats import to_latents
from dcpmla.comm.exchange import LocalExchange
from tests.support.benches import Rows, measure
from tests.support.fake_peers import write_peers
from tests.support.launchers import run_forked, unattended

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("one_process_on_cpu")]
CPU = torch.device("cpu")
FORMATS = [("bf16", "auto"), ("fp8", "auto"), ("fp8", "fp8"), ("fp8_ds_mla", "auto")]
OPERATIONS = {"index_scores_us", "local_candidates_us", "choose_tokens_us"}
TINY = "sparse --topk 16 --index-heads 2"
PEER = "flashmla-sparse"


# ---- decode


@pytest.fixture
def peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("flashinfer", "flashinfer.mla"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return write_peers(tmp_path)


def test_all_kernels_in_one_run(peers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = ["dcpmla", "dcpmla-torch"], ["flashmla", "fa3", "flashinfer"]
    kernels = [*ours, *theirs, "flashmla-fp8", "flashmla-sparse"]
    read = {
        ("bf16", "auto"): [*ours, *theirs],
        ("fp8", "auto"): ours,
        ("fp8", "fp8"): [*ours, "flashmla-fp8"],
        ("fp8_ds_mla", "auto"): ours,
    }
    sizes = "--heads 3 --batch 3 --context 70 --query-len 1,2 --kv-cache-dtype fp8_ds_mla,fp8,bf16 --dtype bfloat16"
    found = measure(tmp_path, f"decode --peers {peers} --kernels {','.join(kernels)} {sizes}", code=1)
    keys = "batch", "context", "query_len", "kv_cache_dtype", "decode_query_dtype", "kernel"
    rows = {tuple(row[key] for key in keys): row for row in found}
    cases = product((3,), (70,), (1, 2), FORMATS)
    assert set(rows) == {(*sizes, *dtypes, kernel) for *sizes, dtypes in cases for kernel in read[dtypes]}
    ceilings = Ceilings(**json.loads((tmp_path / "bench.json").read_text())["ceilings"])
    for (batch, context, query_len, *dtypes, kernel), row in rows.items():
        case = DecodeCase(batch, context, 3, query_len, *dtypes)
        assert (row["heads"], row["block_size"], row["dtype"]) == (3, 64, "bfloat16")
        floor_us = ceilings.floor_us(case.num_bytes(2), case.flops, in_fp8=dtypes[1] == "fp8")
        assert row["floor_us"] == pytest.approx(floor_us, abs=0.006)
        assert row["tflops"] * row["median_us"] == pytest.approx(case.flops / 1e6, abs=0.001 * row["median_us"])
        is_wrong = kernel == "fa3" and query_len == 2  # it is deaf to the causal bound
        assert (row["error"] > 0.02) == is_wrong
        assert is_wrong or row["error"] < 0.005
        assert is_wrong or row["lse_error"] < 1e-3
        others = [name for name in read[tuple(dtypes)] if name not in ours and (name, query_len) != ("fa3", 2)]
        others += [] if dtypes[0] == "bf16" else ["bf16"]
        ratios = {name: value for name, value in row.items() if name.startswith("speedup_over_")}
        assert set(ratios) == ({f"speedup_over_{name}" for name in others} if kernel in ours else set())
        plain = batch, context, query_len, "bf16", "auto"
        for other, place in (("flashmla", (*plain, "flashmla")), ("bf16", (*plain, kernel))):
            if f"speedup_over_{other}" in ratios:
                ratio = rows[place]["median_us"] / row["median_us"]
                assert ratios[f"speedup_over_{other}"] == pytest.approx(ratio, abs=1e-3)
    report = capsys.readouterr().out
    assert report.count("WRONG") == 1
    assert "fa3: 1 of 2 wrong" in report
    assert re.search(r"^dcpmla: 0 of 2 wrong, .*speedup_over_flashinfer .* in the median", report, re.MULTILINE)
    assert re.search(
        r"^dcpmla, kv_cache_dtype fp8, decode_query_dtype fp8: .*speedup_over_flashmla-fp8 ", report, re.MULTILINE
    )
    assert re.search(r"^dcpmla, kv_cache_dtype fp8_ds_mla: .*speedup_over_bf16 ", report, re.MULTILINE)
    assert report.count("query_len 1, kv_cache_dtype fp8_ds_mla: takes 64 or 128") == report.count("left out: ") == 1


def test_what_a_peer_cannot_do_is_said_once(peers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (peers / "peers.py").read_text()
    (peers / "peers.py").write_text(text.replace("def load_fa3(): pass", "def load_fa3(): open('/gone.so')"))
    sizes = "--heads 3 --batch 1 --context 64,96 --query-len 1 --block-size 32"
    rows = measure(tmp_path, f"decode --peers {peers} {sizes}")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out: ")]
    assert [line.split(": ")[1] for line in lines] == ["fa3", "flashmla of batch 1, context 64, heads 3, query_len 1"]
    assert "gone.so" in lines[0]
    assert "blocks of 64 tokens, not of 32" in lines[1]
    assert {row["kernel"] for row in rows} == {"dcpmla", "flashinfer"}


@pytest.mark.parametrize(("batch", "context", "query_len"), [(1, 1, 1), (3, 7, 1), (2, 9, 4), (1, 4, 4)])
def test_flops_and_bytes_are_counted_key_by_key(batch: int, context: int, query_len: int) -> None:
    case = DecodeCase(batch, context, 5, query_len)
    flops = num_bytes = 0
    for _ in range(batch):
        num_bytes += context * 576 * 2
        for position in range(context - query_len, context):
            num_bytes += 5 * (576 + 512) * 2
            flops += sum(2 * 5 * (576 + 512) for key in range(context) if key <= position)
    assert (case.flops, case.num_bytes(2)) == (flops, num_bytes)
    fewer = [
        num_bytes - case._replace(kv_cache_dtype=cache, decode_query_dtype=queries).num_bytes(2)
        for cache, queries in FORMATS[1:]
    ]
    per_token = batch * context * 576, batch * query_len * 5 * 576
    assert fewer == [per_token[0], sum(per_token), batch * context * (1152 - 656)]


@pytest.mark.parametrize("dtypes", FORMATS)
def test_answers_see_what_is_wrong(dtypes: tuple[str, str]) -> None:
    """Latents are normal, unsaturated; of the newest keys the last one is exp's way to make up for the context."""
    torch.manual_seed(0)
    caches = Caches(3, 70, 32, torch.float32, CPU, dtypes[0])
    blocks = caches.rows[1][caches.block_tables[1].long()].flatten(1, 2)
    latents = to_latents(blocks, 512, caches.kv_scale, torch.float32)
    assert caches.rows.nbytes >= ROTATED_BYTES["cpu"]
    assert float(latents[..., :-1].std()) == pytest.approx(1.0, abs=0.02)
    mark = (2 + math.log(70) / 2) / (8 * SCALE)
    torch.testing.assert_close(latents[:, 66:70, -1], torch.full((3, 4), mark), rtol=1 / 16, atol=0)
    inputs = DecodeInputs(DecodeCase(3, 70, 4, 2, *dtypes), caches)
    kernel, answer = Ours(inputs), Answer(inputs, 1)
    right, lse = kernel.result(*kernel.launch(1))
    assert answer.tokens.tolist() == [0, 1, 4, 5]
    assert max(answer.errors(right, lse)) < 1e-5
    assert max(answer.errors(*kernel.launch(1 + len(caches)))) < 1e-5  # the same set
    assert min(Answer(inputs, 0).errors(right, lse)) > 0.1  # the set of another call
    inputs.seq_lens = inputs.seq_lens.max().expand(6).contiguous()
    assert min(answer.errors(*kernel.launch(1))) > 0.1  # the causal bound is missed


@pytest.mark.parametrize("query_len", [1, 2])
def test_flashmla_sparse_takes_all_tokens(peers: Path, query_len: int) -> None:
    inputs = DecodeInputs(
        DecodeCase(2, 70, 64, query_len, "fp8_ds_mla"), Caches(2, 70, 32, torch.bfloat16, CPU, "fp8_ds_mla")
    )
    kernel = load_kernel("flashmla-sparse", peers)(inputs)
    assert max(Answer(inputs, 1).errors(*kernel.result(*kernel.launch(1)))) < 0.005
    with pytest.raises(ValueError, match="takes 64 or 128 heads, not 16"):
        load_kernel("flashmla-sparse", peers)(DecodeInputs(DecodeCase(2, 70, 16, 1, "fp8_ds_mla"), inputs.caches))


def test_flashmla_says_empty_by_infinity() -> None:
    inputs: Any = type("Inputs", (), {"block_size": 64, "q_scale": None})()
    peers: Any = type("Peers", (), {"FlashMLADense": staticmethod(lambda: None)})
    lse = torch.tensor([[[1.0, math.inf], [2.0, 3.0]]])  # [batch, H, query_len]
    out, rows = FlashMLA(peers, inputs).result(torch.zeros(1, 2, 2, 512), lse)
    assert out.shape == (2, 2, 512)
    assert rows.tolist() == [[1.0, 2.0], [-math.inf, 3.0]]


# ---- sparse MLA


def by_case(rows: Rows, operation: str, *fields: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return the rows of an operation by some fields, which tell them apart."""
    found = [row for row in rows if row["operation"] == operation]
    cases = {tuple(row[field] for field in fields): row for row in found}
    assert len(cases) == len(found)
    return cases


@pytest.mark.parametrize(
    ("operation", "options", "formats", "topks"),
    [
        ("attention", "", ("bf16", "fp8", "fp8_ds_mla"), (16,)),
        ("shared_attention", "--shared-keys 16,40", ("bf16", "fp8_ds_mla"), (16, 40)),  # nothing else is measured
    ],
)
def test_attention_to_selected_rows_beside_a_peer(
    operation: str,
    options: str,
    formats: tuple[str, ...],
    topks: tuple[int, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """FlashMLA takes fp8_ds_mla and 64 heads."""
    command = f"{TINY} --batch 2 --context 70 -dcp 4,1 --heads 3,64 --kv-cache-dtype {','.join(formats)} {options}"
    rows = measure(tmp_path, f"{command} --peers {write_peers(tmp_path)}")
    found = by_case(rows, operation, "topk", "dcp", "kv_cache_dtype", "heads", "kernel")
    ours = {*product(topks, (1, 4), formats, (3, 64), ("dcpmla",))}
    assert set(found) == ours | {*product(topks, (1, 4), ("fp8_ds_mla",), (64,), (PEER,))}
    assert {row["operation"] for row in rows} == {operation} | ({"selection"} if not options else set())
    assert all(row["num_sets"] > 1 for row in rows if row["operation"] == "selection")
    for (topk, dcp, *case), row in found.items():
        assert not SparseBenchmark.wrong(row)
        assert row["num_selected"] == topk if dcp == 1 else 1 <= row["num_selected"] < topk
        assert (f"speedup_over_{PEER}" in row) == (case == ["fp8_ds_mla", 64, "dcpmla"])
    report = capsys.readouterr().out
    assert (
        "left out: flashmla-sparse of batch 2, context 16, heads 3, query_len 1, kv_cache_dtype fp8_ds_mla: " in report
    )
    assert "speedup_over_flashmla-sparse " in report


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


# ---- prefill


@pytest.mark.parametrize(("tokens", "context"), [(30, 0), (7, 64)])
def test_a_token_selects_topk_keys_or_all_that_it_sees(tokens: int, context: int) -> None:
    case = bench_prefill.PrefillCase(1, tokens, context, topk=12)
    mask = bench_prefill.PrefillInputs(case, torch.float32, torch.device("cpu")).mask
    assert mask is not None
    bits = unpack_mask(mask, case.num_keys)
    assert bits.sum(1).tolist() == [min(12, token + 1) if context == 0 else 12 for token in range(tokens)]
    if context == 0:
        assert torch.equal(bits, bits.tril())
