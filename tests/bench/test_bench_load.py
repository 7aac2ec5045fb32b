"""The load of `dcpmla bench serve`, as requested and the same under every cut, and its rows by hand."""

import math
from collections import Counter
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.http_load import Answer, describe_lost
from dcpmla.bench.load import make_load, served_row, summarize
from dcpmla.cache.latent import LatentPlan, LayerMemory
from dcpmla.config import DCPConfig
from dcpmla.runtime.request import Request
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.runtime.stats import Stats
from tests.support.models import VOCAB_SIZE


@given(rate=st.sampled_from([0.1, 3.0, 1e4]), seed=st.integers(0, 1 << 40))
def test_a_load_is_drawn_from_its_lists_and_poisson(rate: float, seed: int) -> None:
    """The n-th arrival is a sum of n exponential gaps: mean n / rate, standard deviation sqrt(n) / rate.

    5.5 of those: once in 10^7. Another rate brings the same requests, and a longer load begins with a shorter one's.
    """
    num, input_lens, output_lens = 2000, [3, 5, 9], [2, 50]
    load = make_load(num, rate, input_lens, output_lens, VOCAB_SIZE, seed)
    gaps = np.diff(load.arrival_times, prepend=0.0) * rate
    assert abs(gaps.sum() - num) < 5.5 * math.sqrt(num)
    for length in (0.5, 1.0, 2.0):  # P(gap > x) = exp(-x)
        share = math.exp(-length)
        assert abs((gaps > length).mean() - share) < 5.5 * math.sqrt(share * (1 - share) / num)
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 5.5 / math.sqrt(num)
    pairs = Counter(zip(map(len, load.prompts), load.output_lens, strict=True))
    assert set(pairs) == set(product(input_lens, output_lens))
    assert all(abs(count - num / 6) < 6 * math.sqrt(num * 5 / 36) for count in pairs.values())
    assert {token for prompt in load.prompts for token in prompt} == set(range(VOCAB_SIZE))
    faster, longer = (
        make_load(num + more, rate * (2 - more), input_lens, output_lens, VOCAB_SIZE, seed) for more in (0, 1)
    )
    assert (faster.prompts, faster.output_lens) == (load.prompts, load.output_lens)
    np.testing.assert_allclose(np.array(faster.arrival_times) * 2, load.arrival_times)
    assert (longer.prompts[:num], longer.arrival_times[:num]) == (load.prompts, load.arrival_times)
    assert make_load(5, math.inf, input_lens, output_lens, VOCAB_SIZE, seed).arrival_times == 5 * [0.0]
    assert make_load(num, rate, input_lens, output_lens, VOCAB_SIZE, seed + 1) != load


def test_summaries() -> None:
    assert summarize([*range(101)]) == {"mean": 50, "p50": 50, "p90": 90, "p99": 99}
    assert summarize([3.0]) == {"mean": 3, "p50": 3, "p90": 3, "p99": 3}
    assert summarize([]) == {"mean": None, "p50": None, "p90": None, "p99": None}


def test_rows_by_hand() -> None:
    """Two requests, on a clock that showed 0 when the load began."""
    params = SamplingParams(max_new_tokens=3)
    early = Request([1, 2, 3, 4], params, arrival_time=1.0, scheduled_time=1.5, first_token_time=3.0, finish_time=7.0)
    late = Request([1, 2], params, arrival_time=4.0, scheduled_time=6.0, first_token_time=7.0, finish_time=8.0)
    for request in (early, late):
        request.token_ids = [7, 8, 9]
    plan = LatentPlan(num_blocks=11, block_size=1, layers=(LayerMemory(2),), dtype=torch.float32, dcp_size=2)
    stats = Stats(max_num_running=2, num_preemptions=5, num_cached_tokens=6)
    engine: Any = SimpleNamespace(
        cache=SimpleNamespace(sizes=plan),
        dcp=DCPConfig(tensor_parallel_size=2, decode_context_parallel_size=2, block_size=1),
        stats=stats,
    )
    expected = {
        "kv_cache_bytes_per_rank": 88,
        "kv_tokens_total": 22,
        "num_fit_mean": 4,
        "num_fit_largest": 3,
    }  # 3 and 2 blocks of 2
    expected |= {"max_num_running": 2, "num_preemptions": 5, "num_cached_tokens": 6}
    expected |= {"queue_seconds_mean": 1.25, "time_to_first_token_mean": 2.5, "time_per_token_mean": 1.25}
    expected |= {"end_to_end_seconds_mean": 5.0, "queue_seconds_p50": 1.25}
    row = served_row(engine, [early, late])
    assert {name: row[name] for name in expected} == expected
    rates = ("seconds", "requests_per_second", "input_tokens_per_second", "output_tokens_per_second")
    assert [row[name] for name in rates] == [8.0, 0.25, 0.8, 0.8]  # 0.75 to one digit
    assert len(row) == 7 + len(rates) + 4 * 4


def test_lost_requests_are_described_in_a_line() -> None:
    assert describe_lost([Answer(0.0), Answer(1.0)]) == ""
    errors = [*["status 429: {\n  busy\n}"] * 3, "a", "b", "b", "c"]
    answers = [Answer(0.0, error=error) for error in errors] + [Answer(0.0)]
    assert describe_lost(answers) == "7 of 8 are lost: 3 x status 429: { busy }; 2 x b; 1 x a"
