"""Talk to the chat model over HTTP: a chat, a call of a tool, the answer to its result, and JSON by a schema.

    python examples/chat/talk.py

Starts `dcpmla serve`, its cache sharded over 2 ranks, as a user would, and asks with the openai package.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openai import OpenAI

NUM_RANKS = 2
SYSTEM = "You are Ada. Mia lives in Tokyo. The code of Mia is 418."
PROPERTIES = {"name": {"type": "string"}, "city": {"type": "string"}, "code": {"type": "integer"}}
PERSON = {"type": "object", "properties": PROPERTIES, "required": list(PROPERTIES), "additionalProperties": False}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def get_weather(city: str) -> dict[str, Any]:
    """Return a city's weather: made up, for the demo asks no other server."""
    return {"sky": "rain", "degrees": 7 + len(city)}


def command(device: str) -> list[str]:
    """Return the command that serves the model on a port that is free."""
    serve = [sys.executable, "-m", "dcpmla", "serve", str(Path(__file__).parent / "model"), "--device", device]
    return [*serve, "-tp", str(NUM_RANKS), "-dcp", str(NUM_RANKS), "--port", "0"]


@contextmanager
def serving(argv: Sequence[str]) -> Iterator[str]:
    """Run a command that serves a model; yield the server's address once it answers.

    Raises:
        RuntimeError: The command has ended; with what it wrote last.
    """
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            lines = (line.split() for line in process.stdout)
            address = next((words[2] for words in lines if words[:2] == ["serving", "on"]), None)
            if address is None:
                errors.seek(0)
                raise RuntimeError(f"the server has not started:\n{errors.read()[-3000:]}")
            yield address
        finally:
            process.terminate()


class Talk:
    """A conversation with a tool for the weather, printed as it goes.

    Args:
        url: Address of the server.
    """

    def __init__(self, url: str) -> None:
        self._client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("OPENAI_API_KEY", "none"))
        self._model = self._client.models.list().data[0].id
        self._messages: list[Any] = []

    def add(self, role: str, content: str, **fields: str) -> None:
        """Add a message and print it."""
        print(f"{role:>9}: {content}", flush=True)
        self._messages.append({"role": role, "content": content, **fields})

    def answer(self, **fields: Any) -> Any:
        """Return the model's answer, a message of the openai package, after adding and printing it."""
        completion = self._client.chat.completions.create(
            model=self._model, messages=self._messages, tools=[WEATHER], temperature=0, **fields
        )
        message: Any = completion.choices[0].message
        self._messages.append(message)
        for call in message.tool_calls or []:
            print(f"{'assistant':>9}: calls {call.function.name}({call.function.arguments})", flush=True)
        if message.content:
            print(f"{'assistant':>9}: {message.content}", flush=True)
        return message


def converse(url: str) -> list[str]:
    """Hold the conversation; return the contents of the model's answers, and its calls' arguments, in order."""
    talk, answers = Talk(url), []
    talk.add("system", SYSTEM)
    for question in ("Who are you?", "Where does Mia live?"):
        talk.add("user", question)
        answers.append(talk.answer().content)
    talk.add("user", "What is the weather in Tokyo?")
    for call in talk.answer().tool_calls or []:
        answers.append(call.function.arguments)
        talk.add("tool", json.dumps(get_weather(**json.loads(call.function.arguments))), tool_call_id=call.id)
    answers.append(talk.answer().content)
    talk.add("user", "Describe Mia as JSON with name, city, code.")
    schema = {"name": "person", "schema": PERSON, "strict": True}
    answers.append(talk.answer(response_format={"type": "json_schema", "json_schema": schema}).content)
    return answers


EXPECTED = [
    "I am Ada.",
    "Mia lives in Tokyo.",
    '{"city": "Tokyo"}',
    "It is 12 degrees in Tokyo, with rain.",
    '{"name": "Mia", "city": "Tokyo", "code": 418}',
]


def main() -> int:
    parser = argparse.ArgumentParser(description="Talk to the chat model over HTTP.")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="cpu", help="cuda needs 2 GPUs")
    args = parser.parse_args()
    print(f"\n=== a server of {NUM_RANKS} ranks that share one cache", flush=True)
    with serving(command(args.device)) as url:
        answers = converse(url)
    print("\nAll answers are right." if answers == EXPECTED else f"\nWrong answers; expected are {EXPECTED}.")
    return 0 if answers == EXPECTED else 1


if __name__ == "__main__":
    sys.exit(main())
