"""Models with states under random loads, with preemptions, evictions, reused prefixes, aborts and drafts: each request
gets the tokens of a lone request. Free memory of the cache is NaN (`tests/support/state_loads.py`).
"""

from collections import Counter
from pathlib import Path

import pytest

from dcpmla.config import DCPConfig
from tests.support.layouts import dcp_config
from tests.support.models import STATE_FAMILIES, save_tiny
from tests.support.ranks import run_ranks
from tests.support.state_loads import Load, draw_requests, serve
from tests.support.whole_models import load_on_rank

EVENTS = (
    *("preemptions", "hits", "evicted_blocks", "evicted_states", "loaded_blocks", "read_bytes", "aborts"),
    *("accepted_drafts", "rejected_drafts"),
)
# One has drafts and graphs, one graphs alone, one drafts alone, one neither. Two have host memory and a disk.
LOADS = (3, 13, 6, 8)
FAMILIES = [family for family in STATE_FAMILIES if family != "kimi_k3"]  # its states are Kimi Linear's
QUICK = ("kimi_linear",)  # on two ranks, as test_combinations.py has the others
SHARDED = [family for family in FAMILIES if family != "bailing_hybrid"]  # its caches are Kimi Linear's


def serve_loads(
    directory: Path, dcp: DCPConfig, seeds: tuple[int, ...], num_requests: int, output_lens: tuple[int, ...]
) -> Counter[str]:
    """On one rank: serve loads of the same requests, and return counts of events."""
    model, mesh = load_on_rank(directory, dcp)
    drawn = draw_requests(model, dcp, mesh, num_requests, output_lens)
    counts: Counter[str] = Counter()
    for seed in seeds:
        counts += serve(
            model, dcp, mesh, Load.draw(seed, num_requests), drawn, 3 * (seed // 2 % 2), directory / f"disk{seed}"
        )
    return counts


@pytest.mark.parametrize(
    ("tp", "family"),
    [
        *((1, family) for family in FAMILIES),
        *(pytest.param(2, family, marks=() if family in QUICK else pytest.mark.thorough) for family in SHARDED),
    ],
)
def test_requests_get_the_tokens_of_lone_ones(family: str, tp: int, tmp_path: Path) -> None:
    save_tiny(family, tmp_path)
    block_size, *requests = 4, 10, (1, 4, 8, 20)
    if family == "deepseek_v4":  # its blocks have 8 tokens a rank: fewer requests would cause no preemptions
        block_size, *requests = 2, 16, (1, 5, 12, 30)
    dcp = dcp_config(tp, tp, block_size=block_size, context_workspace_tokens=64)
    counts = run_ranks(tp, serve_loads, tmp_path, dcp, LOADS if tp == 1 else (2,), *requests, timeout=300)[0]
    assert all(
        counts[event] for event in (EVENTS if tp == 1 else ("hits", "evicted_blocks", "loaded_blocks", "aborts"))
    ), counts
