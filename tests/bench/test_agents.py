"""The load of agents: sessions, traces, what was served, and a sweep against the model that chats on CPUs."""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import agents
from benchmarks.agent_sessions import (
    ChatForm,
    TokenForm,
    body,
    draw_session,
    num_fitting,
    read_trace,
    subagent_parts,
    traced_parts,
)
from benchmarks.http_load import Answer
from dcpmla.bench.results import unknown_fields
from tests.support.launchers import ROOT
from tests.support.servers import RunningServer, serve

TINY = "--first 80 --growth 8 --answer 4 --turns 6 --think 0.02 --think-max 0.1 --sub-first 20 --sub-turns 2"
SIZES = [*TINY.split(), "--max-context", "400", "--subagents", "0.2", "--vocab-size", "2000"]


def options(*words: str) -> argparse.Namespace:
    return agents.make_parser().parse_args(["url", *words])


def test_sessions_are_the_same_for_all_servers_and_have_the_sizes() -> None:
    args = options("--turns", "20", "--growth", "100")
    sessions = [draw_session(args, index) for index in range(200)]
    assert sessions == [draw_session(args, index) for index in range(200)]
    assert sessions != [draw_session(options("--turns", "20", "--growth", "100", "--seed", "1"), i) for i in range(200)]
    middle = sorted(len(turns) for turns in sessions)[100]
    assert 15 < middle < 27
    turns = [turn for session in sessions for turn in session[1:]]
    assert 90 < sorted(turn.num_new for turn in turns)[len(turns) // 2] < 110
    assert max(turn.num_new for turn in turns) <= 3200
    assert 0.005 < sum(bool(turn.subagents) for turn in turns) / len(turns) < 0.025
    assert all(0 < turn.think <= 10 for turn in turns)
    inner = [turn for each in turns for turns_of in each.subagents for turn in turns_of]
    assert inner
    assert not any(turn.subagents for turn in inner)


def test_a_session_ends_before_the_context_is_full() -> None:
    turns = draw_session(options("--turns", "20"), 3)
    sums = [sum(turn.num_new + turn.num_answer for turn in turns[: end + 1]) for end in range(len(turns))]
    for limit in (0, sums[0] - 1, sums[0], sums[3] + 1, sums[-1]):
        assert num_fitting(turns, limit) == sum(each <= limit for each in sums)


def test_subagents_share_most_of_their_first_prompt() -> None:
    form = TokenForm(1000)
    one, other, later = (
        form.new(*subagent_parts(key, number, 100)).split(",") for key, number in (("a", 0), ("a", 1), ("b", 0))
    )
    assert len(one) == 100
    assert one[:90] == other[:90] != later[:90]
    assert one[90:] != other[90:]


@pytest.mark.parametrize("form", [TokenForm(1000), ChatForm()])
def test_bodies_are_json(form: Any) -> None:
    source = random.Random(0)
    pieces = [form.new((source, 3)), form.made_answer((source, 2)), form.new((source, 1), (source, 2))]
    made = json.loads(body(form, pieces, 7, "m"))
    assert (made["max_tokens"], made["ignore_eos"], made["model"]) == (7, True, "m")
    if isinstance(form, TokenForm):
        assert len(made["prompt"]) == 8
        assert made["return_token_ids"]
        assert form.answer(Answer(0.0, token_ids=[5, 6], num_tokens=2)) == "5,6"
        with pytest.raises(ValueError, match="use --chat"):
            form.answer(Answer(0.0, num_tokens=2))
    else:
        assert [message["role"] for message in made["messages"]] == ["user", "assistant", "user"]
        assert [len(message["content"].split()) for message in made["messages"]] == [3, 2, 3]
        assert json.loads(form.answer(Answer(0.0, text='a"'))) == {"role": "assistant", "content": 'a"'}


def test_a_trace_has_the_tokens_of_its_blocks(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000, "input_length": 1200, "output_length": 100, "hash_ids": [1, 2, 3]},
        {"timestamp": 3000, "input_length": 1100, "output_length": 50, "hash_ids": [1, 2, 9]},
        {"timestamp": 4000, "input_length": 9000, "output_length": 50, "hash_ids": [*range(18)]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    first, second = read_trace(path, 64, 0.5, 1000)
    assert (first.due, second.due) == (0.0, 1.0)
    assert (first.num_prompt, first.num_answer) == (150, 12)
    form = TokenForm(1000)
    one, other = (form.new(*traced_parts(each, 64, 0)).split(",") for each in (first, second))
    assert (len(one), len(other)) == (150, 138)
    assert one[:128] == other[:128]
    assert one[128:138] != other[128:]


def answer(came: float, times: list[float], num_prompt: int = 100, ended: bool = True, error: str = "") -> Answer:
    """Return an answer whose tokens came at some times."""
    finish = times[-1] if times and ended else 0.0
    return Answer(came, times[0] if times else None, finish, len(times), num_prompt, error, times)


def test_what_was_served_between_two_times() -> None:
    answers = [
        answer(0.0, [1.0, 2.0, 3.0]),  # its first token came before
        answer(2.0, [4.0, 5.0, 7.0]),
        answer(5.0, [6.0, 11.0], 200),  # its last one came afterwards
        answer(9.0, [], ended=False),
        answer(1.0, [], ended=False),  # it has waited longer than most
        answer(3.0, [], error="status 500"),
    ]
    row = agents.served(answers, 2.5, 10.0, num_gpus=2)
    assert (row["num_requests"], row["num_waiting"], row["num_lost"]) == (1, 2, 1)
    assert (row["num_prompt_tokens"], row["num_new_tokens"]) == (300, 5)
    assert row["total_tokens_per_second_per_gpu"] == round(305 / 7.5 / 2, 1)
    assert row["output_tokens_per_second"] == round(5 / 7.5, 1)
    assert row["time_to_first_token_mean"] == pytest.approx((2 + 1 + 9) / 3, abs=1e-5)
    assert row["time_per_token_p90"] == 1.5


def test_hit_rates_of_both_kinds_of_servers() -> None:
    info = {'dcpmla_cache_info{block_tokens="16",num_blocks="9"}': 1.0}
    loads = 'dcpmla_kv_offload_blocks_total{direction="load",tier="host"}'
    before = {"dcpmla_prompt_tokens_total": 100.0, "dcpmla_cached_prompt_tokens_total": 50.0, **info}
    after = {"dcpmla_prompt_tokens_total": 300.0, "dcpmla_cached_prompt_tokens_total": 200.0, loads: 5.0, **info}
    after["dcpmla_preemptions_total"] = 2.0
    assert agents.hit_rates(before, after) == {"gpu_hit_rate": 0.35, "host_hit_rate": 0.4, "num_preemptions": 2}
    names = "prefix_cache_queries", "prefix_cache_hits", "external_prefix_cache_hits", "num_preemptions"
    vllm = {f"vllm:{name}_total": value for name, value in zip(names, (200.0, 70.0, 80.0, 2.0), strict=True)}
    assert agents.hit_rates({}, vllm) == {"gpu_hit_rate": 0.35, "host_hit_rate": 0.4, "num_preemptions": 2}


def test_the_knee_is_the_last_number_before_the_first_that_is_too_slow() -> None:
    passes = {"a": [(1, True), (2, True), (4, False), (8, True)], "b": [(1, False)], "c": [(2, True)]}
    rows = [
        {"label": label, "concurrency": level, "is_within_bound": passed}
        for label, levels in passes.items()
        for level, passed in levels
    ]
    assert agents.knees(rows) == {"a": 2, "b": 0, "c": 2}


@pytest.fixture(scope="module")
def pico(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = ROOT / "examples" / "chat" / "model"
    with serve(tmp_path_factory.mktemp("pico"), model, 2, "--max-model-len", 2048) as running:
        yield running


def test_a_sweep_against_a_server(pico: RunningServer, tmp_path: Path) -> None:
    """It goes on past the knee as far as it is told, writes the vocabulary's rows, and files of several runs merge."""
    paths = tmp_path / "slow.json", tmp_path / "fast.json", tmp_path / "both.json"
    sweep = ["--concurrency", "1,2,3", "--seconds", "1", "--settle", "0.2", "--past-knee", "1", "--commit", "abc"]
    for path, label, bound in ((paths[0], "slow", "0"), (paths[1], "fast", "600")):
        agents.main([pico.url, *SIZES, *sweep, "--label", label, "--ttft-bound", bound, "--json", str(path)])
    slow, fast = (json.loads(path.read_text()) for path in paths[:2])
    assert (slow["knee"], fast["knee"]) == ({"slow": 0}, {"fast": 3})
    assert [row["concurrency"] for row in slow["rows"]] == [1, 2]
    assert [row["concurrency"] for row in fast["rows"]] == [1, 2, 3]
    rows = [*slow["rows"], *fast["rows"]]
    assert not unknown_fields(rows)
    assert not sum(row["num_lost"] for row in rows)
    agents.main(["--rows", *map(str, paths[:2]), "--json", str(paths[2]), "--plot", str(tmp_path / "both.png")])
    both = json.loads(paths[2].read_text())
    assert (both["rows"], both["knee"], both["commit"]) == (rows, {"slow": 0, "fast": 3}, "abc")
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")


def test_a_context_is_found_in_the_cache(pico: RunningServer, tmp_path: Path) -> None:
    """Tokens of answers included: without them no turn would find more than the session's first prompt."""
    words = ["--num-sessions", "1", "--concurrency", "1", "--ttft-bound", "600", "--commit", "abc", "--seed", "18"]
    words += ["--answer", "15", "--growth", "4", "--first", "40", "--max-context", "1800", "--subagents", "0"]
    before = pico.metric("generation_tokens_total")
    agents.main([pico.url, *SIZES, *words, "--json", str(tmp_path / "one.json")])
    (row,) = json.loads((tmp_path / "one.json").read_text())["rows"]
    assert row["num_requests"] == 8
    assert row["num_new_tokens"] == pico.metric("generation_tokens_total") - before
    assert row["gpu_hit_rate"] > 0.6


def test_a_traces_requests_are_sent(pico: RunningServer, tmp_path: Path) -> None:
    rows = [
        {"timestamp": 100 * number, "input_length": 2048, "output_length": 64, "hash_ids": [1, 2, 3, number]}
        for number in range(5, 9)
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["--trace", str(tmp_path / "trace.jsonl"), "--trace-block", "32", "--num-requests", "3", "--commit", "abc"]
    before = pico.metric("prompt_tokens_total")
    agents.main([pico.url, *SIZES, *words, "--json", str(tmp_path / "traced.json")])
    (row,) = json.loads((tmp_path / "traced.json").read_text())["rows"]
    assert (row["load"], row["num_requests"], row["num_lost"]) == ("trace", 3, 0)
    assert row["num_prompt_tokens"] == 3 * 128 == pico.metric("prompt_tokens_total") - before


def test_a_server_or_files(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["http://127.0.0.1", "--rows", "a.json"]):
        with pytest.raises(SystemExit):
            agents.main(words)
        assert "give either the URL of a server or --rows" in capsys.readouterr().err
