"""Steps of few and of many tokens, in graphs and eager, give the logits of a float32 model; tiny, where there is no GPU
(tests/multigpu/test_regimes_gpu.py has real sizes).
"""

from pathlib import Path

import pytest

from dcpmla.config import DCPConfig
from tests.support.conditioned import save_models
from tests.support.ranks import run_ranks
from tests.support.regimes import DENSE_FAMILIES, Sizes, check, compare

SIZES = Sizes(
    config={
        **{"vocab_size": 256, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4},
        **{"q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
        **{"head_dim": 64, "qk_head_dim": 192, "v_head_dim": 128, "intermediate_size": 256},
        **{"moe_intermediate_size": 256, "n_routed_experts": 4},
        **{"num_hidden_layers": 2, "max_position_embeddings": 128},
    },
    budgets=(16, 128),
    prompt_lens=(15, 100, 45, 75),
    turn_len=5,
    max_num_seqs=3,
)


@pytest.mark.parametrize(("num_ranks", "family"), [*enumerate(DENSE_FAMILIES, start=1)])
def test_regimes_agree(family: str, num_ranks: int, tmp_path: Path) -> None:
    save_models(family, SIZES.config, tmp_path)
    dcp = DCPConfig(tensor_parallel_size=num_ranks, decode_context_parallel_size=num_ranks, block_size=8)
    for regimes in run_ranks(num_ranks, compare, tmp_path, dcp, SIZES, "cpu", timeout=300):
        check(regimes)
