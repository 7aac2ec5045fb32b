"""Sessions of coding agents, drawn from distributions, requests of a trace, and the forms in which servers get them.

Sources: the medians and spreads of recorded sessions of coding agents and of InferenceX's AgentX, as lognormal
distributions; the format of Mooncake's traces, whose requests name blocks of 512 tokens by hash ids.
"""

import argparse
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.http_load import Answer

# Standard deviations of the logarithms of what a session draws.
_SPREADS = {"first": 0.3, "growth": 1.5, "turns": 1.1, "answer": 1.2, "think": 1.6}
_LARGEST = {"growth": 32, "turns": 8, "answer": 16}  # times the median
_SHARED = 0.9  # of the first prompts of the subagents that work at the same time
_TRACE_BLOCK = 512  # tokens of a block in Mooncake's format
_WORDS = [
    "amber",
    "bee",
    "code",
    "data",
    "even",
    "file",
    "gate",
    "hand",
    "item",
    "join",
    "keep",
    "line",
    "move",
    "name",
    "open",
    "path",
    "read",
    "step",
]
Part = tuple[random.Random, int]  # source of random tokens, and their number


@dataclass(frozen=True)
class Turn:
    """A turn of a session.

    Attributes:
        think: Seconds from the answer before to this turn.
        num_new, num_answer: Tokens that it adds to the context, and those of its answer.
        subagents: Turns of agents that have to end before it.
    """

    think: float
    num_new: int
    num_answer: int
    subagents: "list[list[Turn]]" = field(default_factory=list)


def draw_session(sizes: argparse.Namespace, index: int) -> list[Turn]:
    """Return a session's turns, the same for each server and number of agents.

    Args:
        sizes: Options of `add_arguments`.
    """
    chooser = random.Random(f"session {sizes.seed} {index}")

    def draw(name: str, median: float) -> int:
        largest = median * _LARGEST.get(name, math.inf)
        return max(1, round(min(largest, median * math.exp(_SPREADS[name] * chooser.gauss(0, 1)))))

    def turns(num_turns: int, first: int) -> list[Turn]:
        drawn = []
        for number in range(num_turns):
            think = min(sizes.think_max, sizes.think * math.exp(_SPREADS["think"] * chooser.gauss(0, 1)))
            subagents = []
            if first == sizes.first and number and chooser.random() < sizes.subagents:
                lengths = [draw("turns", sizes.sub_turns) for _ in range(chooser.randint(1, sizes.fan_out))]
                subagents = [turns(length, sizes.sub_first) for length in lengths]
            num_new = draw("growth", sizes.growth) if number else draw("first", first)
            drawn.append(Turn(think, num_new, draw("answer", sizes.answer), subagents))
        return drawn

    return turns(max(2, draw("turns", sizes.turns)), sizes.first)


