"""Prompts that one job prefills for another, over NIXL, with other layouts: transformers' tokens."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from dcpmla.runtime.sampling import SamplingParams
from tests.support.layouts import dcp_config
from tests.support.models import VOCAB_SIZE, save_tiny
from tests.support.oracle import Oracle
from tests.support.plain_mtp import plain_module
from tests.support.two_jobs import Decoded, Prompt, run_jobs

NUM_NEW = 4
# Family, then TP, DCP, interleave and block size of the job that prefills, and of the one that decodes.
CASES = [
    ("deepseek_v3", (2, 1, 1, 16), (4, 4, 4, 16)),
    ("deepseek_v32", (2, 2, 16, 16), (4, 2, 1, 8)),
    pytest.param("deepseek_v3", (4, 4, 1, 4), (2, 1, 1, 16), marks=pytest.mark.thorough),
    ("deepseek_v4", (2, 2, 1, 64), (1, 1, 1, 64)),
    ("kimi_linear", (1, 1, 1, 16), (2, 2, 4, 16)),
    ("glm5_next_text", (2, 2, 1, 16), (1, 1, 1, 16)),
    ("dots3_note_text", (1, 1, 1, 16), (2, 2, 4, 16)),
    ("deepseek_v41", (1, 1, 1, 64), (2, 2, 1, 64)),  # layers share rows, and every rank has the ids of all tokens
]


def draw_prompts(num_prompts: int = 3) -> list[Prompt]:
    """Draw prompts of 70 to 150 tokens; some begin alike."""
    rng, prompts = Random(0), list[Prompt]()
    beginning = [rng.randrange(1, VOCAB_SIZE - 1) for _ in range(40)]
    for index in range(num_prompts):
        own = [rng.randrange(1, VOCAB_SIZE - 1) for _ in range(rng.randint(70, 110))]
        token_ids = [*(beginning if index % 2 else []), *own]
        prompts.append(Prompt(token_ids, SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True, logprobs=1)))
    return prompts


def check(reference: Any, prompts: list[Prompt], results: tuple[list[int], list[Decoded]]) -> None:
    """Assert that all ranks have transformers' tokens, that all prompts have moved, and that nothing is held."""
    oracle = Oracle(reference)
    held, decoded = results
    assert set(held) == {0}
    for answers, num_prefilled, received, _ in decoded:
        assert num_prefilled == 0
        assert (received.num_done, received.num_failed) == (len(prompts), 0)
        for (token_ids, _), answer in zip(prompts, answers, strict=True):
            oracle.check_tokens(token_ids, answer.token_ids)
            found = torch.tensor([each.logprob for each in answer.logprobs])
            best = oracle.logits(token_ids, answer.token_ids).log_softmax(-1).amax(-1)
            assert len(found) == NUM_NEW
            torch.testing.assert_close(found, best, rtol=0, atol=2e-4)


def move(family: str, here: tuple[int, ...], there: tuple[int, ...], directory: Path, device: str = "cpu") -> None:
    """Move prompts between jobs of two layouts, and check the answers."""
    model, meeting = directory / "model", directory / "meeting"
    model.mkdir(), meeting.mkdir()
    reference, prompts = save_tiny(family, model), draw_prompts()
    layouts = [dcp_config(*sizes[:3], block_size=sizes[3]) for sizes in (here, there)]
    check(reference, prompts, run_jobs(model, *layouts, prompts, meeting, device))


@pytest.mark.parametrize(("family", "here", "there"), CASES, ids=str)
def test_prompts_move_between_layouts(
    family: str, here: tuple[int, ...], there: tuple[int, ...], tmp_path: Path
) -> None:
    move(family, here, there, tmp_path)


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "deepseek_v4", "kimi_linear"])
@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.gpu), pytest.param(2, marks=pytest.mark.gpu_2)])
def test_prompts_move_between_gpus(tp: int, family: str, tmp_path: Path) -> None:
    """Two jobs share the first GPU. Decodes run in graphs."""
    pytest.importorskip("dcpmla.transfer.nixl", reason="nixl is not installed", exc_type=ImportError)
    move(family, (tp, tp, 1, 64), (1, 1, 1, 64 if family == "deepseek_v4" else 32), tmp_path, "cuda")


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v4"])
def test_rows_of_an_mtp_module_move(family: str, tmp_path: Path) -> None:
    """The first drafts of a decoding job are those of the module over the whole prompt."""
    meeting, module = tmp_path / "meeting", plain_module(family)
    meeting.mkdir()
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    prompts = [prompt._replace(params=params) for prompt in draw_prompts()]
    layouts = [dcp_config(2, 2, 1, block_size=64), dcp_config(1, 1, 1, block_size=64)]
    drafting = {"speculative_method": "mtp", "num_speculative_tokens": 2}
    _, (decoded,) = run_jobs(module.save(tmp_path / family), *layouts, prompts, meeting, **drafting)
    assert (decoded.received.num_done, decoded.num_prefilled) == (3, 0)
    assert len(decoded.drafts) >= 6
    for known, drafts in decoded.drafts:
        assert drafts == module.drafts(known, len(drafts)), len(known)
