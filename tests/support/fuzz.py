"""Random requests, mostly bad ones, and raw connections whose answers are read strictly."""

import json
import random
import socket
import struct
from contextlib import suppress
from http.client import HTTPResponse
from typing import Any
from urllib.parse import urlsplit

from tests.support.servers import QUESTION

KEY = "sesame"  # the key of the server that the tests of the API share
LATE = 60  # seconds after which an answer counts as lost
ROUTES = ["/v1/completions", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/x"]
_FIELDS = (
    "prompt messages model max_tokens max_completion_tokens temperature top_p top_k min_p seed n stop stop_token_ids "
    "logprobs top_logprobs echo stream stream_options presence_penalty frequency_penalty repetition_penalty ignore_eos "
    "best_of logit_bias suffix response_format tools tool_choice user tokens text content role chat_template_kwargs"
)
NAMES = _FIELDS.split()
ALWAYS = {"temperature": 0, "ignore_eos": True}
GOOD: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": QUESTION, "max_tokens": 3, **ALWAYS}),
    ("/v1/completions", {"prompt": [QUESTION, "amber-apple?"], "max_tokens": 9, "n": 2, "logprobs": 2, **ALWAYS}),
    ("/v1/completions", {"prompt": QUESTION, "max_tokens": 1, "echo": True, **ALWAYS}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 20, **ALWAYS}),
]
STRINGS = [
    r'"\ud800"',
    r'"\udfff\ud800"',
    r'"\u0000"',
    '"\x7f"',
    '"é😀"',
    '""',
    '"a"',
    '"user"',
    '"' + "x" * 3000 + '"',
]
NUMBERS = ["0", "-1", "1", "7", "-0.0", "1e999", "1e-400", "NaN", "-Infinity", "9" * 400, str(2**63), str(2**64), "0.5"]


def refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), pairs
    return dict(pairs)


def read_strictly(text: bytes) -> Any:
    """Parse JSON as a strict client does."""
    return json.loads(text.decode(), parse_constant=refuse, object_pairs_hook=without_duplicates)


def random_json(draw: random.Random, depth: int = 0) -> str:
    """Return the text of a value, which a strict parser may refuse."""
    kind = draw.randrange(6 if depth < 4 else 3)
    if kind < 3:
        return draw.choice([["null", "true", "false"], NUMBERS, STRINGS][kind])
    if kind == 3 and draw.random() < 0.1:
        levels = draw.choice([30, 900, 20_000])
        return "[" * levels + "]" * (levels - draw.randrange(2))
    values = [random_json(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind == 4:
        return "{" + ", ".join(f'"{draw.choice(NAMES)}": {value}' for value in values) + "}"
    return f"[{', '.join(values)}]"


def random_body(draw: random.Random, route: str) -> bytes:
    """Return a body that is good but for some fields, not an object at all, or cut or changed in places."""
    good = next((fields for path, fields in GOOD if path == route), {"content": "a"})
    fields = [f'"{name}": {json.dumps(value)}' for name, value in good.items()]
    for _ in range(draw.randrange(4)):
        fields.append(f'"{draw.choice(NAMES)}": {random_json(draw)}')  # a name may come twice
    draw.shuffle(fields)
    body = ("{" + ", ".join(fields) + "}" if draw.random() < 0.9 else random_json(draw)).encode()
    if body and draw.random() < 0.2:
        at = draw.randrange(len(body))
        body = draw.choice([body[:at], body[:at] + draw.randbytes(3) + body[at:], body + b"\0", body * 2])
    return body


def framed(draw: random.Random, route: str, body: bytes, method: str = "POST") -> bytes:
    """Return a request with a body in one piece or in chunks."""
    head = f"{method} {route} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    if draw.random() < 0.5:
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    size = draw.randint(1, len(body) + 1)
    chunks = [body[first : first + size] for first in range(0, len(body), max(size, len(body) // 50))]
    chunks = [body] if b"".join(chunks) != body else chunks
    pieces = [f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n" for chunk in chunks if chunk]
    return f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + b"".join(pieces) + b"0\r\n\r\n"


def garbage(draw: random.Random) -> bytes:
    """Return bytes that are no request, or one whose framing is wrong."""
    body = random_body(draw, "/v1/completions")
    whole = framed(draw, "/v1/completions", body)
    at = draw.randrange(len(whole))
    framings = [f"Content-Length: {length}" for length in (-1, 10**30, len(body) // 2, len(body) + 9, "1, 2", "x")]
    framings += [
        "Transfer-Encoding: gzip, chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 3",
        "a" * 9000,
        ": b",
    ]
    framings += ["Expect: 100-continue\r\nContent-Length: 3", "Upgrade: websocket\r\nConnection: upgrade"]
    head = f"POST /v1/completions HTTP/1.{draw.choice('0129')}\r\nAuthorization: Bearer {KEY}\r\n"
    chunks = [b"zz\r\n", b"-1\r\n", b"fffffffffffffffff\r\n", b"5\r\nabc", b"3\r\nabcdef\r\n", b"1;" + b"x" * 5000]
    return draw.choice(
        [
            draw.randbytes(draw.randrange(1, 4000)),
            b"GET /health HTTP/1.1\r\n" + draw.randbytes(50) + b"\r\n\r\n",
            whole[:at] + draw.randbytes(8) + whole[at:],
            f"{head}{draw.choice(framings)}\r\n\r\n".encode() + body,
            f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + draw.choice(chunks) * draw.choice([1, 300]),
        ]
    )


class Connection:
    """A raw connection, and the answers that come over it, in order."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self.socket = socket.create_connection((address.hostname, address.port), timeout=LATE)
        self._file = self.socket.makefile("rb")

    def send(self, data: bytes) -> None:
        with suppress(ConnectionError):  # the answer may come before the end of the request
            self.socket.sendall(data)

    def makefile(self, *_: Any) -> Any:
        """Return the stream, for HTTPResponse, which closes it after one answer."""
        shared = type("Shared", (), {"__getattr__": lambda _, name: getattr(self._file, name), "close": lambda _: None})
        return shared()

    def answer(self) -> tuple[int, list[Any]]:
        """Read an answer: return its status, and the values in it. All of it must be JSON, but for /metrics."""
        response = HTTPResponse(self)  # type: ignore[arg-type]
        response.begin()
        content, kind = response.read(), response.headers.get("Content-Type", "")
        if kind.startswith("text/event-stream"):
            events = [line.removeprefix(b"data: ") for line in content.split(b"\n\n") if line]
            return response.status, [each.decode() if each == b"[DONE]" else read_strictly(each) for each in events]
        return response.status, [read_strictly(content)] if kind.startswith("application/json") and content else []

    def leave(self, draw: random.Random) -> None:
        """Close the connection in some way."""
        with suppress(OSError):
            if draw.random() < 0.3:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
            elif draw.random() < 0.5:
                self.socket.shutdown(socket.SHUT_WR)
                self.socket.settimeout(draw.choice([0.05, 0.5]))
                self.socket.recv(1000)
        self._file.close()
        self.socket.close()
