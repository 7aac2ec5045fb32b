"""Deterministic mode: a request's logits have the same bits alone and among others, in chunks of any size, after hits
of prefixes and preemptions, with drafts, in graphs and eager, for every exchange and every DCP size.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dcpmla.attention.step import metadata as step_module
from dcpmla.attention.step.table import StepRequests
from dcpmla.cli.determinism import ALONE, GRAPH_WAYS, WAYS, Answer, Way, draw_cases, serve
from dcpmla.integrations.arguments import layout
from dcpmla.integrations.engine_options import EngineOptions
from dcpmla.parallel import fixed
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.graph import StepGraph
from dcpmla.runtime.graph_sizes import GraphSize
from dcpmla.runtime.sampling import SamplingParams
from tests.support.combinations import REFUSED
from tests.support.models import MLA_FAMILIES, VOCAB_SIZE, save_tiny
from tests.support.ranks import run_ranks
from tests.support.whole_models import load_engine_on_rank

MAX_LEN = 768
FAMILIES = [family for family in MLA_FAMILIES if (family, "deterministic") not in REFUSED]
AMONG = Way("among 5 others", num_others=5)
FEW = (
    Way("in chunks of 9 tokens", max_num_batched_tokens=9, num_others=2),
    Way("with preemptions, earlier blocks and drafts", 30, is_again=True, is_preempted=True, has_drafts=True),
)
DEFAULTS = {"deterministic": True, "dtype": "float32", "kv_cache_memory_bytes": 1 << 24, "max_num_seqs": 64}
Outcome = dict[str, tuple[int, int]]  # ways -> equal rows of logits, and all


def save(family: str, directory: Path) -> None:
    """Save a random model, which amplifies every rounding."""
    save_tiny(family, directory, max_position_embeddings=MAX_LEN)


def load(directory: Path, tp: int, dcp_size: int, backend: str, options: Mapping[str, Any]) -> Engine:
    """Load an engine on a rank, with options of the layout and of the engine."""
    options = {**DEFAULTS, "dcp_comm_backend": backend, **options}
    return load_engine_on_rank(directory, layout(options, tp, dcp_size), EngineOptions.of(options), MAX_LEN)


def compare(
    directory: Path,
    tp: int,
    layouts: Sequence[tuple[int, str]],
    lengths: Sequence[int],
    ways: Sequence[Way],
    options: Mapping[str, Any] = {},
    has_graphs: bool = False,
) -> Outcome:
    """On a rank: serve prompts in ways in layouts (DCP size, exchange), and compare them with the first layout's."""
    cases, outcome = draw_cases(VOCAB_SIZE, MAX_LEN, lengths), Outcome()
    expected: list[Answer] = []
    for dcp_size, backend in layouts:
        loaded = load(directory, tp, dcp_size, backend, options)
        if has_graphs:
            with_graphs(loaded)
        for way in ways if expected else (ALONE, *ways):
            answers = serve(loaded, way, cases, expected)
            expected = expected or answers
            equal = sum(answer.count_equal(right) for answer, right in zip(answers, expected, strict=True))
            outcome[f"dcp {dcp_size} {backend} {way.name}"] = equal, sum(len(right.logits) for right in expected)
        loaded.close()
    return outcome


def count_whole(loaded: Engine, prompts: Sequence[int]) -> int:
    """Serve prompts of some lengths; return the number of steps that were one graph and had pieces by MHA."""
    assert loaded.mixed_graph is not None
    counted, run = list[bool](), loaded.mixed_graph.run

    def count(inputs: Tensor, requests: StepRequests, size: GraphSize, *more: Any) -> Tensor:
        counted.append(size.is_whole and requests.num_decodes < len(requests.query_lens))
        return run(inputs, requests, size, *more)

    loaded.mixed_graph.run = count  # type: ignore[method-assign]
    for length in prompts:
        loaded.add([1] * length, SamplingParams(max_new_tokens=2, ignore_eos=True))
    list(loaded.run())
    return sum(counted)


