"""The load of agents (benchmarks/agents.py) beside aiperf: both replay the same sessions against the model that chats,
and the server counts the same requests and tokens.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import agents
from benchmarks.agent_sessions import ChatForm, draw_session
from dcpmla.bench.results import unknown_fields
from tests.engines.test_load_generators import MODEL, run_generator
from tests.support.servers import RunningServer, serve

COUNTED = ('requests_total{finish_reason="length"}', "prompt_tokens_total", "generation_tokens_total")
NUM_SESSIONS = 4
SIZES = (
    "--first 60 --growth 8 --answer 6 --turns 4 --think 0.05 --think-max 0.2 --subagents 0 --max-context 1500 --seed 30"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Serve the model with answers that do not depend on other requests."""
    options = ["--served-model-name", "pico", "--max-model-len", 2048, "--deterministic"]
    with serve(tmp_path_factory.mktemp("server"), MODEL, 1, *options) as running:
        yield running


def counts(server: RunningServer) -> list[float]:
    return [server.metric(name) for name in COUNTED]


def run_agents(server: RunningServer, out: Path, *options: str) -> list[dict[str, Any]]:
    """Run the benchmark, and return its rows."""
    words = [server.url, *SIZES.split(), "--label", "pico", "--ttft-bound", "60", "--commit", "abc", "--json", str(out)]
    agents.main([*words, *options])
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    assert not unknown_fields(rows)
    return rows


def write_sessions(path: Path, sizes: Any, level: int) -> int:
    """Write the sessions of a number of agents as aiperf reads them; return the number of their turns."""
    lines, num_turns = list[str](), 0
    for index in range(NUM_SESSIONS):
        turns = []
        for number, turn in enumerate(draw_session(sizes, index)):
            source = random.Random(f"{sizes.seed} {level} {index} turn {number}")
            text = json.loads(ChatForm().new((source, turn.num_new)))["content"]
            delay = {"delay": 1000 * turn.think} if number else {}
            turns.append({"text": text, "output_length": turn.num_answer, **delay})
        num_turns += len(turns)
        lines.append(json.dumps({"session_id": str(index), "turns": turns}))
    path.write_text("".join(f"{line}\n" for line in lines))
    return num_turns


def test_aiperf_counts_the_same_requests_and_tokens(server: RunningServer, tmp_path: Path) -> None:
    before = counts(server)
    (row,) = run_agents(server, tmp_path / "agents.json", "--chat", "--concurrency", "2", "--num-sessions", "4")
    between = counts(server)
    ours = [after - start for after, start in zip(between, before, strict=True)]
    assert ours == [row["num_requests"], row["num_prompt_tokens"], row["num_new_tokens"]]
    assert row["num_lost"] == 0
    sizes = agents.make_parser().parse_args(["url", *SIZES.split()])
    assert row["num_requests"] == write_sessions(tmp_path / "sessions.jsonl", sizes, 2)
    words = f"""profile --url {server.url} --model pico --tokenizer {MODEL} --use-server-token-count --streaming
        --endpoint-type chat --input-file {tmp_path}/sessions.jsonl --custom-dataset-type multi_turn
        --dataset-sampling-strategy sequential --conversation-num 4 --concurrency 2
        --extra-inputs ignore_eos:true temperature:0 --ui none""".split()
    run_generator("aiperf", words, tmp_path)
    theirs = [after - start for after, start in zip(counts(server), between, strict=True)]
    assert theirs == ours
