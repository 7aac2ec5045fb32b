"""GLM-5-Next in vLLM: sparse MLA over pools with this package's selection and attention, next to vLLM's own linear
attention, in its real engine on CPUs.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.engines.glm_next_model import save_glm_next
from tests.engines.test_vllm_sparse import check, check_sharded_drafts, run_engine

# Blocks have 128 tokens on each rank, because a state of linear attention is as large: two ranks reuse 256.
OPTIONS = {"block_size": 128, "longest": 300}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_glm_next(tmp_path_factory.mktemp("glm_next"))


def check_pools(report: dict[str, Any]) -> None:
    """Check a report (`test_vllm_sparse.check`), and that pools begin in one step and end in another."""
    check(report)
    caches = "Glm5NextIndexerCache", "Glm5NextTailCache"
    assert report["layers"][:8] == ["Glm5NextLinearAttention", *caches, "DCPMLAPooledImpl"] * 2
    assert report["calls"]["pools begun before"] > 5
    assert report["without tails"] > 0.05, "keys of pools without their first tokens would not be seen"


def test_one_rank(model: Path) -> None:
    """Long prefills attend to up-projected keys under a mask."""
    report = run_engine(model, 1, route="mha", **OPTIONS)
    check_pools(report)
    assert report["calls"]["dcp_mla_prefill"] >= 4


def test_drafts_under_decode_context_parallelism(model: Path) -> None:
    """TP 2 x DCP 2 in groups of two pools, two drafts a step by an MTP module, whose layer selects pools, too."""
    layout = {"decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": 8}
    drafts = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
    report = run_engine(model, 2, route="absorbed", **layout, **drafts, **OPTIONS)
    check_pools(report)
    check_sharded_drafts(report)
