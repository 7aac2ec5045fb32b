"""The embedded model: it finds its needles, also those whose latents live on other ranks, in prefill and in decode."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dcpmla.integrations.model_files import load_config
from dcpmla.ownership import Owner
from dcpmla.runtime.sampling import SamplingParams
from tests.support.engines import new_engine
from tests.support.layouts import dcp_config
from tests.support.ranks import run_ranks
from tests.support.whole_models import load_on_rank, poisoned_cache

EXAMPLE = Path(__file__).parents[2] / "examples" / "needle"
MODEL = EXAMPLE / "model"
sys.path.insert(0, str(EXAMPLE))
from prompts import MAX_PROMPT_TOKENS, build_tokenizer, build_vocabulary, make_prompt  # noqa: E402


def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(MODEL)


def answer(prompts: list[list[int]], tp: int, dcp_size: int, interleave: int, max_num_batched_tokens: int) -> list[int]:
    """First new token of each prompt, one request at a time, so that a question of one token is a decode step."""
    dcp = dcp_config(tp, dcp_size, interleave, context_workspace_tokens=2048)
    model, mesh = load_on_rank(MODEL, dcp)
    longest = max(map(len, prompts))
    cache = poisoned_cache(model, dcp, [longest])
    engine = new_engine(model, cache, dcp, mesh, longest + 1, max_num_batched_tokens, max_num_seqs=1)
    for prompt in prompts:
        engine.add(prompt, SamplingParams(max_new_tokens=1))
    return [request.token_ids[0] for request in engine.run()]


def needles(num_prompts: int, num_tokens: int) -> tuple[list[list[int]], list[int]]:
    rng = random.Random(7)
    pairs = [make_prompt(num_tokens, index / (num_prompts - 1), rng) for index in range(num_prompts)]
    return [tokenizer()(prompt)["input_ids"] for prompt, _ in pairs], [
        tokenizer()(text)["input_ids"][1] for _, text in pairs
    ]


CUTS = [(1, 1, 1), (4, 2, 16)]
CUTS += [pytest.param(*cut, marks=pytest.mark.thorough) for cut in ((2, 2, 1), (4, 4, 1), (8, 8, 2))]  # type: ignore


@pytest.mark.parametrize(("tp", "dcp_size", "interleave"), CUTS)
def test_every_cut_finds_every_needle(tp: int, dcp_size: int, interleave: int) -> None:
    prompts, answers = needles(4, 1200)
    assert run_ranks(tp, answer, prompts, tp, dcp_size, interleave, 900, timeout=300) == [answers] * tp


def test_needles_on_other_ranks_are_found_by_a_decode_step() -> None:
    """The "?" alone is computed by a decode step; the number that it must find is stored on each rank in turn."""
    prompts, answers = needles(7, 600)
    num_tokens = len(prompts[0])
    places = {
        Owner(0, 4).rank_of(prompt.index(prompt[-2]) + 1) for prompt in prompts
    }  # the number behind the key that is asked for
    assert places == {0, 1, 2, 3}
    # A first piece of all tokens but the last leaves one, and a piece of one token is a decode.
    assert run_ranks(4, answer, prompts, 4, 4, 1, num_tokens - 1, timeout=300) == [answers] * 4


@pytest.mark.thorough
def test_long_context() -> None:
    """4,800 tokens, in the dtype that the checkpoint has, by transformers alone: what the model itself can do."""
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16).eval()
    prompts, answers = needles(3, 4800)
    assert all(abs(len(prompt) - 4800) <= 2 for prompt in prompts)
    with torch.no_grad():
        assert [int(model(torch.tensor([prompt]), logits_to_keep=1).logits.argmax()) for prompt in prompts] == answers


def test_files_are_small_and_pickle_free() -> None:
    assert (MODEL / "model.safetensors").stat().st_size <= 8 << 20
    assert {file.suffix for file in MODEL.iterdir()} == {".json", ".safetensors"}


def test_recorded_accuracy_is_enough() -> None:
    record = json.loads((MODEL / "training.json").read_text())["accuracy"]
    assert min(accuracy for by_length in record.values() for accuracy in by_length.values()) >= 0.98


def test_tokenizer_is_the_one_that_prompts_describe() -> None:
    saved, built = tokenizer(), build_tokenizer()
    text = "amber-fox 417; birch-owl 023; amber-fox?"
    assert (
        saved(text)["input_ids"]
        == built(text)["input_ids"]
        == built("amber-fox 417 ; birch-owl 023 ; amber-fox ?")["input_ids"]
    )
    assert (
        saved.decode(saved(text)["input_ids"], skip_special_tokens=True)
        == "amber-fox 417 ; birch-owl 023 ; amber-fox ?"
    )
    assert saved("unheard-of")["input_ids"] == [saved.bos_token_id, saved.unk_token_id]
    assert len(build_vocabulary()) == load_config(MODEL).vocab_size


@pytest.mark.parametrize(
    ("num_tokens", "depth", "message"),
    [
        (5, 0.5, "num_tokens is 5"),
        (MAX_PROMPT_TOKENS + 1, 0.5, f"expected 6 to {MAX_PROMPT_TOKENS}"),
        (100, 1.5, "depth is 1.5"),
    ],
)
def test_prompts_that_cannot_be(num_tokens: int, depth: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_prompt(num_tokens, depth, random.Random(0))