def num_fitting(turns: Sequence[Turn], max_context: int) -> int:
    """Return the number of turns up to which the context does not exceed max_context tokens."""
    num_tokens = 0
    for number, turn in enumerate(turns):
        num_tokens += turn.num_new + turn.num_answer
        if num_tokens > max_context:
            return number
    return len(turns)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of sessions. Numbers of tokens are medians, but for max_context."""
    add = parser.add_argument
    add("--first", type=int, default=16_384, metavar="N", help="tokens of a session's first prompt")
    add("--growth", type=int, default=600, metavar="N", help="tokens that a turn adds")
    add("--answer", type=int, default=200, metavar="N", help="tokens of an answer")
    add("--turns", type=int, default=40, metavar="N", help="turns of a session")
    add("--think", type=float, default=1.0, metavar="S", help="seconds from an answer to the next turn")
    add("--think-max", type=float, default=10.0, metavar="S", help="most of these seconds")
    add("--max-context", type=int, default=131_072, metavar="N", help="tokens of a context, at which a session ends")
    add("--subagents", type=float, default=0.015, metavar="P", help="chance of a turn to wait for subagents")
    add("--fan-out", type=int, default=3, metavar="N", help="most subagents at a time")
    add("--sub-first", type=int, default=4096, metavar="N", help="tokens of a subagent's first prompt")
    add("--sub-turns", type=int, default=8, metavar="N", help="turns of a subagent")
    add("--seed", type=int, default=0, metavar="N", help="seed of all sessions")


class TokenForm:
    """Prompts of random token ids, for /v1/completions: any model, also one of random weights.

    Args:
        vocab_size: Ids are in [3, vocab_size - 3).
    """

    route, field = "/v1/completions", "prompt"
    more = {"return_token_ids": True}

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def new(self, *parts: Part) -> str:
        """Return random tokens as JSON for the list of a body."""
        ids = (str(source.randrange(3, self._vocab_size - 3)) for source, count in parts for _ in range(count))
        return ",".join(ids)

    def made_answer(self, part: Part) -> str:
        """Return the JSON of an answer that no server has given."""
        return self.new(part)

    def answer(self, answer: Answer) -> str:
        """Return the JSON of an answer.

        Raises:
            ValueError: The server does not show the tokens.
        """
        if len(answer.token_ids) != answer.num_tokens:
            raise ValueError("the server does not return token ids; use --chat")
        return ",".join(map(str, answer.token_ids))


class ChatForm:
    """Messages of words, for /v1/chat/completions: models whose tokenizer gives back an answer's tokens. A word counts
    as a token in all sizes; what is reported are the server's numbers.
    """

    route, field = "/v1/chat/completions", "messages"
    more: dict[str, bool] = {}

    def new(self, *parts: Part) -> str:
        """Return a user's message of random words as JSON for the list of a body."""
        words = [source.choice(_WORDS) for source, count in parts for _ in range(count)]
        return json.dumps({"role": "user", "content": " ".join(words)})

    def made_answer(self, part: Part) -> str:
        """Return the JSON of an answer that no server has given."""
        return json.dumps({**json.loads(self.new(part)), "role": "assistant"})

    def answer(self, answer: Answer) -> str:
        """Return the JSON of an answer."""
        return json.dumps({"role": "assistant", "content": answer.text})


Form = TokenForm | ChatForm


def body(form: Form, pieces: Sequence[str], num_new: int, model: str | None) -> bytes:
    """Return the body of a request for exactly num_new tokens after pieces of a context. Pieces are not parsed again:
    a context of a million tokens must not keep the loop from other answers.
    """
    options = {"max_tokens": num_new, "temperature": 0, "ignore_eos": True, "stream": True, **form.more}
    options |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    options |= {} if model is None else {"model": model}
    return f'{{"{form.field}":[{",".join(pieces)}],{json.dumps(options)[1:]}'.encode()


def subagent_parts(key: str, number: int, count: int) -> list[Part]:
    """Return the parts of a subagent's first prompt, of which those that work at the same time share the first."""
    common = int(count * _SHARED)
    return [(random.Random(f"{key} subagents"), common), (random.Random(f"{key} {number}"), count - common)]


@dataclass(frozen=True)
class TracedRequest:
    """A request of a trace: seconds after the first one, tokens of its prompt and answer, ids of its blocks."""

    due: float
    num_prompt: int
    num_answer: int
    blocks: Sequence[int]


def read_trace(path: Path, block: int, time_scale: float, max_context: int) -> list[TracedRequest]:
    """Return the requests of a file in Mooncake's format that fit.

    Args:
        block: Tokens of a block, in place of 512; all lengths are scaled alike.
        time_scale: Factor of all times.
    """
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    found = []
    for row in rows:
        num_prompt, num_answer = (
            max(1, round(row[name] * block / _TRACE_BLOCK)) for name in ("input_length", "output_length")
        )
        if num_prompt + num_answer <= max_context:
            due = (row["timestamp"] - rows[0]["timestamp"]) / 1000 * time_scale
            found.append(TracedRequest(due, num_prompt, num_answer, row["hash_ids"]))
    return found


def traced_parts(request: TracedRequest, block: int, seed: int) -> list[Part]:
    """Return the parts of a traced prompt: a block of the same id has the same tokens, and the last one may be cut."""
    parts, num_left = list[Part](), request.num_prompt
    for number in request.blocks:
        parts.append((random.Random(f"block {seed} {number}"), min(block, num_left)))
        num_left -= parts[-1][1]
    return [*parts, (random.Random(f"rest {seed} {request.due}"), num_left)]
