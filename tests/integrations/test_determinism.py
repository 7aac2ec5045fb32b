"""Deterministic mode: a request's logits have the same bits alone and among others, in chunks of any size, after hits
of prefixes and preemptions, with drafts, in graphs and eager, for every exchange and every DCP size.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from dcpmla.cli.determinism import ALONE, WAYS, Answer, Way, draw_cases, serve
from dcpmla.comm.select import select_exchange
from dcpmla.integrations.arguments import layout
from dcpmla.integrations.engine_options import EngineOptions
from dcpmla.integrations.loading import load_engine
from dcpmla.integrations.open_model import open_model
from dcpmla.parallel.mesh import init_mesh
from dcpmla.runtime.engine import Engine
from tests.support.models import VOCAB_SIZE, random_model, tiny_config
from tests.support.ranks import run_ranks

MAX_LEN = 768
FAMILIES = (
    *("deepseek_v2", "deepseek_v2_no_q_lora", "deepseek_v3", "deepseek_v3_neox", "glm4_moe_lite", "longcat_flash"),
    *("mistral4", "youtu", "axk1", "minicpm3"),
)
LENGTHS = (1, 63, 64, 130, 509, 600)
FEW = (
    Way("among 20 others", num_others=20),
    Way("in chunks of 64 tokens", max_num_batched_tokens=64),
    Way("with preemptions, earlier blocks and drafts", 100, is_again=True, is_preempted=True, has_drafts=True),
)
Outcome = dict[str, tuple[int, int]]  # ways -> equal rows of logits, and all


def save(family: str, directory: Path) -> None:
    """Save a random model, which amplifies every rounding."""
    config = tiny_config(family)
    config.max_position_embeddings = MAX_LEN
    random_model(config).save_pretrained(directory)


def load(directory: Path, tp: int, dcp_size: int, **options: object) -> Engine:
    """Load an engine on a rank."""
    dcp, cpu = layout({"deterministic": True, **options}, tp, dcp_size), torch.device("cpu")
    mesh = init_mesh(tp, dcp_size)
    chosen = select_exchange(dcp, mesh.dcp_group, cpu)
    engine_options = EngineOptions(kv_cache_memory_bytes=1 << 24, max_num_seqs=64)
    return load_engine(open_model(str(directory), MAX_LEN), dcp, mesh, chosen, cpu, engine_options)


def compare(
    directory: Path,
    tp: int,
    layouts: Sequence[tuple[int, str]],
    lengths: Sequence[int],
    ways: Sequence[Way],
    **options: object,
) -> Outcome:
    """On a rank: serve prompts in ways in layouts (DCP size, exchange), and compare them with the first layout's."""
    cases, outcome = draw_cases(VOCAB_SIZE, MAX_LEN, lengths), Outcome()
    expected: list[Answer] = []
    for dcp_size, backend in layouts:
        loaded = load(directory, tp, dcp_size, dcp_comm_backend=backend, **options)
        for way in (ALONE, *ways):
            answers = serve(loaded, way, cases, expected)
            expected = expected or answers
            equal = sum(answer.count_equal(right) for answer, right in zip(answers, expected, strict=True))
            outcome[f"dcp {dcp_size} {backend} {way.name}"] = equal, sum(len(right.logits) for right in expected)
        loaded.close()
    return outcome


def check(outcomes: Sequence[Outcome]) -> None:
    """Check that all logits were equal on all ranks."""
    for rank, outcome in enumerate(outcomes):
        for name, (equal, total) in outcome.items():
            assert equal == total > 0, f"rank {rank}, {name}: {equal} of {total} rows are equal"


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    save(family, tmp_path)
    check(run_ranks(2, compare, tmp_path, 2, [(1, "auto"), (2, "a2a")], (1, 64, 130), FEW))


def test_layouts_of_eight_ranks(tmp_path: Path) -> None:
    save("deepseek_v3", tmp_path)
    layouts = [(1, "auto"), (2, "ag_rs"), (4, "a2a"), (8, "ag_rs"), (8, "a2a")]
    check(run_ranks(8, compare, tmp_path, 8, layouts, LENGTHS, FEW[:1], timeout=400))


def test_layouts_of_four_ranks_in_bfloat16(tmp_path: Path) -> None:
    save("deepseek_v2", tmp_path)
    check(run_ranks(4, compare, tmp_path, 4, [(1, "auto"), (4, "a2a")], LENGTHS[2:5], FEW[1:], timeout=400))


def test_all_ways(tmp_path: Path) -> None:
    save("deepseek_v3", tmp_path)
    check(run_ranks(1, compare, tmp_path, 1, [(1, "auto")], LENGTHS, WAYS))
