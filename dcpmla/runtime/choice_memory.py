"""The memory in which a step chooses its tokens, claimed once before the cache is allocated."""

import numpy as np
from torch import Tensor

from dcpmla.runtime.batch import Piece
from dcpmla.runtime.logprobs import Logprobs, PromptRows
from dcpmla.runtime.masks import mask_rows
from dcpmla.runtime.penalties import Penalties
from dcpmla.runtime.request import Request
from dcpmla.runtime.sampling import SamplingParams, sample

# Each change of logits, and log probabilities: no request needs more memory for a token.
ALL_CHANGES = SamplingParams(
    max_new_tokens=8,
    ignore_eos=True,
    temperature=1.0,
    top_k=20,
    top_p=0.9,
    min_p=0.01,
    presence_penalty=0.5,
    repetition_penalty=1.1,
    min_tokens=4,
    logit_bias={0: 1.0},
    logprobs=1,
    prompt_logprobs=1,
)


def touch_choice_memory(logits: Tensor, num_choices: int, query_len: int) -> None:
    """Choose tokens with all changes of the logits and score prompts, so that the allocator's peak shows what the
    largest step needs for it.

    Args:
        logits: Logits [num_choices + p, vocab] float32, those of p tokens of prompts last.
        num_choices: Number of rows that tokens are chosen from.
        query_len: Number of a request's rows among them, one and one more for each draft.
    """
    counts = [min(query_len, num_choices - start) for start in range(0, num_choices, query_len)]
    ready = [Piece(Request([0, 0], ALL_CHANGES), count, count - 1) for count in counts]
    starts = [*range(0, num_choices, query_len), num_choices]
    num_scored = len(logits) - num_choices
    prompts = PromptRows([(ready[0].request, num_scored)] if num_scored else [], [], [0] * num_scored)
    penalties = Penalties()  # whose counts stay from step to step
    Logprobs(logits, ready, starts, _choose(logits[:num_choices], ready, penalties), prompts)


def _choose(logits: Tensor, ready: list[Piece], penalties: Penalties) -> Tensor:
    """Choose a token from each row of logits [n, vocab]; return them [n] int64."""
    num_rows, vocab_size = logits.shape
    requests = [piece.request for piece in ready for _ in range(piece.num_tokens)]
    bits = np.full((num_rows, -(-vocab_size // 32)), 0xFFFFFFFF, dtype=np.uint32)
    masked = mask_rows(logits, np.arange(num_rows), bits)
    shaped = penalties.shape_logits(masked, requests, None)
    return sample(shaped, [request.params for request in requests], [0.5] * num_rows)
