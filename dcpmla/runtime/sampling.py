"""Sampling of tokens from logits, and what a request asks of it."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from dcpmla.fields import FLAG, TEXT, Rule, check_fields, number, option_label, tuple_of, whole

_MAX_ROWS = 64  # drawn at once: float64 copies of [rows, vocab] stay small compared with the logits of a large batch


_RULES = {
    "max_new_tokens": whole(1),
    "temperature": number(0),
    "top_p": number(0, 1, above=True),
    "top_k": Rule(f"{whole(0).words} (0 is all tokens)", whole(0).holds),
    "seed": Rule("a whole number in [0, 2^64)", whole(0, (1 << 64) - 1).holds),
    "stop": tuple_of(TEXT),
    "stop_token_ids": tuple_of(whole(0)),
    "ignore_eos": FLAG,
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request chooses its tokens and when it ends.

    Args:
        max_new_tokens: most tokens generated, at least 1.
        temperature: 0 takes the best token, else the softmax of logits / temperature is drawn from.
        top_p: draw from the fewest best tokens whose probability reaches this, in (0, 1].
        top_k: draw from this many best tokens and those as good as the last of them; 0 is all.
        seed: of the request's draws, in [0, 2^64).
        stop: strings that end the request, or one string; not part of its text.
        stop_token_ids: end the request as an end-of-sequence token does.
        ignore_eos: go on after an end-of-sequence token (for benchmarks).
    Raises:
        ValueError: a value of another type, or outside its range.
    """

    max_new_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, value in (("stop", self.stop), ("stop_token_ids", self.stop_token_ids)):
            if isinstance(value, str | list):
                object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        check_fields(_RULES, vars(self), option_label)

    @classmethod
    def from_dict(cls, values: Mapping[str, object], defaults: "SamplingParams") -> "SamplingParams":
        """Return the defaults with the values of a JSON object put in.

        Raises:
            ValueError: a key that is no field, or a value that is not allowed.
        """
        allowed = [field.name for field in fields(cls)]
        for key in values:
            if key not in allowed:
                raise ValueError(f"{key!r} is not a sampling parameter; allowed are {', '.join(allowed)}")
        return replace(defaults, **values)  # type: ignore[arg-type]  # __post_init__ checks the types

    def for_prompt(self, index: int) -> "SamplingParams":
        """Return these params for the prompt of a number, which draws from a stream of its own: that of the seed
        seed x 2^31 + index, whatever the other prompts are.
        """
        return replace(self, seed=((self.seed << 31) + index) % (1 << 64))


def new_generator(seed: int) -> torch.Generator:
    """Return a CPU generator for a seed in [0, 2^64).

    Hashed, for torch looks at the lowest 32 bits only: seeds 2^32 apart would draw alike.
    """
    digest = hashlib.blake2b(seed.to_bytes(8, "little"), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


def sample(logits: Tensor, params: Sequence[SamplingParams], generators: Sequence[torch.Generator | None]) -> Tensor:
    """Choose a token for each row, whatever the other rows are.

    Args:
        logits: [n, vocab] float32.
        params: [n].
        generators: [n] of `new_generator`: on the CPU, so that a seed gives the same numbers on every device; a
            draw takes one. None where nothing is drawn.
    Returns:
        [n] int64 on the device of the logits.
    """
    tokens = logits.argmax(-1)
    drawn = [row for row, param in enumerate(params) if param.temperature > 0]
    for start in range(0, len(drawn), _MAX_ROWS):
        rows = drawn[start : start + _MAX_ROWS]
        uniforms = [torch.rand((), dtype=torch.float64, generator=generators[row]).item() for row in rows]
        tokens[rows] = _draw(logits[rows], [params[row] for row in rows], uniforms)
    return tokens


def _draw(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Tensor:
    """Invert each row's cumulative distribution, in the vocabulary's order, at a number in [0, 1).

    In this order a small change of the logits moves every boundary between tokens a little, and seldom past the number.
    """
    scores = logits.double()
    scores -= scores.amax(-1, keepdim=True)  # before the division: a tiny temperature may overflow, to -inf only
    scores /= _column([param.temperature for param in params], scores)
    limited = [row for row, param in enumerate(params) if param.top_k or param.top_p < 1]
    if limited:
        scores[limited] = _keep_best(scores[limited], [params[row] for row in limited])
    cumulative = scores.softmax(-1).cumsum(-1)
    targets = _column(uniforms, scores) * cumulative[:, -1:]
    last = logits.shape[-1] - 1  # where a row of NaN ends up: not outside the vocabulary
    return torch.searchsorted(cumulative, targets, right=True).squeeze(-1).clamp(max=last)


def _keep_best(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return the scores with -inf for tokens outside of top-k, and outside of top-p among those left.

    Top-k keeps all that tie with its last token; top-p takes tokens of equal score by their ids.
    """
    vocab = scores.shape[-1]
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    kth = torch.tensor([min(param.top_k or vocab, vocab) - 1 for param in params], device=scores.device)
    ordered.masked_fill_(ordered < ordered.gather(-1, kth[:, None]), -torch.inf)
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1).roll(1, -1)
    before[:, 0] = 0
    ordered.masked_fill_(before >= _column([param.top_p for param in params], scores), -torch.inf)
    return ordered.new_empty(ordered.shape).scatter_(-1, order, ordered)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
