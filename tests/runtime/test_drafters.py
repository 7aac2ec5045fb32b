"""The drafters in the engine, over a model that checks its cache: odd steps, and what is held of requests."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from dcpmla.attention.step.metadata import StepBuilder
from dcpmla.cache.latent import LatentCache
from dcpmla.config import DCPConfig
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.graph import StepGraph
from dcpmla.runtime.mtp import MtpDrafter
from dcpmla.runtime.sampling import SamplingParams
from tests.support.engines import new_engine
from tests.support.hash_model import (
    BLOCK,
    MESH,
    VOCAB_SIZE,
    HashModel,
    alone_ignoring_eos,
    answer,
    new_cache,
)


class HashModelWithMtp(HashModel):
    """Its module looks at shapes alone, and drafts what comes along."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_rows = torch.zeros(256, 4)

    def join(self, token_ids: Tensor, hidden_states: Tensor) -> Tensor:
        return torch.cat([token_ids[:, None].float().expand(-1, 4), hidden_states], -1)

    def predict(self, rows: Tensor, metadata: Any, cache: LatentCache) -> Tensor:
        assert len(rows) == metadata.num_tokens
        return rows[:, :4].clone()

    def draft(self, hidden_states: Tensor, metadata: Any, cache: LatentCache) -> Tensor:
        return (7 * hidden_states[:, 0].long() + torch.arange(len(hidden_states))) % VOCAB_SIZE


class Always(MtpDrafter):
    drafts_always = True


def make_mtp_engine(
    num_drafts: int,
    num_blocks: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    model: HashModelWithMtp | None = None,
) -> Engine:
    model, cache = model or HashModelWithMtp(), new_cache(num_blocks)
    dcp = DCPConfig(block_size=BLOCK, context_workspace_tokens=BLOCK * 16)
    limits = cache, StepBuilder(dcp, 0), MESH, min(max_num_seqs, max_num_batched_tokens), 100
    graph = StepGraph.decodes(model.decode, torch.tensor(0), *limits, 1 + num_drafts)
    module = StepGraph.decodes(model.predict, torch.zeros(8), *limits, 1 + num_drafts)
    chain = StepGraph.decodes(model.draft, torch.zeros(4), *limits, num_drafts)
    drafter = Always(num_drafts, model, cache, MESH, module, chain)
    return new_engine(model, cache, dcp, MESH, 100, max_num_batched_tokens, max_num_seqs, graph=graph, drafter=drafter)


@pytest.mark.parametrize("seed", range(30))
def test_mtp_takes_any_load(seed: int) -> None:
    rng = random.Random(seed)
    engine = make_mtp_engine(
        rng.randint(1, 6), rng.randint(8, 40), rng.choice([3, 7, 16, 64]), rng.choice([1, 2, 4, 16])
    )
    requests = []
    for _ in range(rng.randint(1, 9)):
        prompt = rng.choices(range(3), k=rng.randint(1, 12))
        requests.append(engine.add(prompt, SamplingParams(max_new_tokens=rng.randint(1, 18), ignore_eos=True)))
        for _ in range(rng.randint(0, 3)):
            engine.step()
    list(engine.run())
    for request in requests:
        assert request.token_ids == alone_ignoring_eos(request.prompt_token_ids, request.params.max_new_tokens)


def test_mtp_drafts_after_the_last_token_that_was_accepted() -> None:
    """All drafts are wrong, and the next step is launched before that is known."""
    first_positions: list[int] = []

    class Wrong(HashModelWithMtp):
        def draft(self, hidden_states: Tensor, metadata: Any, cache: LatentCache) -> Tensor:
            first_positions.append(int(metadata.tokens.positions[0]))
            return torch.full((len(hidden_states),), VOCAB_SIZE - 2)

    engine = make_mtp_engine(3, 90, 64, 16, Wrong())
    (request,) = answer(engine, [1, 2, 3, 4, 5], num_new=9, ignore_eos=True)
    assert VOCAB_SIZE - 2 not in request.token_ids
    starts = sorted(set(first_positions))
    assert starts == list(range(starts[0], starts[0] + len(starts)))
    assert starts[-1] < len(request.prompt_token_ids) + 9
