"""Memory in which tokens are chosen and prompts scored: no step takes more than the dummy step that is measured before
the cache is allocated, and a longer prompt takes no more.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dcpmla.config import DCPConfig
from dcpmla.integrations.engine_options import EngineOptions
from dcpmla.integrations.loading import profile_step
from dcpmla.integrations.sharded_model import ShardedModel
from dcpmla.runtime.batch import MAX_SCORED
from dcpmla.runtime.choice_memory import ALL_CHANGES, touch_choice_memory
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.sampling import SamplingParams
from tests.support.models import save_tiny
from tests.support.ranks import run_ranks
from tests.support.whole_models import load_engine_on_rank

VOCAB_SIZE, MAX_LEN, NUM_SEQS = 4000, 1500, 24
_NUM_TOP = 2


class LivePeak(TorchDispatchMode):
    """The most bytes alive at once of tensors [..., vocab] that the block makes. Parts of the vocabulary are left out:
    gloo's threads may free them late.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[Any, tuple[StorageWeakRef, int]] = {}
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.ndim > 1 and tensor.shape[-1] == VOCAB_SIZE:
                storage = tensor.untyped_storage()
                self._alive[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: value for key, value in self._alive.items() if not value[0].expired()}
        self.num_bytes = max(self.num_bytes, sum(num_bytes for _, num_bytes in self._alive.values()))
        return result


def load(directory: Path, tp: int, num_batched: int, num_seqs: int = NUM_SEQS) -> tuple[Engine, EngineOptions]:
    options = EngineOptions(
        dtype="float32", kv_cache_memory_bytes=1 << 24, max_num_seqs=num_seqs, max_num_batched_tokens=num_batched
    )
    dcp = DCPConfig(tensor_parallel_size=tp, decode_context_parallel_size=tp, block_size=16)
    return load_engine_on_rank(directory, dcp, options, MAX_LEN), options


def peaks(directory: Path, tp: int) -> tuple[int, list[int]]:
    """On a rank: return the peak of the dummy step, and of served steps with a prompt of each length."""
    engine, options = load(directory, tp, 1024)
    assert isinstance(engine.model, ShardedModel)
    with LivePeak() as profiled:
        profile_step(engine.model, options)
    served = []
    for length in (MAX_SCORED, 1400):
        for index in range(NUM_SEQS - 1):
            engine.add([index, 5], ALL_CHANGES)
        engine.add([7] * length, SamplingParams(max_new_tokens=1, prompt_logprobs=_NUM_TOP))
        with LivePeak() as peak:
            list(engine.run())
        served.append(peak.num_bytes)
    engine.close()
    return profiled.num_bytes, served


@pytest.mark.parametrize("tp", [1, 2])
def test_the_dummy_step_takes_the_most_logits(tp: int, tmp_path: Path) -> None:
    save_tiny("deepseek_v3", tmp_path, vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_LEN)
    for profiled, (short, long) in run_ranks(tp, peaks, tmp_path, tp):
        assert 4 * VOCAB_SIZE * MAX_SCORED < short <= profiled
        assert long <= profiled
        assert long < 1.1 * short


@pytest.mark.gpu
def test_the_memory_of_choices_is_claimed_on_a_gpu() -> None:
    """Two copies of the logits that tokens are chosen from, at least; nothing is kept."""
    num_choices, device = 200, torch.device("cuda")
    logits = torch.randn(num_choices + MAX_SCORED, 129_280, device=device)
    touch_choice_memory(logits, num_choices, 2)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    touch_choice_memory(logits, num_choices, 2)
    assert torch.cuda.max_memory_allocated(device) - before >= 2 * 4 * logits[:num_choices].numel()
    assert torch.cuda.memory_allocated(device) == before


def scored(directory: Path, tp: int, token_ids: list[int]) -> list[Any]:
    """On a rank: return the prompt's log probabilities by engines with two sizes of steps, the second in pieces."""
    answers = []
    for num_batched in (8192, 100):
        engine, _ = load(directory, tp, num_batched, 4)
        request = engine.add(token_ids, SamplingParams(max_new_tokens=1, prompt_logprobs=_NUM_TOP))
        list(engine.run())
        answers.append(request.prompt_logprobs)
        engine.close()
    return answers


@pytest.mark.parametrize("tp", [1, 2])
def test_prompts_of_many_steps_have_transformers_scores(tp: int, tmp_path: Path) -> None:
    model = save_tiny("deepseek_v3", tmp_path, vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_LEN)
    token_ids = torch.randint(VOCAB_SIZE, (2 * MAX_SCORED + 90,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = model.eval()(torch.tensor([token_ids])).logits[0].double().log_softmax(-1)
    for entries in run_ranks(tp, scored, tmp_path, tp, token_ids)[0]:
        assert [entry.token_id for entry in entries] == token_ids
        assert entries[0].logprob is None
        for entry, row in zip(entries[1:], expected, strict=False):
            assert math.isclose(entry.logprob, row[entry.token_id].item(), abs_tol=1e-4)
            values = row.topk(_NUM_TOP).values.tolist()
            assert [value for _, value in entry.top] == pytest.approx(values, abs=1e-4)
