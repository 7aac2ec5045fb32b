"""What the engine refuses: prompts that no model can continue, arguments of another type, limits that are too low."""

import math
import re
from typing import Any

import pytest
import torch

from dcpmla.config import DCPConfig
from dcpmla.runtime.sampling import SamplingParams
from tests.support.engines import new_engine
from tests.support.hash_model import BLOCK, MESH, VOCAB_SIZE, HashModel, alone, make_engine


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], SamplingParams(), "prompt is empty"),
        (
            [VOCAB_SIZE],
            SamplingParams(),
            rf"prompt has token id {VOCAB_SIZE}; the model's vocabulary is \[0, {VOCAB_SIZE}\)",
        ),
        (200 * [1], SamplingParams(), "prompt has 200 tokens; with --max-model-len 200 at most 199"),
        (
            60 * [1],
            SamplingParams(max_new_tokens=60),
            "need 30 blocks of 4 tokens, but the cache has 20; raise --kv-cache-memory-bytes",
        ),
        (60 * [1], SamplingParams(max_new_tokens=22), "need 21 blocks of 4 tokens, but the cache has 20"),
        ("text", SamplingParams(), "prompt is a text, but the engine has no tokenizer"),
        ([1], SamplingParams(stop=("x",)), "stop has strings, but the engine has no tokenizer"),
        ([1], SamplingParams(logit_bias={VOCAB_SIZE: 1.0}), f"logit_bias has token id {VOCAB_SIZE}"),
        ([1, True], SamplingParams(), "prompt must be a text or token ids, whole numbers"),
        ([1.0, 2.0], SamplingParams(), "prompt must be a text or token ids, whole numbers"),
        (torch.tensor([1.0, 2.0]), SamplingParams(), "prompt must be a text or token ids, whole numbers"),
        (torch.tensor([[1, 2]]), SamplingParams(), "prompt must be a text or token ids, whole numbers"),
        (["1"], SamplingParams(), "prompt must be a text or token ids, whole numbers"),
        (None, SamplingParams(), "prompt must be a text or token ids, whole numbers"),
    ],
)
def test_refused_requests(prompt: Any, params: SamplingParams, message: str) -> None:
    engine = make_engine(num_blocks=20)
    with pytest.raises(ValueError, match=message):
        engine.add(prompt, params)
    assert not engine.has_requests


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("params", {"max_new_tokens": 3}, "SamplingParams, or none"),
        ("params", 0, "SamplingParams, or none"),
        ("request_id", None, "text or a whole number"),
        ("request_id", True, "text or a whole number"),
        ("request_id", 1.5, "text or a whole number"),
        ("arrival_time", True, "a finite number of seconds, or none"),
        ("arrival_time", "now", "a finite number of seconds, or none"),
        ("arrival_time", math.nan, "a finite number of seconds, or none"),
        ("arrival_time", -math.inf, "a finite number of seconds, or none"),
        ("keep_logits", 1, "true or false"),
    ],
)
def test_arguments_of_another_type_are_named(name: str, value: Any, allowed: str) -> None:
    engine = make_engine(num_blocks=20)
    with pytest.raises(ValueError, match="^" + re.escape(f"{name} is {value!r}; it must be {allowed}") + "$"):
        engine.add([1], **{name: value})
    assert not engine.has_requests


def test_a_prompt_may_be_a_tensor() -> None:
    engine = make_engine(num_blocks=20)
    request = engine.add(torch.tensor([1, 2, 3]), SamplingParams(max_new_tokens=5))  # type: ignore[arg-type]  # a sequence all the same
    list(engine.run())
    assert request.prompt_token_ids == [1, 2, 3]
    assert request.token_ids == alone([1, 2, 3], 5)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "8", None, math.nan])
@pytest.mark.parametrize("limit", ["max_num_batched_tokens", "max_num_seqs", "max_model_len"])
def test_limits(limit: str, value: Any) -> None:
    message = f"{limit} (--{limit.replace('_', '-')}) is {value!r}; it must be a whole number of at least "
    arguments = {"max_model_len": 200, "max_num_batched_tokens": 64, "max_num_seqs": 16, limit: value}
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        new_engine(HashModel(), make_engine(20).cache, DCPConfig(block_size=BLOCK), MESH, **arguments)
