"""Forms of tokens (`DCPConfig.deterministic`): prompts attend by MHA and answers with absorbed queries, whatever the
chunks, hits and preemptions.
"""

from collections.abc import Sequence
from hashlib import sha256

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.cache.blocks import block_key
from dcpmla.cache.latent import LatentCache
from dcpmla.integrations.arguments import layout
from dcpmla.ownership import TILE
from dcpmla.runtime.batch import Batch
from dcpmla.runtime.in_flight import InFlightStep
from dcpmla.runtime.request import Request
from dcpmla.runtime.sampling import SamplingParams
from tests.support.costs import DrawnCosts
from tests.support.engine_loads import Load, loads, serve
from tests.support.hash_model import BLOCK, EOS, HashDrafter, HashModel, make_engine, next_token

_GIVEN = 64  # added to the ids of tokens that attend by MHA


class FormModel(HashModel):
    """A hash model whose cache has the form in which each token attended."""

    least_prefill = 1
    has_new_in_chunks = True

    def hidden(self, token_ids: Tensor, metadata: StepMetadata, cache: LatentCache) -> Tensor:
        """Return the logits of all tokens."""
        is_by_mha = torch.arange(len(token_ids)) >= metadata.num_decode_tokens
        return super().hidden(token_ids + _GIVEN * is_by_mha, metadata, cache)


class FormDrafter(HashDrafter):
    """Drafts of the model with forms."""

    def _guess(self, request: Request, num_wanted: int, previous: InFlightStep | None) -> list[int]:
        num_given = len(request.prompt_token_ids)
        self.next_token = lambda sequence: next_token(with_forms(sequence[:num_given], sequence[num_given:]))
        return super()._guess(request, num_wanted, previous)


def with_forms(prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
    """Return the tokens as the cache has them."""
    return [*(token + _GIVEN for token in prompt), *answer]


def expected(prompt: Sequence[int], num_new: int) -> list[int]:
    """Return the answer of a model whose prompt attended by MHA and whose answer did not."""
    tokens: list[int] = []
    while len(tokens) < num_new and EOS not in tokens:
        tokens.append(next_token(with_forms(prompt, tokens)))
    return tokens


@given(
    load=loads(most=8, longest=12),
    seed=st.integers(0, 11),
    graph=st.booleans(),
    drafts=st.sampled_from([0.0, 0.5]),
    num_host_blocks=st.sampled_from([0, 3]),
)
def test_the_form_of_a_token_follows_from_its_position(
    load: Load, seed: int, graph: bool, drafts: float, num_host_blocks: int
) -> None:
    engine = make_engine(
        *load.limits,
        model=FormModel(),
        with_graph=graph,
        drafter=FormDrafter(2, drafts, seed) if drafts else None,
        costs=DrawnCosts(seed),
        num_host_blocks=num_host_blocks,
        deterministic=True,
    )
    serve(engine, load, expected=expected)
    assert engine.allocator.num_free == load.num_blocks


def test_an_answer_in_a_prompt_is_computed_again() -> None:
    """A prompt does not find the blocks of an answer with the same tokens, but it finds other prompts' blocks."""
    engine = make_engine(64, model=FormModel(), deterministic=True)
    prompt = list(range(2 * BLOCK + 1))
    params = SamplingParams(max_new_tokens=3 * BLOCK, ignore_eos=True)
    first = engine.add(prompt, params)
    list(engine.run())
    follow_up = prompt + first.token_ids + [1, 2]
    second, again = engine.add(follow_up, params), engine.add(prompt, params)
    list(engine.run())
    assert second.num_cached_tokens == again.num_cached_tokens == 2 * BLOCK
    assert again.token_ids == first.token_ids
    third = engine.add(follow_up, params)
    list(engine.run())
    assert third.num_cached_tokens == (len(follow_up) - 1) // BLOCK * BLOCK
    assert third.token_ids == second.token_ids


def test_a_preempted_request_finds_its_answer() -> None:
    model = FormModel()
    engine = make_engine(12, 64, 2, model=model, deterministic=True)
    prompts = [list(range(5)), list(range(7, 12))]
    params = SamplingParams(max_new_tokens=7 * BLOCK, ignore_eos=True)
    requests = [engine.add(prompt, params) for prompt in prompts]
    list(engine.run())
    assert requests[1].num_preemptions
    recomputed = sum(sum(step) for step in model.steps) - sum(
        len(prompt) + params.max_new_tokens - 1 for prompt in prompts
    )
    assert 0 < recomputed <= 2 * BLOCK  # not the blocks before these


@pytest.mark.parametrize("num_prompt", [3, 4, 5, 8])
def test_keys_have_the_number_of_given_tokens(num_prompt: int) -> None:
    tokens = list(range(12))

    def keys(num_given: int, has_forms: bool) -> list[bytes]:
        request = Request(tokens[:num_given], SamplingParams(max_new_tokens=16), has_forms=has_forms)
        request.token_ids += tokens[num_given:]
        return request.block_keys(0, 3, 4)

    plain, formed = keys(12, True), keys(num_prompt, True)
    assert keys(num_prompt, False) == plain == keys(12, False)
    num_same = num_prompt // 4
    assert formed[:num_same] == plain[:num_same]
    assert not {*formed[num_same:]} & {*plain}
    assert not {*formed[num_same:]} & {*keys(num_prompt + 1, True)}
    assert block_key(b"", tokens[:4]) == sha256(torch.tensor(tokens[:4]).numpy().tobytes()).digest()


def test_a_last_token_of_a_prompt_is_no_decode() -> None:
    """A prompt's piece of one token follows the decodes, attends by MHA, and the step is in no decode graph."""
    prompt, decode = (Request([1] * num, SamplingParams(), has_forms=True) for num in (5, 3))
    prompt.num_computed_tokens, decode.num_computed_tokens = 4, 3
    decode.token_ids.append(7)
    preempted = Request([1] * 3, SamplingParams(), has_forms=True)
    preempted.token_ids += [4, 5, 6]
    preempted.num_computed_tokens = 3
    batch = Batch(64)
    for request in (prompt, decode, preempted):
        batch.add(request, request.longest_piece)
    assert [piece.num_tokens for piece in batch.pieces] == [1, 1, 3]
    batch.arrange(DrawnCosts(0), max_absorbed_tokens=64)
    assert [piece.request for piece in batch.pieces] == [decode, preempted, prompt]
    assert batch.num_absorbed == 2
    assert batch.has_prompts
    assert [request.is_decode for request in (decode, preempted, prompt)] == [True, False, False]


def test_the_interleave_follows_from_the_mode() -> None:
    assert layout({"deterministic": True}, 4, 4).cp_kv_cache_interleave_size == TILE
    assert layout({"deterministic": True}, 4, 1).cp_kv_cache_interleave_size == 1
    assert layout({}, 4, 4).cp_kv_cache_interleave_size == 1
    with pytest.raises(ValueError, match=r"an interleave of 64"):
        layout({"deterministic": True, "cp_kv_cache_interleave_size": 16}, 4, 4)
    with pytest.raises(ValueError, match=r"cp-kv-cache-interleave-size\) is 64; it must divide block_size"):
        layout({"deterministic": True, "block_size": 16}, 4, 4)
