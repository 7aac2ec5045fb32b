"""A request on its way through the engine."""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from dcpmla.cache.blocks import block_key, salt_key
from dcpmla.runtime.acceptance import Acceptance
from dcpmla.runtime.progress import Loading
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.text.stream import TextStream
from dcpmla.text.token_bytes import Tokenizer
from dcpmla.transfer.handoff import Handoff

# New tokens that another process may still have to search for stop strings before the request waits for it.
MAX_UNSEEN_TOKENS = 64


class TokenLogprobs(NamedTuple):
    """A token's log probability, None for a prompt's first one, and (token id, log probability) of the best tokens."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


class Prompt(NamedTuple):
    """A prompt that the engine has checked. Requests that are added with it share its tokens and keys.

    Attributes:
        cache_salt: Salt of its blocks, "" for none: requests with different salts never share a block.
        block_keys: Known keys of its full blocks.
    """

    token_ids: Sequence[int]
    cache_salt: str
    block_keys: list[bytes]


@dataclass(eq=False)
class Request:
    """A prompt and its progress. Times are seconds on the engine's clock.

    Attributes:
        request_id: Name chosen by the caller.
        cache_salt, prompt_keys: Salt and keys of the prompt's blocks (`Prompt`).
        has_forms: Whether the prompt's tokens attend by MHA and its new ones with absorbed queries, in pieces of any
            size (`DCPConfig.deterministic`). If not, the costs of each piece decide.
        keep_logits: Whether to keep the logits of its tokens.
        keep_logprobs: Whether this rank keeps log probabilities, if params ask for them.
        tokenizer: Tokenizer of its text; None without one.
        token_ids: New tokens so far, including a stop token.
        logits: Logits that each new token was chosen from [vocab], float32, if they are to be kept.
        logprobs: Log probabilities of new tokens, if params ask for them.
        prompt_logprobs: Log probabilities of the prompt's tokens, complete with the first new token.
        finish_reason: Reason of the end: "stop" at an end-of-sequence token, a stop token or a stop string, "length" at
            max_new_tokens, "abort" by the caller, "error" if logits are not finite; None before.
        error: FloatingPointError of an end as "error".
        has_stop_token: Whether its last token ended it: an end-of-sequence or a stop token.
        num_seen_tokens: New tokens that another process has searched for stop strings; None if no other does.
        state: Index of its state in a cache with states; None while it does not run.
        loading: Blocks and state on their way from host memory, until a step waits for them, or from another job; None
            without.
        sending: Transfer of its blocks and state to another job; None without.
        source: Name of the job that holds its prompt's blocks, and the transfer's name there, until they are read; None
            without.
        is_local: Whether this job prefills it in any case.
        num_in_flight: New tokens that steps in flight sample. They count, but are not yet on the host.
        num_tried: Drafts that the step in flight verifies; each may become a token.
        num_computed_tokens: Tokens whose latents are in the cache, or are written by the step in flight.
        num_cached_tokens: Tokens of the prompt that an earlier request had computed.
        latest_key: Key of the block after which its latest state was remembered; None in caches without states.
        has_finite_scores: Whether the logits of its prompt were finite so far, bool on the device; None if it is not
            scored, and after its first token.
        num_scored_tokens: Tokens of the prompt whose successors' log probabilities are known, or being computed.
        num_preemptions: Times that its blocks were taken away, so that it was computed again.
        acceptance: Acceptance of its drafts.
    """

    prompt_token_ids: Sequence[int]
    params: SamplingParams
    request_id: str | int = 0
    arrival_time: float = 0.0
    cache_salt: str = ""
    prompt_keys: list[bytes] = field(default_factory=list)
    has_forms: bool = False
    keep_logits: bool = False
    keep_logprobs: bool = True
    tokenizer: Tokenizer | None = None

    token_ids: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    error: Exception | None = None
    has_stop_token: bool = False
    num_seen_tokens: int | None = None
    scheduled_time: float | None = None
    first_token_time: float | None = None
    finish_time: float | None = None

    block_ids: "array[int]" = field(default_factory=lambda: array("q"))
    state: int | None = None
    loading: Loading | None = None
    sending: Handoff | None = None
    source: tuple[str, str] | None = None
    is_local: bool = False
    num_in_flight: int = 0
    num_tried: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_remembered_blocks: int = 0
    latest_key: bytes | None = None
    has_finite_scores: Tensor | None = None
    num_scored_tokens: int = 0
    num_preemptions: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)
    _new_keys: list[bytes] = field(default_factory=list)  # full blocks after the prompt's
    _mark: Tensor = field(default_factory=lambda: torch.empty(0))  # the generator's state before the steps in flight

    def __post_init__(self) -> None:
        if self.params.prompt_logprobs is not None and self.keep_logprobs:
            self.prompt_logprobs.append(TokenLogprobs(self.prompt_token_ids[0], None, ()))

    @cached_property
    def generator(self) -> torch.Generator:
        """Return the request's random generator, which depends only on its seed, not on other requests or ranks."""
        return new_generator(self.params.seed)

    def draw(self, num_draws: int) -> list[float]:
        """Return num_draws random numbers in [0, 1) for the next step's tokens. If the step in flight verifies drafts,
        they begin one later for each accepted draft, so num_tried more are returned.
        """
        if self.num_tried:
            self.generator.set_state(self._mark)
            self._rand(1)
        elif num_draws > 1:
            self._mark = self.generator.get_state()
        return self._rand(self.num_tried + num_draws)

    def keep_draws(self, num_draws: int) -> None:
        """Restore the generator to its state after num_draws numbers of a step with drafts, once it is complete."""
        if self.params.temperature:
            self.generator.set_state(self._mark)
            self._rand(num_draws)
            if self.num_in_flight:  # the next step may be restored in turn
                self._mark = self.generator.get_state()
                self._rand(1 + self.num_tried)

    def _rand(self, num_draws: int) -> list[float]:
        numbers: list[float] = torch.rand(num_draws, dtype=torch.float64, generator=self.generator).tolist()
        return numbers

    @property
    def text(self) -> str:
        """Return the text of the new tokens, decoded anew; empty without a tokenizer."""
        if self.tokenizer is None:
            return ""
        stream = TextStream(self.tokenizer, self.params, self.prompt_token_ids)
        if self.finish_reason is None:
            return stream.push(self.token_ids)
        return stream.end(self.token_ids, self.has_stop_token)

    @property
    def is_loading(self) -> bool:
        """Return whether some rank may still copy its blocks or its state into the cache."""
        return self.loading is not None and not self.loading.has_ended

    @property
    def max_seq_len(self) -> int:
        """Return the largest number of tokens in the cache: all but the last new one."""
        return len(self.prompt_token_ids) + self.params.max_new_tokens - 1

    @property
    def num_known_tokens(self) -> int:
        """Return the number of tokens whose ids are on the host."""
        return len(self.prompt_token_ids) + len(self.token_ids)

    @property
    def num_kept_tokens(self) -> int:
        """Return the number of known tokens that no stop string takes back."""
        num_new = len(self.token_ids)
        num_seen = num_new if self.num_seen_tokens is None else min(self.num_seen_tokens, num_new)
        return len(self.prompt_token_ids) + num_seen

    @property
    def is_held(self) -> bool:
        """Return whether it waits for the process that searches its text, which has many tokens left."""
        return self.num_seen_tokens is not None and self.num_new_tokens - self.num_seen_tokens >= MAX_UNSEEN_TOKENS

    @property
    def num_new_tokens(self) -> int:
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.token_ids) + self.num_in_flight

    @property
    def can_draft(self) -> bool:
        """Return whether drafts may follow its tokens. They may not if a choice depends on previous tokens or on their
        number, or if log probabilities are kept.
        """
        return not (self.params.has_penalties or self.is_short) and self.params.logprobs is None

    @property
    def is_short(self) -> bool:
        """Return whether the next token to be chosen is one of the first min_tokens, which end no request."""
        least = self.params.min_tokens
        return least > 0 and self.num_new_tokens < least

    @property
    def is_scored(self) -> bool:
        """Return whether log probabilities of its prompt are still to be computed."""
        return self.params.prompt_logprobs is not None and self.num_scored_tokens < len(self.prompt_token_ids) - 1

    @property
    def num_pending_tokens(self) -> int:
        """Return the number of tokens left to compute: none while the step in flight may sample the final token, which
        is never computed.
        """
        num_new = len(self.token_ids) + self.num_in_flight
        if num_new + self.num_tried >= self.params.max_new_tokens:
            return 0
        return len(self.prompt_token_ids) + num_new - self.num_computed_tokens

    @property
    def is_in_prompt(self) -> bool:
        """Return whether the next token to compute is the prompt's."""
        return self.num_computed_tokens < len(self.prompt_token_ids)

    @property
    def is_decode(self) -> bool:
        """Return whether one token is left to compute, which drafts may follow."""
        return self.num_pending_tokens == 1 and not (self.has_forms and self.is_in_prompt)

    @property
    def is_prefill(self) -> bool:
        """Return whether tokens are left to compute in pieces."""
        return self.num_pending_tokens > 0 and not self.is_decode

    @property
    def longest_piece(self) -> int:
        """Return the largest number of tokens in a piece: all pending ones, or the prompt's if tokens have forms."""
        if self.has_forms and self.is_in_prompt:
            return len(self.prompt_token_ids) - self.num_computed_tokens
        return self.num_pending_tokens

    def tokens(self, start: int, end: int) -> list[int]:
        """Return the known tokens at positions [start, end), of the prompt and then new ones."""
        num_prompt = len(self.prompt_token_ids)
        new = self.token_ids[max(0, start - num_prompt) : max(0, end - num_prompt)]
        return [*self.prompt_token_ids[start:end], *new]

    def block_keys(self, start: int, end: int, block_tokens: int) -> list[bytes]:
        """Return the keys of the full blocks [start, end), whose tokens are known. Each block is hashed once."""
        keys, new = self.prompt_keys, self._new_keys
        num_prompt = len(self.prompt_token_ids) // block_tokens
        for block in range(len(keys) + len(new), end):
            previous = (new or keys or [salt_key(self.cache_salt)])[-1]
            first, last = block * block_tokens, (block + 1) * block_tokens
            if block < num_prompt:
                keys.append(block_key(previous, self.prompt_token_ids[first:last]))
            else:
                num_given = max(0, len(self.prompt_token_ids) - block * block_tokens) if self.has_forms else None
                new.append(block_key(previous, self.tokens(first, last), num_given))
        return keys[start:end] + new[max(0, start - num_prompt) : max(0, end - num_prompt)]

    def append(self, token_id: int, eos_token_ids: frozenset[int]) -> None:
        """Append a sampled token, and finish if it ends the request."""
        self.token_ids.append(token_id)
        params = self.params
        if token_id in params.stop_token_ids or (token_id in eos_token_ids and not params.ignore_eos):
            self.finish_reason, self.has_stop_token = "stop", True
        elif len(self.token_ids) == params.max_new_tokens:
            self.finish_reason = "length"

    def cut(self, num_tokens: int) -> None:
        """Finish at a stop string, which ends with new token number num_tokens; later ones are dropped."""
        self.finish_reason = "stop"
        for kept in (self.token_ids, self.logits, self.logprobs):
            del kept[num_tokens:]

    def metrics(self) -> dict[str, float | None]:
        """Return seconds: queue (arrival to first step), time_to_first_token (from arrival), time_per_token (after the
        first), None where an aborted request ended before; and `Acceptance.metrics` if it drafted.
        """
        per_token = _seconds(self.first_token_time, self.finish_time, max(1, len(self.token_ids) - 1))
        return {
            "queue_seconds": _seconds(self.arrival_time, self.scheduled_time),
            "time_to_first_token": _seconds(self.arrival_time, self.first_token_time),
            "time_per_token": per_token,
            **(self.acceptance.metrics() if self.acceptance.num_steps else {}),
        }


def _seconds(start: float | None, end: float | None, parts: int = 1) -> float | None:
    return None if start is None or end is None else round((end - start) / parts, 6)


def new_generator(seed: int) -> torch.Generator:
    """Return a CPU generator for a seed in [0, 2^64).

    The seed is hashed because torch uses the lowest 32 bits only: seeds 2^32 apart would draw alike.
    """
    digest = hashlib.blake2b(seed.to_bytes(8, "little"), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))
