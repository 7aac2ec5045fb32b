"""SGLang's plug-in where there is no SGLang: what a release is told that it does not know, and a batch's layout."""

import logging
from types import SimpleNamespace

import pytest
import torch

from dcpmla import DCPConfig
from dcpmla.attention.step.metadata import StepBuilder
from dcpmla.attention.step.table import StepRequests
from dcpmla.integrations import sglang
from dcpmla.integrations.sglang.metadata import MetadataBuilder, is_prefill

W, PAGE, CONTEXT = 2, 4, 32
PAGES = ([3, 1, 6], [2], [5, 4])  # of three requests, in SGLang's rows 4, 0 and 2
ROWS = (4, 0, 2)
LENS = (19, 3, 16)


@pytest.mark.parametrize("release", ["0.5.21", "0.5.24", "0.6.0", "0.5.230"])
def test_another_release_is_left_alone(
    release: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sglang, "version", lambda name: release)
    with caplog.at_level(logging.WARNING):
        sglang.register()  # would import SGLang
    assert caplog.messages == [
        f"dcpmla: sglang {release} is not among the tested releases (0.5.22, 0.5.23); --attention-backend dcpmla is "
        "not added"
    ]


def test_a_patch_of_a_tested_release_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "version", lambda name: "0.5.23.post1")
    with pytest.raises(ModuleNotFoundError, match="sglang"):
        sglang.register()


def slots_of_requests() -> torch.Tensor:
    """Return SGLang's table of slots, which counts those of both ranks."""
    req_to_token = torch.full((6, CONTEXT), 999, dtype=torch.int32)
    for row, pages in zip(ROWS, PAGES, strict=True):
        slots = torch.cat([torch.arange(page * PAGE * W, (page + 1) * PAGE * W) for page in pages])
        req_to_token[row, : len(slots)] = slots
    return req_to_token


DCP = DCPConfig(tensor_parallel_size=W, decode_context_parallel_size=W, block_size=PAGE)
SLOTS = slots_of_requests()


def batch_of(query_lens: tuple[int, ...], device: str = "cpu") -> SimpleNamespace:
    """Return the part of SGLang's batch that is read: the requests' last tokens are new."""
    lens = torch.tensor(LENS)
    new = [SLOTS[row, length - query : length] for row, length, query in zip(ROWS, LENS, query_lens, strict=True)]
    return SimpleNamespace(
        req_pool_indices=torch.tensor(ROWS, device=device),
        seq_lens=lens.to(device),
        seq_lens_cpu=lens,
        extend_seq_lens_cpu=list(query_lens),
        extend_prefix_lens_cpu=[length - query for length, query in zip(LENS, query_lens, strict=True)],
        out_cache_loc=torch.cat(new).to(device, torch.int64),
    )


def builder(rank: int, slots: torch.Tensor = SLOTS, max_query_len: int = 1) -> MetadataBuilder:
    """Return the builder of a rank whose group has two heads."""
    return MetadataBuilder(DCP, rank, slots, 2, max_query_len)


@pytest.mark.parametrize("rank", range(W))
def test_a_batch_is_laid_out_as_ours_are(rank: int) -> None:
    made, ones, several = builder(rank), batch_of((1, 1, 1)), batch_of((2, 3, 7))
    expected = StepBuilder(DCP, rank).build(StepRequests([1, 1, 1], LENS, PAGES))
    assert expected.decode is not None
    ((tokens, found),) = made.decodes(ones, 1, 0)
    assert tokens == slice(0, 3)
    assert found.local_seq_lens.tolist() == expected.decode.local_seq_lens.tolist()
    assert [row[: len(pages)] for row, pages in zip(found.block_table.tolist(), PAGES, strict=True)] == list(PAGES)
    assert (found.query_start_loc, found.max_query_len) == (None, 1)
    assert (found.block_table.dtype, found.local_seq_lens.dtype) == (torch.int32, torch.int32)
    assert made.slots(ones).tolist() == expected.tokens.slots.tolist()
    expected = StepBuilder(DCP, rank).build(StepRequests([2, 3, 7], LENS, PAGES))
    assert str(made.prefill(several)) == str(expected.prefill)
    assert made.slots(several).tolist() == expected.tokens.slots.tolist()


@pytest.mark.parametrize("rank", range(W))
def test_drafts_are_laid_out_as_ours_are(rank: int) -> None:
    """Three tokens a request, of which SGLang has counted none, or all; and the host's lengths, or none."""
    made, batch = builder(rank, max_query_len=3), batch_of((3, 3, 3))
    expected = StepBuilder(DCP, rank).build(StepRequests([3, 3, 3], LENS, PAGES), 3)
    assert expected.decode is not None
    for num_ahead, knows_lens in ((0, True), (3, True), (3, False)):
        batch.seq_lens = torch.tensor(LENS) - num_ahead
        batch.seq_lens_cpu = batch.seq_lens if knows_lens else None
        ((tokens, found),) = made.decodes(batch, 3, num_ahead)
        assert tokens == slice(0, 9)
        assert found.local_seq_lens.tolist() == expected.decode.local_seq_lens.tolist()
        assert [row[: len(pages)] for row, pages in zip(found.block_table.tolist(), PAGES, strict=True)] == list(PAGES)
        assert (found.queries, found.max_query_len, found.request_index) == (None, 3, None)


@pytest.mark.parametrize("rank", range(W))
def test_short_prompts_are_decodes(rank: int) -> None:
    ((tokens, found),) = builder(rank).short_prefills(batch_of((2, 3, 7)))
    expected = StepBuilder(DCP, rank).build(StepRequests([2, 3, 7], LENS, PAGES), 64, num_decodes=3)
    assert expected.decode is not None
    assert expected.decode.queries is not None
    assert found.queries is not None
    assert tokens == slice(0, 12)
    assert found.local_seq_lens.tolist() == expected.decode.local_seq_lens.tolist()
    assert found.queries.start == expected.decode.queries.start


@pytest.mark.parametrize(("lens", "expected"), [([128, 1], False), ([129], True)])
def test_a_batch_with_a_long_prompt_is_a_prefill(lens: list[int], expected: bool) -> None:
    extend = SimpleNamespace(is_extend_without_speculative=lambda: True)
    assert is_prefill(SimpleNamespace(forward_mode=extend, extend_seq_lens_cpu=lens)) == expected
    drafts = SimpleNamespace(is_extend_without_speculative=lambda: False)
    assert not is_prefill(SimpleNamespace(forward_mode=drafts, extend_seq_lens_cpu=lens))


@pytest.mark.gpu
@pytest.mark.parametrize(("max_query_len", "lens"), [(1, [10, 2, 8]), (2, [9, 10, 1, 2, 8, 8])])
def test_a_graph_lays_out_what_came_after_its_capture(max_query_len: int, lens: list[int]) -> None:
    made, batch = builder(0, SLOTS.cuda(), max_query_len), batch_of((1, 1, 1), "cuda")
    after = batch.seq_lens.clone()
    batch.seq_lens.fill_(1)
    batch.seq_lens_cpu = torch.ones(3, dtype=torch.int64)
    made.decodes(batch, max_query_len, 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ((_, found),) = made.decodes(batch, max_query_len, 0)
    batch.seq_lens.copy_(after)
    graph.replay()
    assert [row[: len(pages)] for row, pages in zip(found.block_table.tolist(), PAGES, strict=True)] == list(PAGES)
    assert found.local_seq_lens.tolist() == lens
