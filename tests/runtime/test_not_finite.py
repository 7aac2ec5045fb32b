"""Logits that are NaN or infinite end their request with an error, and no other."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dcpmla import LLM, SamplingParams
from dcpmla.__main__ import main
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.cache.latent import LatentCache
from dcpmla.runtime.sampling import NOT_FINITE, sample
from tests.support.hash_model import EOS, VOCAB_SIZE, HashDrafter, HashModel, alone, make_engine
from tests.support.models import save_tiny

BAD = 7  # The token after which logits of a request that begins with it are not finite.
SMALL: dict[str, Any] = {
    "device": "cpu",
    "max_num_seqs": 4,
    "block_size": 8,
    "kv_cache_memory_bytes": 1 << 22,
    "timeout": 60,
}


class BadModel(HashModel):
    """A hash model whose logits are bad for each sequence that begins with BAD, from a length on."""

    def __init__(self, value: float, length: int) -> None:
        super().__init__()
        self.value, self.length = value, length

    def hidden(self, token_ids: Tensor, metadata: StepMetadata, cache: LatentCache) -> Tensor:
        assert int(token_ids.min()) >= 0, "an embedding has no row -1"
        logits = super().hidden(token_ids, metadata, cache)
        mine = metadata.tokens.slots >= 0
        rows = torch.stack([token_ids, metadata.tokens.positions], -1)
        cache[0].latents.view(-1, 2)[metadata.tokens.slots[mine]] = rows[mine].float()
        ends = self._sequences(token_ids, metadata, cache[0].latents.view(-1, 2))
        for at, (sequence, _) in ends.items():
            if sequence[:1] == [BAD] and len(sequence) >= self.length:
                logits[at, 3:] = self.value
        return logits


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("with_drafts", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("length", [3, 6])  # With the first new token, and with a later one.
def test_only_the_bad_request_ends(value: float, with_drafts: bool, temperature: float, length: int) -> None:
    drafter = HashDrafter(3, share=0.8, always=True) if with_drafts else None
    engine = make_engine(60, model=BadModel(value, length), drafter=drafter)
    params = SamplingParams(max_new_tokens=12, temperature=temperature, ignore_eos=True)
    bad = engine.add([BAD, 1, 2], params)
    good = [engine.add([first, 1, 2], SamplingParams(max_new_tokens=12)) for first in (1, 2)]
    assert len(list(engine.run())) == 3
    assert bad.finish_reason == "error"
    assert isinstance(bad.error, FloatingPointError)
    assert len(bad.token_ids) == length - 3
    assert f"after {length - 3} new tokens" in str(bad.error)
    assert [request.token_ids for request in good] == [alone([first, 1, 2], 12) for first in (1, 2)]
    assert engine.allocator.num_free == engine.allocator.num_blocks


def test_a_bad_token_of_a_scored_prompt_ends_the_request() -> None:
    """The logits after the prompt are fine, those inside it are not, in a step before the last one."""

    class BadInside(HashModel):
        def hidden(self, token_ids: Tensor, metadata: StepMetadata, cache: LatentCache) -> Tensor:
            logits = super().hidden(token_ids, metadata, cache)
            logits[(metadata.tokens.positions == 2) & (token_ids == BAD)] = torch.nan
            return logits

    engine = make_engine(60, max_num_batched_tokens=4, model=BadInside())
    params = SamplingParams(max_new_tokens=5, prompt_logprobs=2, logprobs=1)
    bad, good = engine.add([1, 1, BAD, 1, 2, 3, 4, 5, 6], params), engine.add([1, 1, 2, 3, 4, 5, 6], params)
    assert len(list(engine.run())) == 2
    assert (bad.finish_reason, bad.token_ids) == ("error", [])
    assert good.error is None
    assert good.token_ids == alone([1, 1, 2, 3, 4, 5, 6], 5)
    assert len(good.prompt_logprobs) == 7


def test_logits_of_minus_infinity_are_no_error() -> None:
    logits = torch.full((3, VOCAB_SIZE), -torch.inf)
    logits[0, EOS] = 1.0
    logits[1, :5] = torch.tensor([0.0, torch.nan, 1.0, 2.0, 3.0])
    params = [SamplingParams(temperature=temperature) for temperature in (0.0, 0.5, 0.0)]
    assert sample(logits, params, [0.0] * 3).tolist() == [EOS, NOT_FINITE, NOT_FINITE]


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a checkpoint in float16 whose experts' sums exceed its range, 65,504, and no other number does."""
    directory = tmp_path_factory.mktemp("float16")
    model = save_tiny("deepseek_v3", directory)
    for name, tensor in model.named_parameters():
        if "experts" in name and "down" in name:
            tensor.data.mul_(1e7).clamp_(-6e4, 6e4)
    model.half().save_pretrained(directory)
    return directory


def test_float16_runs_in_bfloat16_unless_asked_for(overflowing: Path) -> None:
    prompt, params = [5, 6, 7, 8], SamplingParams(max_new_tokens=6, logprobs=2, ignore_eos=True)
    answers = {}
    for dtype in ("auto", "bfloat16", "float16"):
        with LLM(str(overflowing), dtype=dtype, **SMALL) as llm:
            answers[dtype] = llm.generate([prompt], params, use_tqdm=False)[0]
    assert answers["auto"].error is None
    assert answers["auto"].token_ids == answers["bfloat16"].token_ids
    assert answers["float16"].finish_reason == "error"
    assert "float16" in str(answers["float16"].error)


def test_float16_is_right_where_it_has_the_range(tmp_path: Path) -> None:
    for family in ("deepseek_v3", "deepseek_v32", "deepseek_v4"):
        save_tiny(family, tmp_path / family)
        params = SamplingParams(max_new_tokens=1, logprobs=0)
        prompt = [3, 1, 4, 1, 5, 9, 2, 6]
        found = []
        for dtype in ("float32", "float16"):
            with LLM(str(tmp_path / family), dtype=dtype, **SMALL) as llm:
                found.append(llm.generate([prompt], params, use_tqdm=False)[0].logprobs[0])
        assert found[0].logprob == pytest.approx(found[1].logprob, abs=0.05), family


def test_generate_names_the_first_prompt_that_failed(
    overflowing: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    arguments = ["--model", str(overflowing), "--prompt-ids", "5,6,7,8", "--device", "cpu", "--json", str(out)]
    options = ["--dtype", "float16", "--kv-cache-memory-bytes", str(1 << 22)]
    assert main(["generate", *arguments, *options]) == 2
    assert "1 of 1 prompts failed; 0: logits are NaN or infinite after 0 new tokens" in capfd.readouterr().err
    (output,) = json.loads(out.read_text())["outputs"]
    assert (output["finish_reason"], output["token_ids"]) == ("error", [])
    assert "float16" in output["error"]
