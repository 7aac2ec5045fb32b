"""DSpark modules: drafts of the published formulas in plain torch, without a cache, through engines."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dcpmla.integrations.engine_options import EngineOptions
from tests.support.deepseek_v41_files import DSPARK, save_v41
from tests.support.layouts import dcp_config
from tests.support.oracle import Oracle
from tests.support.plain_dspark import PlainDSpark, PlainDSpark41
from tests.support.ranks import run_ranks
from tests.support.two_jobs import record_drafts
from tests.support.whole_models import load_engine_on_rank, serve

BLOCK = 5
PROMPTS = [[5, 9, 2, 7, 7, 1, 30], [11, 12], [*range(40, 71)]]
Record = list[tuple[list[int], list[int]]]


def serve_module(
    directories: Sequence[Path], tp: int, dcp_size: int, interleave: int, num_drafts: int
) -> list[tuple[list[list[int]], Record, list[int]]]:
    """On one rank: each engine's tokens, drafts, and accepted drafts by position."""
    dcp, outcomes = dcp_config(tp, dcp_size, interleave, block_size=8 * interleave), []
    for model in directories:
        options = EngineOptions(
            speculative_method="dspark",
            num_speculative_tokens=num_drafts,
            max_num_batched_tokens=16,
            max_num_seqs=4,
            kv_cache_memory_bytes=1 << 22,
            dtype="float32",
        )
        engine = load_engine_on_rank(model, dcp, options)
        drafter = engine.speculation.drafter
        record = record_drafts(drafter)
        drafter.reads_tokens = True  # so that the host knows all tokens before each draft
        requests = serve(engine, PROMPTS, 12, ignore_eos=True)
        outcomes.append(([request.token_ids for request in requests], record, engine.stats.num_accepted_at))
        engine.close()
    return outcomes


def save_modules(folder: Path) -> tuple[list[Path], list[Any], list[Callable[[list[int], int], list[int]]]]:
    """Save a checkpoint of each model; return their directories, the models, and functions that draft."""
    v4 = PlainDSpark()
    directories = [v4.save(folder / "v4"), folder / "v41"]
    reference = save_v41(directories[1], **DSPARK)
    v41 = PlainDSpark41(reference, reference.model)
    return directories, [v4.base, reference], [v4.drafts, v41.drafts]


@pytest.mark.parametrize(
    ("tp", "dcp_size", "interleave", "num_drafts"), [(1, 1, 1, BLOCK), (2, 1, 1, 3), (2, 2, 1, BLOCK), (4, 4, 2, 4)]
)
def test_drafts_are_those_of_the_formula(
    tp: int, dcp_size: int, interleave: int, num_drafts: int, tmp_path: Path
) -> None:
    directories, models, modules = save_modules(tmp_path)
    ranks = run_ranks(tp, serve_module, directories, tp, dcp_size, interleave, num_drafts)
    assert all(outcome == ranks[0] for outcome in ranks[1:])
    for model, drafts_of, (tokens, record, _) in zip(models, modules, ranks[0], strict=True):
        for prompt, new in zip(PROMPTS, tokens, strict=True):
            Oracle(model).check_tokens(prompt, new, str(model))
        assert len(record) > 10
        assert {len(drafts) for _, drafts in record} == {*range(1, num_drafts + 1)}
        for known, drafts in record:
            assert drafts == drafts_of(known, len(drafts)), len(known)