def count_whole_steps(directory: Path) -> tuple[int, int]:
    loaded = load(directory, 1, 1, "auto", {"max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_dtype": "fp8"})
    with_graphs(loaded)
    return count_whole(loaded, [20, 5]), count_whole(loaded, [100])


def check(outcomes: Sequence[Outcome]) -> None:
    """Check that all logits were equal on all ranks."""
    for rank, outcome in enumerate(outcomes):
        for name, (equal, total) in outcome.items():
            assert equal == total > 0, f"rank {rank}, {name}: {equal} of {total} rows are equal"


def with_graphs(loaded: Engine) -> None:
    """Give an engine on a CPU the padded steps of graphs, of few tokens, and parts of fewer than some steps have."""
    step_module.PART_ROWS = 40 * 24 * 8  # 24 heads, and 8 classes of tiles
    model, cache, mesh = loaded.model, loaded.cache, loaded.mesh
    steps = model.attention.step_builder(cache.sizes, loaded.dcp, mesh.dcp_rank, model.device)
    limits = 8, loaded.max_model_len
    loaded.graph = StepGraph.decodes(model.decode, torch.tensor(0), cache, steps, mesh, *limits)
    width = loaded.scheduler.costs.tokens_per_request
    loaded.mixed_graph = StepGraph.prompts(model, cache, steps, mesh, 70, *limits, width)


def compare_reordered(directory: Path) -> Outcome:
    """Compare with products whose order of summing depends on the number of rows."""
    multiply = fixed.multiply_rows

    def reordered(x: Tensor, weight: Tensor) -> Tensor:
        return multiply(x, weight) if len(x) == 1 else multiply(x.flip(-1), weight.flip(-1))

    fixed.multiply_rows = reordered
    return compare(directory, 1, [(1, "auto")], (1, 70), (AMONG,))


# test_combinations.py has all of them; the others have DeepSeek-V3's attention.
QUICK = ("deepseek_v2_no_q_lora", "deepseek_v3", "longcat_flash", "minicpm3")


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=() if family in QUICK else pytest.mark.thorough) for family in FAMILIES],
)
def test_families(family: str, tmp_path: Path) -> None:
    save(family, tmp_path)
    check(run_ranks(2, compare, tmp_path, 2, [(1, "auto"), (2, "a2a")], (1, 70), FEW[1:]))


def test_layouts_of_eight_ranks(tmp_path: Path) -> None:
    save("deepseek_v3", tmp_path)
    layouts = [(1, "auto"), (8, "ag_rs")]
    check(run_ranks(8, compare, tmp_path, 8, layouts, (64, 509), (AMONG,), timeout=400))


def test_layouts_of_four_ranks_in_bfloat16(tmp_path: Path) -> None:
    save("deepseek_v2", tmp_path)
    layouts = [(1, "auto"), (4, "a2a")]
    check(run_ranks(4, compare, tmp_path, 4, layouts, (1, 130), FEW, {"dtype": "bfloat16"}, timeout=400))


def test_all_ways(tmp_path: Path) -> None:
    save("deepseek_v3", tmp_path)
    ways = (*WAYS, *GRAPH_WAYS)
    check(run_ranks(1, compare, tmp_path, 1, [(1, "auto")], (1, 63, 64, 130), ways, {}, True))


def test_steps_of_prompts_without_contexts_are_one_graph(tmp_path: Path) -> None:
    """Of a prompt in two pieces, the second has a context."""
    save("deepseek_v3", tmp_path)
    assert run_ranks(1, count_whole_steps, tmp_path) == [(1, 1)]


def test_without_the_mode_they_differ(tmp_path: Path) -> None:
    """The random model is chaotic, and one sum in another order is found."""
    save("deepseek_v3", tmp_path)
    (plain,) = run_ranks(1, compare, tmp_path, 1, [(1, "auto")], (1, 70), (AMONG,), {"deterministic": False})
    (reordered,) = run_ranks(1, compare_reordered, tmp_path)
    for outcome in (plain, reordered):
        assert [equal for equal, _ in outcome.values()] == [16, 0]
