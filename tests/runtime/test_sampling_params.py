"""Sampling parameters: what they refuse, and what they make of what users write."""

import json
import math
from dataclasses import asdict, replace

import pytest

from dcpmla.runtime.sampling import SamplingParams

WRONG = [
    ("max_new_tokens", 0),
    ("max_new_tokens", 2.0),
    ("max_new_tokens", True),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", 10**400),
    ("temperature", "1"),
    ("temperature", None),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("top_p", True),
    ("top_k", -1),
    ("top_k", 5.0),
    ("seed", -1),
    ("seed", 1 << 64),
    ("seed", 1.0),
    ("stop", ["a", ""]),
    ("stop", [1]),
    ("stop", None),
    ("stop_token_ids", 3),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [1.0]),
    ("stop_token_ids", [False]),
    ("ignore_eos", 1),
    ("min_tokens", -1),
    ("min_tokens", True),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {5: 100.5}),
    ("logit_bias", {5: math.nan}),
    ("logit_bias", {5: "1"}),
    ("logit_bias", {"5": 1, "05": 2}),
    ("logit_bias", {token: 1 for token in range(1025)}),
    ("logit_bias", [5]),
    ("logit_bias", None),
    ("include_stop_str_in_output", 1),
    ("skip_special_tokens", None),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=str)
def test_wrong_values_are_named(name: str, value: object) -> None:
    option = f"--{name.replace('_', '-')}"
    with pytest.raises(ValueError, match=rf"^{name} \({option}\) is .*; it must be "):
        SamplingParams.from_dict({name: value}, SamplingParams())


def test_stops_may_be_a_string_or_lists() -> None:
    params = SamplingParams(stop="ab", stop_token_ids=[3, 4])
    assert params == SamplingParams(stop=("ab",), stop_token_ids=(3, 4))
    assert SamplingParams(stop="") == SamplingParams()
    assert hash(params) == hash(SamplingParams(stop=["ab"], stop_token_ids=(3, 4)))


def test_biases_are_the_same_in_all_forms() -> None:
    params = SamplingParams(logit_bias={7: -1.5, 2: 100})
    assert params.logit_bias == ((2, 100), (7, -1.5))
    line = json.loads(json.dumps(asdict(params)))
    assert SamplingParams.from_dict(line, SamplingParams()) == params
    assert SamplingParams.from_dict({"logit_bias": {"7": -1.5, "2": 100}}, SamplingParams()) == params
    assert hash(replace(params, seed=3)) != hash(params)
    params.check_vocabulary(8)
    with pytest.raises(ValueError, match=r"logit_bias has token id 7; the model's vocabulary is \[0, 7\)"):
        params.check_vocabulary(7)


def test_limits_of_new_tokens_belong_together() -> None:
    with pytest.raises(ValueError, match="min_tokens is 17; max_new_tokens, 16, is the most"):
        SamplingParams(min_tokens=17)
    params = SamplingParams(min_tokens=9, max_new_tokens=20)
    assert params.at_most(12) == SamplingParams(min_tokens=9, max_new_tokens=12)
    assert params.at_most(5) == SamplingParams(min_tokens=5, max_new_tokens=5)


def test_prompts_draw_from_streams_of_their_own() -> None:
    """No two prompts of any two seeds share one."""
    params = [SamplingParams(seed=seed).for_prompt(index) for seed in (0, 1, 2) for index in (0, 1, (1 << 31) - 1)]
    assert len({param.seed for param in params}) == len(params)
    assert SamplingParams(seed=(1 << 64) - 1, top_k=3).for_prompt(5).top_k == 3  # any seed has streams


def test_from_dict_fills_up_with_defaults() -> None:
    defaults = SamplingParams(temperature=0.5, seed=4, stop=("x",))
    line = json.loads('{"temperature": 1, "stop": "END", "stop_token_ids": [7, 8], "seed": 18446744073709551615}')
    assert SamplingParams.from_dict(line, defaults) == SamplingParams(
        temperature=1, seed=2**64 - 1, stop=("END",), stop_token_ids=(7, 8)
    )
    assert SamplingParams.from_dict({"stop": ["a", "b"]}, defaults).stop == ("a", "b")
    assert SamplingParams.from_dict({}, defaults) == defaults
    message = "'temprature' is not a sampling parameter; allowed are max_new_tokens, temperature, .*ignore_eos"
    with pytest.raises(ValueError, match=message):
        SamplingParams.from_dict({"temprature": 1}, defaults)
