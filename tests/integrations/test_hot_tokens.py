"""Whole models with latents in host memory: the answers of transformers, while all rows of the device that are not hot
hold NaN, and the same features in use as without.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dcpmla.cache import hot
from dcpmla.config import DCPConfig
from dcpmla.integrations.engine_options import EngineOptions
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.sampling import SamplingParams
from tests.support.layouts import dcp_config
from tests.support.models import save_tiny
from tests.support.oracle import Answer, Oracle
from tests.support.ranks import run_ranks
from tests.support.whole_models import answers_of, draw_prompts, load_engine_on_rank

MAX_LEN, TOPK = 160, 24
# Contexts of many times topk tokens, and short ones, in which all tokens are selected.
LENGTHS = (100, 130, 7, 61)


def hot_engine(directory: Path, dcp: DCPConfig, device_type: str = "cpu", **options: Any) -> Engine:
    """Return an engine whose device holds NaN wherever it has no hot row, before every step."""
    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 33, "dtype": "float32", "kv_offloading_size": 0.02}
    engine = load_engine_on_rank(directory, dcp, EngineOptions(**defaults | options), MAX_LEN, device_type)
    sets = [cache.hot for cache in engine.cache if cache.hot is not None]
    assert len(sets) == len(engine.cache.per_layer)
    if options.get("speculative_method") != "mtp":  # whose layer also reads rows that nothing has written
        for cache in engine.cache:
            cache.latents.view(torch.uint8).fill_(0xFF)

    def poison(_: str) -> None:
        sets[0].pool[sets[0].first_scratch :].view(torch.uint8).fill_(0xFF)
        for each in sets:
            rows = each.pool[each.first_row : each.first_row + len(each.slot_of)]
            rows.view(torch.uint8)[each.slot_of == 0] = 0xFF

    engine.on_step = poison
    return engine


def serve(engine: Engine, prompts: Sequence[Sequence[int]], num_new: int = 8) -> list[Answer]:
    params = SamplingParams(max_new_tokens=num_new, ignore_eos=True)
    requests = [engine.add(list(prompt), params, keep_logits=True) for prompt in prompts]
    list(engine.run())
    assert engine.allocator.num_free == engine.allocator.num_blocks
    return answers_of(requests)


def serve_twice(
    directory: Path, layouts: Sequence[DCPConfig], scratch_tokens: int, device_type: str = "cpu"
) -> list[list[Answer]]:
    """On one rank: serve prompts in each layout, then their answers and more as prompts, whose prefixes are found.

    Args:
        scratch_tokens: Tokens of a call of attention that find their rows, if no row is hot.
    """
    results = []
    prompts = draw_prompts(LENGTHS)
    for dcp in layouts:
        hot.SCRATCH_BYTES = scratch_tokens * TOPK * 24 * 4
        engine = hot_engine(directory, dcp, device_type)
        first = serve(engine, prompts)
        turns = [[*prompt, *tokens, 5, 9] for prompt, (tokens, _) in zip(prompts, first, strict=True)]
        second = serve(engine, turns)
        counts = torch.stack([cache.hot.counts for cache in engine.cache if cache.hot is not None])
        assert (counts[:, 1:3] > 0).all(), counts  # hits and misses in each layer
        results.append([*first, *second])
        engine.close()
    return results


def check(directory: Path, family: str, results: list[list[list[Answer]]]) -> None:
    """Assert that all ranks have transformers' answers in all layouts."""
    oracle, prompts = Oracle(save_tiny(family, directory)), draw_prompts(LENGTHS)
    for layouts in results:
        for answers in layouts:
            first = answers[: len(prompts)]
            turns = [[*prompt, *tokens, 5, 9] for prompt, (tokens, _) in zip(prompts, first, strict=True)]
            for prompt, (tokens, logits) in zip([*prompts, *turns], answers, strict=True):
                oracle.check(prompt, tokens, logits)


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
@pytest.mark.parametrize(
    ("num_ranks", "layouts"),
    [
        (1, [dcp_config(1, 1, kv_hot_tokens=TOPK, block_size=8), dcp_config(1, 1, kv_hot_tokens=300, block_size=8)]),
        (2, [dcp_config(2, 1, kv_hot_tokens=50, block_size=8), dcp_config(2, 2, kv_hot_tokens=TOPK, block_size=4)]),
        (
            4,
            [
                dcp_config(4, 4, 2, kv_hot_tokens=TOPK, block_size=4),
                dcp_config(4, 2, 4, kv_hot_tokens=90, block_size=4),
            ],
        ),
    ],
)
def test_answers(family: str, num_ranks: int, layouts: list[DCPConfig], tmp_path: Path) -> None:
    save_tiny(family, tmp_path)
    check(tmp_path, family, run_ranks(num_ranks, serve_twice, tmp_path, layouts, 3, timeout=400))
