"""A load driven over HTTP against any server with OpenAI's API: streams of completions, and when their tokens came."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import h11

from benchmarks.load import Load
from dcpmla.bench.results import Row

_READ_BYTES = 1 << 16
_CONNECT_SECONDS = 30.0
_NUM_REASONS = 3  # in a message about lost requests


@dataclass
class Answer:
    """One request's answer; times are seconds after the load's beginning.

    Attributes:
        first_token_time: Time of the first token, or None.
        token_times: Times of tokens whose ids the server shows (`return_token_ids`).
        num_tokens: New tokens, as the server counts them.
        error: Reason why it is lost; "" for a whole answer.
    """

    arrival_time: float
    first_token_time: float | None = None
    finish_time: float = 0.0
    num_tokens: int = 0
    error: str = ""
    token_times: list[float] = field(default_factory=list)


def drive(url: str, load: Load, api_key: str | None, fields: Mapping[str, Any] | None = None) -> list[Answer]:
    """Send each request of a load at its time, greedy and of exact length, and read its stream to the end.

    Args:
        fields: Further fields of the requests' bodies.
    """
    return asyncio.run(_drive(url, load, api_key, fields or {}))


def describe_lost(answers: Sequence[Answer]) -> str:
    """Return how many answers are lost and the most frequent reasons, in one line; empty if none is lost."""
    reasons = Counter(" ".join(answer.error.split()) for answer in answers if answer.error)
    common = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common(_NUM_REASONS))
    return f"{reasons.total()} of {len(answers)} are lost: {common}" if reasons else ""


async def _drive(url: str, load: Load, api_key: str | None, fields: Mapping[str, Any]) -> list[Answer]:
    started = time.perf_counter()
    numbered = zip(load.arrival_times, load.prompts, load.output_lens, strict=True)
    tasks = [asyncio.create_task(_ask(url, api_key, fields, started, *request)) for request in numbered]
    return list(await asyncio.gather(*tasks))


async def _ask(
    url: str,
    api_key: str | None,
    fields: Mapping[str, Any],
    started: float,
    arrival_time: float,
    prompt: list[int],
    num_tokens: int,
) -> Answer:
    """Wait for a request's time, send it and return its answer."""
    await asyncio.sleep(arrival_time - (time.perf_counter() - started))
    answer = Answer(arrival_time)
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    content = json.dumps({**body, "stream_options": {"include_usage": True}, **fields}).encode()
    try:
        async for line in _lines(url, api_key, content):
            if line.startswith(b"data: {"):
                _take(answer, json.loads(line[6:]), time.perf_counter() - started)
    except (OSError, ValueError, h11.RemoteProtocolError) as error:
        answer.error = str(error) or type(error).__name__
    if not answer.error and answer.num_tokens != num_tokens:
        answer.error = f"{answer.num_tokens} of {num_tokens} tokens"
    answer.finish_time = time.perf_counter() - started
    return answer


def _take(answer: Answer, event: Row, now: float) -> None:
    """Take an event of a stream."""
    if error := event.get("error"):
        answer.error = str(error.get("message", error) if isinstance(error, dict) else error)
    if event.get("choices") and answer.first_token_time is None:
        answer.first_token_time = now
    for choice in event.get("choices") or ():
        answer.token_times += [now] * len(choice.get("token_ids") or ())
    if event.get("usage"):
        answer.num_tokens = event["usage"]["completion_tokens"]


async def _lines(url: str, api_key: str | None, content: bytes) -> AsyncIterator[bytes]:
    """Yield the lines of an answer.

    Raises:
        ValueError: A status that is not 200, with the body.
    """
    address = urlsplit(url)
    opening = asyncio.open_connection(address.hostname, address.port or 80)
    reader, writer = await asyncio.wait_for(opening, _CONNECT_SECONDS)
    try:
        connection, line_start, status = h11.Connection(h11.CLIENT), b"", 200
        headers = [("Host", address.netloc), ("Content-Length", str(len(content)))]
        headers += [] if api_key is None else [("Authorization", f"Bearer {api_key}")]
        target = f"{address.path.rstrip('/')}/v1/completions"
        for part in (
            h11.Request(method="POST", target=target, headers=headers),
            h11.Data(content),
            h11.EndOfMessage(),
        ):
            writer.write(connection.send(part) or b"")
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            match event:
                case h11.Response():
                    status = event.status_code
                case h11.Data():
                    *lines, line_start = (line_start + event.data).split(b"\n")
                    for line in lines if status == 200 else ():
                        yield line
                case _:
                    connection.receive_data(await reader.read(_READ_BYTES))
        if status != 200:
            raise ValueError(f"status {status}: {line_start.decode(errors='replace')[:200]}")
    finally:
        writer.close()
