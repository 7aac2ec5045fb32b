"""Nothing compiles after the start: an engine on a GPU on paper (`tests/support/dry_gpu.py`) launches no variant of a
kernel in random loads that its warm-up has not launched.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from dcpmla.bench.geometries import GEOMETRIES, config_of
from dcpmla.config import DCPConfig
from dcpmla.integrations.engine_options import EngineOptions
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.sampling import SamplingParams
from tests.support import models
from tests.support.dry_gpu import paper_gpu
from tests.support.whole_models import load_engine_on_rank

_CONTEXT = 65536
# Widths that Hopper's kernels take.
_WIDE = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_INDEXER = {"index_head_dim": 128, "index_topk": 2048}
_LAYERS: dict[str, dict[str, Any]] = {
    "deepseek-v3": {"num_hidden_layers": 2, "first_k_dense_replace": 1},
    "v2-lite": {"num_hidden_layers": 2},
    "deepseek-v4-flash": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe", "hash_moe", "moe"],
        **{"dspark_block_size": 5, "dspark_markov_rank": 256, "dspark_noise_token_id": 128799},
        "dspark_target_layer_ids": [0, 1, 2],
    },
}
_EAGER = {"enforce_eager": True}


def save_config(name: str, directory: Path) -> None:
    """Save the config of one of GEOMETRIES with few layers, or of a tiny model with wide heads and long contexts."""
    if name in GEOMETRIES:
        config = config_of(name, **_LAYERS.get(name, {"num_hidden_layers": 4}))
    else:
        with pytest.MonkeyPatch.context() as patch:
            for group, widths in ((models._COMMON, _WIDE), (models._INDEXER, _INDEXER)):
                for field, width in widths.items():
                    patch.setitem(group, field, width)
            patch.setitem(models._COMMON, "max_position_embeddings", _CONTEXT)
            config = models.tiny_config(name)
    config.save_pretrained(directory)


def draw_params(draw: random.Random) -> SamplingParams:
    """Return parameters of any kinds, most of them greedy."""
    if draw.random() < 0.7:
        return SamplingParams(max_new_tokens=draw.choice([1, 4, 20]), ignore_eos=True)
    return SamplingParams(
        max_new_tokens=draw.choice([1, 5]),
        ignore_eos=True,
        temperature=draw.choice([0, 1.0]),
        top_k=draw.choice([0, 5]),
        top_p=draw.choice([1.0, 0.9]),
        min_p=draw.choice([0, 0.1]),
        presence_penalty=draw.choice([0, 0.5]),
        repetition_penalty=draw.choice([1.0, 1.2]),
        logprobs=draw.choice([None, 0, 3]),
        prompt_logprobs=draw.choice([None, 1]),
        logit_bias=draw.choice([{}, {3: 1.0}]),
        min_tokens=draw.choice([0, 1]),
    )


def serve_random_loads(engine: Engine, num_rounds: int) -> None:
    """Serve prompts of all lengths, many with a beginning that is cached, alone and together."""
    draw, vocabulary = random.Random(1), range(engine.model.vocab_size)
    documents = [draw.choices(vocabulary, k=size) for size in (500, 3000, 9000, 20000)]
    for _ in range(num_rounds):
        for _ in range(draw.choice([1, 1, 2, 5, 20])):
            document, prompt = (
                draw.choice(documents),
                draw.choices(vocabulary, k=draw.choice([1, 2, 3, 16, 65, 257, 3000])),
            )
            if draw.random() < 0.5:
                prompt = document[: draw.randrange(1, len(document))] + prompt
            engine.add(prompt[: engine.max_model_len - 40], draw_params(draw))
        for _ in range(draw.choice([1, 3, 10, 40])):
            engine.step()
    for _ in engine.run():
        pass


_FP8 = {"kv_cache_dtype": "fp8", "kv_cache_scale": 0.04}
# Model, TP, DCP, fields of DCPConfig, options of the engine.
CASES: dict[str, tuple[str, int, int, dict[str, Any], dict[str, Any]]] = {
    "V3": ("deepseek-v3", 4, 4, {}, {}),
    "V3, eager": ("deepseek-v3", 4, 4, {}, _EAGER),
    "V3, plain TP, fp8": ("deepseek-v3", 2, 1, _FP8, {}),
    "V2-Lite": ("v2-lite", 1, 1, {}, {}),
    "V4-Flash": ("deepseek-v4-flash", 2, 2, {}, {}),
    "V4-Flash, DSpark": ("deepseek-v4-flash", 2, 2, {}, {"speculative_method": "dspark"}),
    "V3.2": ("deepseek_v32", 2, 2, {}, {}),
    "V3.2, eager": ("deepseek_v32", 2, 2, {}, _EAGER),
    "V3.2, hot tokens": ("deepseek_v32", 2, 2, {"kv_hot_tokens": 5000}, {"kv_offloading_size": 1}),
    "GLM-5-Next": ("glm5_next_text", 2, 2, {}, {}),
}
MORE: dict[str, tuple[str, int, int, dict[str, Any], dict[str, Any]]] = {
    "V3, fp8, eager": ("deepseek-v3", 4, 4, {**_FP8, "decode_query_dtype": "fp8"}, _EAGER),
    "V3, a2a": ("deepseek-v3", 4, 2, {"dcp_comm_backend": "a2a"}, {}),
    "V3, ag_rs, eager": ("deepseek-v3", 4, 4, {"dcp_comm_backend": "ag_rs"}, _EAGER),
    "V3, fp8 rows, eager": ("deepseek-v3", 4, 4, {"dcp_exchange_dtype": "fp8"}, _EAGER),
    "V3, replicated queries, eager": ("deepseek-v3", 4, 4, {"dcp_q_replicate": True}, _EAGER),
    "V3, values first, eager": ("deepseek-v3", 4, 4, {"dcp_project_before_merge": True}, _EAGER),
    "V3, deterministic": ("deepseek-v3", 4, 4, {"deterministic": True, "cp_kv_cache_interleave_size": 64}, {}),
    "V3, experts over ranks": ("deepseek-v3", 4, 4, {}, {"enable_expert_parallel": True}),
    "V3, n-grams": ("deepseek-v3", 4, 4, {}, {"speculative_method": "ngram"}),
    "V3, MTP": ("deepseek-v3", 4, 4, {}, {"speculative_method": "mtp"}),
    "V3, MTP, eager": ("deepseek-v3", 4, 4, {}, {"speculative_method": "mtp", **_EAGER}),
    "Kimi-K2": ("kimi-k2", 8, 8, {}, {}),
    "V4-Flash, eager": ("deepseek-v4-flash", 2, 2, {}, _EAGER),
    "V4-Flash, DSpark, eager": ("deepseek-v4-flash", 2, 2, {}, {"speculative_method": "dspark", **_EAGER}),
    "V4-Pro, fp8": ("deepseek-v4-pro", 4, 4, {"kv_cache_dtype": "fp8_ds_mla", "index_cache_dtype": "fp8"}, {}),
    "V3.2, fp8": ("deepseek_v32", 2, 2, {"kv_cache_dtype": "fp8_ds_mla", "index_cache_dtype": "fp8"}, {}),
    "GLM-5-Next, eager": ("glm5_next_text", 2, 2, {}, _EAGER),
    **{name: (name, 2, 2, {}, {}) for name in ("glm_moe_dsa", "mistral4", "hy_v4", "axk2")},
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs that are not on paper")
@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.thorough) for name in MORE)])
def test_nothing_compiles_after_the_warm_up(name: str, tmp_path: Path) -> None:
    model, tp, dcp, layout, options = (CASES | MORE)[name]
    save_config(model, tmp_path)
    config = DCPConfig(tensor_parallel_size=tp, decode_context_parallel_size=dcp, **layout)
    limits: dict[str, Any] = {"dtype": "bfloat16", "max_num_batched_tokens": 2048, "max_num_seqs": 32}
    limits["kv_cache_memory_bytes"] = 1 << 30
    with paper_gpu(tp) as launches:
        engine = load_engine_on_rank(
            tmp_path, config, EngineOptions(load_format="dummy", **limits, **options), device_type="cuda"
        )
        before = launches.copy()
        serve_random_loads(engine, 8)
        new = launches.new_since(before)
        assert not new, "\n".join(new)
