"""The benchmark of limits of prompts' pieces, on CPUs: loads, limits, and rows of the vocabulary."""

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import prefill_limits
from benchmarks.load import Load
from dcpmla.bench.results import Row, unknown_fields
from dcpmla.llm import LLM
from dcpmla.planning.prefill import PrefillCosts
from tests.support.plan_cases import deployed, read_v3

OPTIONS = "--geometry tiny --layers 2 --device cpu --max-num-batched-tokens 256 --max-num-seqs 8 --commit abc"


@pytest.mark.usefixtures("one_process_on_cpu")
def test_loads_are_served_under_each_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "limits.json"
    loads, limits = ["3x300+4", "4x8,64+3@200"], ["0.001", "default", "none"]
    command = [*OPTIONS.split(), *loads, "--max-prefill-ms", ",".join(limits), "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["prefill_limits.py", *command])
    served, in_force = prefill_limits.serve, list[tuple[float, bool]]()

    def serve(llm: LLM, load: Load) -> Row:
        costs = llm.engine.scheduler.costs
        in_force.append((costs.max_prefill_us, costs.is_strict))
        return served(llm, load)

    monkeypatch.setattr(prefill_limits, "serve", serve)
    prefill_limits.main()
    warm_up, *of_first_load = in_force[:4]
    assert of_first_load == [(0.001 * 1000, True), warm_up, (math.inf, True)]
    assert not warm_up[1]
    rows = json.loads(out.read_text())["rows"]
    assert not unknown_fields(rows)
    assert [(row["load"], row["max_prefill_ms"]) for row in rows] == [(each, ms) for each in loads for ms in limits]
    for row in rows:
        assert row["output_tokens_per_second"] == pytest.approx(
            row["num_requests"] * row["output_len"] / row["seconds"], abs=0.1
        )
        assert row["time_to_first_token_mean"] <= row["time_to_first_token_max"] <= row["seconds"]
        assert 0 < row["inter_token_p99"] <= row["inter_token_max"] <= row["seconds"]


def test_a_limit_is_as_an_engine_has_it_from_its_start() -> None:
    deployment = deployed(read_v3(), 8, 8)
    costs = PrefillCosts(deployment, 8192)
    default_us = costs.max_prefill_us
    for limit, ms in (("12.5", 12.5), ("default", None)):
        prefill_limits.set_limit(costs, default_us, limit)
        started = PrefillCosts(deployment, 8192, ms)
        assert (costs.max_prefill_us, costs.is_strict) == (started.max_prefill_us, started.is_strict)
    prefill_limits.set_limit(costs, default_us, "none")
    assert costs.max_prefill_us == math.inf


def test_loads_of_arguments() -> None:
    sizes = prefill_limits.load_sizes("2000x5,9+64@4")
    load = prefill_limits.make_load(sizes, 100, seed=3)
    assert {*map(len, load.prompts)} == {5, 9}
    assert np.mean(np.diff(load.arrival_times)) == pytest.approx(1 / 4, rel=0.1)
    assert load.output_lens == [64] * 2000
    assert load.prompts == prefill_limits.make_load(sizes, 100, seed=3).prompts
    at_once = prefill_limits.make_load(prefill_limits.load_sizes("3x7+1"), 100, seed=0)
    assert at_once.arrival_times == [0.0] * 3
    for wrong in ("", "3x+1", "0x7+1", "3x7", "3x7+1@0", "3x7,+1"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no load; write NxLENGTHS"):
            prefill_limits.load_sizes(wrong)
    for wrong in ("0", "-1", "nan", "10,,20"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no limit; write milliseconds above 0"):
            prefill_limits.limits(wrong)
