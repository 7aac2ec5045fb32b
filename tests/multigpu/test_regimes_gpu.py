"""Steps of 128, 2,048 and 8,192 tokens, in CUDA graphs and eager, under DCP 1 and 2, give the logits of a float32
model: layers of real widths, weights in bfloat16 and in block fp8.
"""

from pathlib import Path

import pytest

from dcpmla.config import DCPConfig
from tests.support.conditioned import save_models
from tests.support.gpus import on_gpus
from tests.support.ranks import run_ranks
from tests.support.regimes import FAMILIES, Sizes, check, compare

SIZES = Sizes(
    config={
        **{"vocab_size": 4096, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 16},
        **{"q_lora_rank": 512, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
        **{"head_dim": 64, "qk_head_dim": 192, "v_head_dim": 128, "intermediate_size": 1024},
        **{"moe_intermediate_size": 256, "n_routed_experts": 16, "num_experts_per_tok": 4},
        **{"index_n_heads": 32, "index_head_dim": 128, "index_topk": 512, "num_hidden_layers": 3},
        "max_position_embeddings": 4096,
    },
    budgets=(128, 2048, 8192),
    prompt_lens=(300, 3000, 1111, 2048, 700, 2500),
    turn_len=40,
    max_num_seqs=4,
)


@pytest.fixture(autouse=True)
def _exact_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")  # ranks inherit it


@on_gpus(1, 2)
@pytest.mark.parametrize("family", FAMILIES)
def test_regimes_agree(family: str, num_gpus: int, tmp_path: Path) -> None:
    save_models(family, SIZES.config, tmp_path)
    dcp = DCPConfig(tensor_parallel_size=num_gpus, decode_context_parallel_size=num_gpus)
    for regimes in run_ranks(num_gpus, compare, tmp_path, dcp, SIZES, "cuda", device="cuda"):
        check(regimes)
