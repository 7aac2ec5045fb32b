"""The load of agents on the scheduler alone, by modelled times."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import simulated_agents
from benchmarks.agent_sessions import draw_session
from dcpmla.runtime.waiting import Precedence

SIZES = "--first 2000 --growth 100 --answer 20 --turns 8 --think 0.1 --think-max 1 --max-context 8000"
SUBAGENTS = "--subagents 0.3 --sub-first 500 --sub-turns 2"
CONFIG = Path(simulated_agents.ROOT) / "dcpmla" / "bench" / "configs" / "v2-lite.json"


def run(tmp_path: Path, words: str) -> list[dict[str, Any]]:
    """Return the rows of a run with two GPUs."""
    out = tmp_path / "out.json"
    fixed = f"{CONFIG} -tp 2 {SIZES} {SUBAGENTS} --settle 0 --seconds 20 --commit abc --json {out}"
    simulated_agents.main([*fixed.split(), *words.split()])
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    return rows


def test_sessions_find_their_contexts(tmp_path: Path) -> None:
    rows = run(tmp_path, "-dcp 1,2 --concurrency 1,4")
    assert [(row["label"], row["concurrency"]) for row in rows] == [
        ("DCP 1", 1),
        ("DCP 1", 4),
        ("DCP 2", 1),
        ("DCP 2", 4),
    ]
    for row in rows:
        assert row["is_within_bound"]
        assert not row["num_lost"] + row["num_waiting"]
        assert row["gpu_hit_rate"] > 0.7  # what is left are new tokens and first prompts
    one, four = rows[:2]
    assert 2 < four["num_requests"] / one["num_requests"] < 6
    assert rows[3]["kv_tokens_total"] == pytest.approx(2 * four["kv_tokens_total"], rel=0.01)


def test_prompts_have_the_tokens_of_sessions() -> None:
    args = simulated_agents.make_parser().parse_args([str(CONFIG), "-tp", "2", *SIZES.split(), "--subagents", "0"])
    args.seconds, args.settle = 200.0, 0.0
    model = simulated_agents.load_model_size(args.config)
    setting = simulated_agents.Setting(tp=2, dcp=1, kv_cache_dtype="bf16")
    machine = simulated_agents.load_machine("h200x8", model)
    agents = simulated_agents.Agents(
        simulated_agents.Job(simulated_agents.Deployment(machine, model, setting), args), args, 1
    )
    agents.run()
    turns, at, (tokens, _), _ = agents._begun(0)
    expected, num_tokens = [], len(tokens)
    for turn in turns[at:]:
        if num_tokens + turn.num_new + turn.num_answer > args.max_context:
            break
        num_tokens += turn.num_new
        expected.append((num_tokens, turn.num_answer))
        num_tokens += turn.num_answer
    expected += [(draw_session(args, 1)[0].num_new, draw_session(args, 1)[0].num_answer)]
    found = [(answer.num_prompt_tokens, answer.num_tokens) for answer in agents.answers]
    assert found[: len(expected)] == expected


def test_turns_do_not_wait_for_long_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More contexts than the cache holds: in the order of arrival most turns wait for the prompts of others."""
    load = "-dcp 1 --kv-cache-tokens 20000 --concurrency 8 --max-num-batched-tokens 512"
    (mixed,) = run(tmp_path, load)
    for name in ("arrange", "lacks_little"):
        monkeypatch.setattr(Precedence, name, getattr(Precedence, name))  # set back after the test
    (in_order,) = run(tmp_path, f"{load} --in-order")
    assert in_order["label"] == "DCP 1, in order"
    assert mixed["gpu_hit_rate"] > in_order["gpu_hit_rate"]
    assert mixed["time_to_first_token_p50"] < in_order["time_to_first_token_p50"]


def test_a_cache_for_one_context_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--max-context is 8000, but the cache at -dcp 1 has 9000 tokens"):
        run(tmp_path, "-dcp 1 --kv-cache-tokens 9000")
