"""Prompts that begin alike in models with states, one after the other, through engines as users get them: how many
tokens each reuses (docs/linear.md), and the logits of transformers, or of our formulas where it has no such model.
"""

from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from dcpmla.integrations.engine_options import EngineOptions
from dcpmla.runtime.sampling import SamplingParams
from tests.support.layouts import dcp_config
from tests.support.models import STATE_FAMILIES, save_tiny
from tests.support.oracle import Oracle
from tests.support.ranks import run_ranks
from tests.support.whole_models import load_engine_on_rank

BLOCK = 8  # tokens of a block, over all ranks
# Lengths of a beginning, and the tokens of it that four prompts reuse: none; up to a power of two blocks; all blocks.
SHARED = {64: (0, 64, 64, 64), 45: (0, 32, 40, 40), 9: (0, 8, 8, 8), 7: (0, 0, 0, 0)}
ROWS = {"deepseek_v4": 4}  # tokens of a row that --block-size counts


def prompts() -> list[list[int]]:
    """Return four prompts for each beginning, which go on in other ways for more than a block."""
    rng = Random(1)
    starts = [[rng.randrange(1, 190) for _ in range(length)] for length in SHARED]
    return [[*start, *(rng.randrange(1, 190) for _ in range(11 + num))] for start in starts for num in range(4)]


def serve(directory: Path, family: str, tp: int) -> list[tuple[int, list[int], Tensor]]:
    """On one rank: serve prompts one after the other, with the costs of production; return what each reused, its new
    tokens and their logits.
    """
    dcp = dcp_config(tp, tp, block_size=BLOCK // ROWS.get(family, 1) // tp)
    options = EngineOptions(dtype="float32", max_num_seqs=16, kv_cache_memory_bytes=1 << 24)
    engine = load_engine_on_rank(directory, dcp, options, 128)
    assert engine.allocator.block_tokens == BLOCK
    served = []
    for prompt in prompts():
        request = engine.add(prompt, SamplingParams(max_new_tokens=2, ignore_eos=True), keep_logits=True)
        list(engine.run())
        served.append((request.num_cached_tokens, request.token_ids, torch.stack(request.logits)))
    engine.close()
    return served


@pytest.mark.parametrize(
    ("family", "tp"), [*((family, 1) for family in (*STATE_FAMILIES, "deepseek_v41")), ("kimi_linear", 2)]
)
def test_the_second_prompt_reuses_half_and_the_third_all(family: str, tp: int, tmp_path: Path) -> None:
    reference = save_tiny(family, tmp_path)
    served = run_ranks(tp, serve, tmp_path, family, tp)[0]
    assert [cached for cached, *_ in served] == [cached for row in SHARED.values() for cached in row]
    oracle = Oracle(reference)
    for prompt, (_, tokens, logits) in zip(prompts(), served, strict=True):
        oracle.check(prompt, tokens, logits, atol=1e-3)
