"""The head that is trained for the chat model: the same drafts are accepted under every DCP size, more than an n-gram
lookup's, in conversations of words that no training had.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import transformers

from dcpmla.integrations.engine_options import EngineOptions
from dcpmla.runtime.speculation import Speculation
from tests.support.layouts import dcp_config
from tests.support.ranks import run_ranks
from tests.support.whole_models import load_engine_on_rank, serve

CHAT = Path(__file__).parents[2] / "examples" / "chat"
NUM_DRAFTS, NUM_PROMPTS, NUM_NEW = 3, 20, 24
LAYOUTS = ((1, 1), (2, 2), (4, 4))


class Served(NamedTuple):
    """What an engine has served.

    Attributes:
        answers: New tokens of each request.
        lengths: Numbers of drafts, and of accepted ones, in each step of a request.
        tokens_a_step: Tokens of a step with drafts.
    """

    answers: list[list[int]]
    lengths: dict[str, list[tuple[int, int]]]
    tokens_a_step: float


def held_out_prompts() -> list[list[int]]:
    """Return conversations as the training script makes them to measure."""
    with patch.object(sys, "path", [str(CHAT), *sys.path]):
        import train_eagle3

        tokenizer = transformers.AutoTokenizer.from_pretrained(CHAT / "model")
        prompts: list[list[int]] = train_eagle3.held_out_prompts(tokenizer, 7, NUM_PROMPTS)
        return prompts


def serve_chats(prompts: list[list[int]], tp: int, dcp_size: int, method: str) -> Served:
    """On one rank: serve prompts in engines that draft in every step."""
    head = {"speculative_model": str(CHAT / "eagle3")} if method == "eagle3" else {}
    options = EngineOptions(
        speculative_method=method,
        num_speculative_tokens=NUM_DRAFTS,
        max_num_batched_tokens=96,
        max_num_seqs=4,
        kv_cache_memory_bytes=4 << 20,
        dtype="float32",
        **head,
    )
    engine = load_engine_on_rank(CHAT / "model", dcp_config(tp, dcp_size), options)
    lengths, accept = dict[str, list[tuple[int, int]]](), Speculation.accept
    engine.speculation.drafter.drafts_always = True

    def accepting(speculation: Speculation, piece: Any, drafts: Any, num_accepted: int) -> int:
        lengths.setdefault(piece.request.request_id, []).append((len(drafts), num_accepted))
        return accept(speculation, piece, drafts, num_accepted)

    with patch.object(Speculation, "accept", accepting):
        requests = serve(engine, prompts, NUM_NEW)
    stats = engine.stats
    engine.close()
    return Served([each.token_ids for each in requests], lengths, 1 + stats.num_accepted_tokens / stats.num_drafts)


def test_accepted_drafts_are_the_same_under_every_dcp() -> None:
    prompts = held_out_prompts()
    served = [rank for tp, dcp in LAYOUTS for rank in run_ranks(tp, serve_chats, prompts, tp, dcp, "eagle3")]
    (looked_up,) = run_ranks(1, serve_chats, prompts, 1, 1, "ngram")
    assert sum(map(len, served[0].lengths.values())) > 80
    for other in served[1:]:
        assert other.answers == served[0].answers == looked_up.answers
        assert other.lengths == served[0].lengths
    print(f"\ntokens a step: eagle3 {served[0].tokens_a_step:.2f}, ngram {looked_up.tokens_a_step:.2f}")
    assert served[0].tokens_a_step > looked_up.tokens_a_step
    assert served[0].tokens_a_step > 2
