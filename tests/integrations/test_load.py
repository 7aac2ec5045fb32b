"""Random loads on real ranks: tokens and logits of transformers' unsharded model for every request, and the same
decisions on all ranks.
"""

import itertools
import json
import random
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcpmla.config import DCPConfig
from dcpmla.parallel.collectives import PeerFault
from dcpmla.runtime.graph import StepGraph
from dcpmla.runtime.sampling import SamplingParams
from tests.support.costs import DrawnCosts
from tests.support.engines import new_engine
from tests.support.hash_model import HashModel, alone, alone_ignoring_eos, make_engine
from tests.support.layouts import dcp_config
from tests.support.models import VOCAB_SIZE, save_tiny
from tests.support.oracle import Oracle
from tests.support.ranks import run_ranks
from tests.support.recorded import RecordedDrafter
from tests.support.whole_models import Answers, answers_of, load_engine_on_rank, load_on_rank, poisoned_cache

MAX_MODEL_LEN = 100


def make_load(seed: int, block_tokens: int) -> list[tuple[list[int], int, float]]:
    """Prompts with common beginnings, new tokens, arrival times."""
    rng = random.Random(seed)
    shared = [[rng.randrange(1, VOCAB_SIZE - 1) for _ in range(rng.randrange(2 * block_tokens))] for _ in range(2)]
    load = []
    for _ in range(8):
        own = [rng.randrange(1, VOCAB_SIZE - 1) for _ in range(rng.randrange(1, 12))]
        load.append(((rng.choice(shared) + own)[: MAX_MODEL_LEN - 30], rng.randrange(1, 28), rng.random() * 0.1))
    return load


def serve(
    directory: Path, dcp: DCPConfig, seeds: list[int], device_type: str, with_drafts: bool = False
) -> list[tuple[Answers, dict[str, Any]]]:
    """On one rank: each load's outcome and the engine's totals. Clocks and speeds of the ranks differ.

    Args:
        with_drafts: served again, with drafts of which most are right, in padded steps that are launched ahead of them.
    """
    if dist.get_rank() % 2:
        clock = time.monotonic
        time.monotonic = lambda: 2 * clock() + 1000
    model, mesh = load_on_rank(directory, dcp, device_type)
    results = []
    block_tokens = model.attention.plan_cache(dcp, [1], model.dtype, 1).block_tokens
    num_drafts = 3 if with_drafts else 0
    recorded: dict[str | int, list[int]] = {}
    for seed, drafts in itertools.product(seeds, (False, True) if with_drafts else (False,)):
        load = make_load(seed, block_tokens)
        largest = max(len(prompt) + num_new - 1 for prompt, num_new, _ in load)
        seq_lens = [largest, block_tokens] if seed % 2 else [largest] * 4  # little room, and more
        cache = poisoned_cache(model, dcp, seq_lens, 7, num_drafts)
        plan = cache.sizes
        how: dict[str, Any] = {}
        if drafts:
            how["drafter"] = RecordedDrafter(num_drafts, recorded, 0.8, VOCAB_SIZE)
            steps = model.attention.step_builder(cache.sizes, dcp, mesh.dcp_rank, model.device)
            limits = 5, MAX_MODEL_LEN, 1 + num_drafts
            token = torch.tensor(0, device=model.device)
            how["graph"] = StepGraph.decodes(model.decode, token, cache, steps, mesh, *limits)
        how["costs"] = costs = DrawnCosts(seed, absorbs=plan.num_states == 0)
        engine = new_engine(model, cache, dcp, mesh, MAX_MODEL_LEN, (5, 16, 1000)[seed % 3], max_num_seqs=5, **how)
        requests = []
        for index, (prompt, num_new, arrival) in enumerate(sorted(load, key=lambda piece: piece[2])):
            options = {"arrival_time": arrival, "keep_logits": True, "request_id": index}
            requests.append(engine.add(prompt, SamplingParams(max_new_tokens=num_new), **options))
        while engine.has_requests:
            engine.step()
            if dist.get_rank() == 1:
                time.sleep(random.random() * 0.002)
        assert engine.allocator.num_free == plan.num_blocks
        assert bool(costs.num_absorbed) == (plan.num_states == 0)
        totals = {key: value for key, value in asdict(engine.stats).items() if not key.endswith("seconds")}
        outcome = answers_of(requests)
        recorded = {request.request_id: request.token_ids for request in requests}
        if drafts == with_drafts:
            results.append((outcome, totals))
    return results


@pytest.mark.parametrize(
    ("tp", "dcp_size", "interleave", "family", "with_drafts"),
    [
        (1, 1, 1, "deepseek_v3", False),
        (2, 2, 1, "deepseek_v3", True),
        (4, 2, 4, "deepseek_v3", False),
        pytest.param(2, 2, 2, "deepseek_v4", True, marks=pytest.mark.thorough),
        pytest.param(2, 2, 1, "deepseek_v32", True, marks=pytest.mark.thorough),
        pytest.param(3, 3, 2, "glm_moe_dsa", False, marks=pytest.mark.thorough),
    ],
)
def test_a_load_gets_what_its_requests_get_alone(
    tp: int, dcp_size: int, interleave: int, family: str, with_drafts: bool, tmp_path: Path
) -> None:
    check_loads(tp, dcp_size, interleave, tmp_path, "cpu", family, with_drafts)


def check_loads(
    tp: int,
    dcp_size: int,
    interleave: int,
    directory: Path,
    device_type: str,
    family: str = "deepseek_v3",
    with_drafts: bool = False,
) -> None:
    oracle = Oracle(save_tiny(family, directory))
    # A block has at most 32 tokens (a row of DeepSeek-V4 has 4), so that requests outgrow theirs and are preempted.
    block_size = 4 if dcp_size < 4 else 2
    workspace = 5 * block_size * dcp_size * interleave
    dcp = dcp_config(tp, dcp_size, interleave, block_size=block_size, context_workspace_tokens=workspace)
    seeds = list(range(6 if tp == 1 else 2 if family == "deepseek_v4" else 3))  # three budgets, two sizes of a cache
    arguments = directory, dcp, seeds, device_type, with_drafts
    ranks = run_ranks(tp, serve, *arguments, device=device_type, timeout=300)
    for number, seed in enumerate(seeds):
        outcome, totals = ranks[0][number]
        for others, other_totals in (results[number] for results in ranks[1:]):
            assert other_totals == totals
            assert [tokens for tokens, _ in others] == [tokens for tokens, _ in outcome]
        row_tokens = 4 if family == "deepseek_v4" else 1
        load = sorted(make_load(seed, dcp.virtual_block_size * row_tokens), key=lambda piece: piece[2])
        for (prompt, num_new, _), (tokens, logits) in zip(load, outcome, strict=True):
            oracle.check(prompt, tokens, logits)
            assert len(tokens) == num_new or tokens[-1] == VOCAB_SIZE - 1
    all_totals = [totals for _, totals in ranks[0]]
    assert sum(totals["num_cached_tokens"] for totals in all_totals) > 0
    assert sum(totals["num_preemptions"] for totals in all_totals) > 0
    assert (sum(totals["num_accepted_tokens"] for totals in all_totals) > 0) == with_drafts


class OddHashModel(HashModel):
    """Its best token is another one on every rank but the first."""

    def hidden(self, *args: Any) -> torch.Tensor:
        return super().hidden(*args).roll(dist.get_rank(), dims=-1)


def serve_odd_logits(prompts: list[list[int]]) -> list[tuple[list[int], str | None]]:
    mesh = SimpleNamespace(tp_size=2, tp_rank=dist.get_rank(), dcp_size=1, dcp_rank=0, tp_group=dist.group.WORLD)
    get_backend = dist.get_backend
    dist.get_backend = lambda group: "nccl"  # so that the hosts get a group of their own
    engine = make_engine(num_blocks=12, max_num_batched_tokens=9, model=OddHashModel(), mesh=mesh)
    dist.get_backend = get_backend
    requests = [engine.add(prompt, SamplingParams(max_new_tokens=12)) for prompt in prompts]
    list(engine.run())
    engine.close()
    return [(request.token_ids, request.finish_reason) for request in requests]


class FailingModel(HashModel):
    """Its third step fails on rank 1, and only that rank knows, when the results of that step have come."""

    def __init__(self) -> None:
        super().__init__()
        self.faults = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        self._num_checked = 0

    def hidden(self, *args: Any) -> torch.Tensor:
        out = super().hidden(*args)
        if len(self.steps) == 3 and dist.get_rank() == 1:
            self.faults[1].fill_(7)
        return out

    def check(self) -> None:
        self._num_checked += 1
        if self._num_checked == 3 and self.faults[1]:
            raise PeerFault("nothing came from rank 2")


def serve_until_a_step_fails() -> tuple[list[int], str]:
    """On one rank: the tokens of a request, and the error that ended it."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=3))
    mesh = SimpleNamespace(tp_size=2, tp_rank=dist.get_rank(), dcp_size=1, dcp_rank=0, tp_group=group)
    engine = make_engine(num_blocks=12, model=FailingModel(), mesh=mesh)
    request = engine.add([1, 2, 3], SamplingParams(max_new_tokens=9, ignore_eos=True))
    with pytest.raises(RuntimeError) as error:
        list(engine.run())
    return request.token_ids, "; ".join([str(error.value), *getattr(error.value, "__notes__", [])])


def test_no_rank_takes_tokens_of_a_step_that_failed_on_another() -> None:
    (first_tokens, first_error), (tokens, error) = run_ranks(2, serve_until_a_step_fails)
    assert first_tokens == tokens == alone_ignoring_eos([1, 2, 3], 2)
    assert first_error.startswith("an exchange of this step failed on another rank")
    assert error == "nothing came from rank 2"


def test_the_first_rank_chooses_for_all() -> None:
    prompts = [[index, *range(index)] for index in range(6)]
    expected = [alone(prompt, 12) for prompt in prompts]
    ranks = run_ranks(2, serve_odd_logits, prompts)
    assert [tokens for tokens, _ in ranks[0]] == expected
    assert ranks[1] == ranks[0]


NEEDLE = Path(__file__).parents[2] / "examples" / "needle" / "model"


def load_own_directories(pairs: dict[str, list[Path]]) -> None:
    """Raise AssertionError unless loading one's own directory of each pair fails, and says which file of it differs."""
    for name, directories in pairs.items():
        with pytest.raises(
            ValueError, match=rf"^{name} of the model's directory differs between ranks: .* on rank 0, .* on rank 1; "
        ):
            load_engine_on_rank(directories[dist.get_rank()], DCPConfig(tensor_parallel_size=2), seq_lens=[8])


def test_ranks_whose_models_differ_end_with_one_message(tmp_path: Path) -> None:
    """What ends a request, and what its text is, each rank reads from its own directory."""
    pairs = {}
    for name, changes in (("generation_config.json", {"eos_token_id": 5}), ("tokenizer.json", {})):
        other = tmp_path / name
        other.mkdir()
        for file in NEEDLE.iterdir():
            if file.name != name:
                (other / file.name).symlink_to(file)
        (other / name).write_text(json.dumps(json.loads((NEEDLE / name).read_text()) | changes))
        pairs[name] = [NEEDLE, other]
    run_ranks(2, load_own_directories, pairs)
