"""What the planner's tests share: measured tables, and short ways to plans."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import transformers

from dcpmla.integrations.model_files import load_config
from dcpmla.integrations.model_size import read_model
from dcpmla.planning.deployment import Deployment
from dcpmla.planning.machine import H200X8
from dcpmla.planning.measured import Row
from dcpmla.planning.recommend import Plan, make_plan
from dcpmla.planning.setting import Setting
from dcpmla.planning.weights import ModelSize

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CONFIGS = Path(__file__).parents[1] / "planning" / "configs"
LAYER = RESULTS / "h200x4" / "layer.json"
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
NUM_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

# 8 x H200, us. NCCL 2.28.9 in CUDA graphs: bytes that one rank gives to one other -> time.
NCCL = {
    "all_gather": {512: 15.1, 2048: 16.3, 18432: 22.2, 131072: 22.5, 1 << 20: 46.8, 4 << 20: 127, 16 << 20: 384},
    "reduce_scatter": {512: 13.9, 2048: 15.6, 18432: 18.4, 131072: 20.3, 1 << 20: 49.2, 4 << 20: 116, 16 << 20: 381},
    "all_to_all": {512: 11.8, 2048: 11.4, 18432: 13.9, 131072: 21.6, 1 << 20: 46.1, 4 << 20: 125, 16 << 20: 400},
}
# The exchange of a layer with 128 heads at NUM_TOKENS, by an implementation that is not ours.
GATHER_OF_8 = (19.6, 18.5, 17.4, 22.1, 28.1, 36.9, 59.4, 96.9, 178)
COMBINE_OF_8 = (12.9, 14.4, 15.9, 20.7, 28.2, 33.6, 53.2, 94.8, 160)
# 2 and 4 x H200, us, in CUDA graphs: an operation of `direct` for 128 heads. (operation, width of a row, ranks) ->
# tokens -> time.
DIRECT = {
    ("gather_heads", 576, 2): {1: 3.4, 8: 5.2, 32: 10.8, 256: 82},
    ("gather_heads", 576, 4): {1: 4.2, 2: 5.4, 4: 6.1, 8: 6.8, 16: 9.3, 32: 15.7, 64: 26.5, 128: 50.5, 256: 93},
    ("combine", 512, 2): {1: 5.8, 8: 5.7, 32: 11.9, 256: 85},
    ("combine", 512, 4): {1: 5.4, 2: 7.8, 4: 6.7, 8: 8.2, 16: 11, 32: 16.5, 64: 28, 128: 50, 256: 95},
    ("combine", 128, 4): {1: 4.8, 8: 5.1, 32: 8, 128: 19, 256: 33},
}
# All-reduce of rows of 7168 in bfloat16, likewise: (ranks, rows) -> time.
ALL_REDUCE = {
    **{(2, 1): 10.9, (2, 8): 10.6, (2, 32): 13.0, (2, 128): 30.3},
    **{(4, 1): 14.7, (4, 8): 14.3, (4, 32): 17.1, (4, 128): 30.0},
}
# (batch, context, heads) -> best of FlashMLA, FA3 and FlashInfer on one H200, bf16 cache.
BEST_ATTENTION = {
    (1, 4096, 16): 16.2,
    (1, 4096, 64): 18.0,
    (1, 4096, 128): 18.2,
    (1, 65536, 16): 38.1,
    (1, 65536, 64): 43.7,
    (1, 65536, 128): 54.8,
    (8, 4096, 16): 22.4,
    (8, 4096, 64): 25.2,
    (8, 4096, 128): 30.4,
    (32, 4096, 16): 46.2,
    (32, 4096, 64): 53.9,
    (32, 4096, 128): 76.0,
    (32, 16384, 16): 147,
    (32, 16384, 64): 156,
    (32, 16384, 128): 240,
    (128, 4096, 16): 147,
    (128, 4096, 64): 151,
    (128, 4096, 128): 244,
}


def within(predicted: float, measured: float, factor: float) -> bool:
    return 1 / factor <= predicted / measured <= factor


def exchange_row(operation: str, exchange: str, tokens: int, **fields: Any) -> Row:
    """Return a row of `bench exchange`, over 8 ranks unless fields say otherwise."""
    row_width = 512 if operation == "combine" else 576
    setting = {"tp": 8, "dcp": 8, "heads": 128, "row_width": row_width, "variant": ""}
    return {"operation": operation, "exchange": exchange, "tokens": tokens, **setting, **fields}


def layer_row(part: str, **fields: Any) -> Row:
    """Return a row of `bench layer`: 4 of DeepSeek-V3's layers on one GPU unless fields say otherwise."""
    setting = {"tp": 1, "dcp": 1, "exchange": "direct", "variant": "", "kv_cache_dtype": "bf16", "num_layers": 4}
    sizes = {"batch": 32, "context": 8192, "heads": 128, "query_dim": 576, "latent_dim": 512}
    return {"part": part, **setting, **sizes, **fields}


def setting_of(tp: int, dcp: int, kv_cache_dtype: str = "bf16", **more: Any) -> Setting:
    return Setting(tp=tp, dcp=dcp, kv_cache_dtype=kv_cache_dtype, **more)


def deployed(model: ModelSize, tp: int, dcp: int, kv_cache_dtype: str = "bf16", **more: Any) -> Deployment:
    """Deploy a model on the preset."""
    return Deployment(H200X8, model, setting_of(tp, dcp, kv_cache_dtype, **more))


def make_plans(
    model: ModelSize, tp: int, dcps: Sequence[int], batch: int, context: int, num_gpus: int | None = None
) -> list[Plan]:
    return [make_plan(deployed(model, tp, dcp, num_gpus=num_gpus), batch, context) for dcp in dcps]


@cache
def read_v3() -> ModelSize:
    """DeepSeek-V3, whose geometry is transformers' default, as its checkpoint stores it."""
    return read_model(transformers.DeepseekV3Config(quantization_config=FP8, dtype="bfloat16"))


@cache
def read_v32() -> ModelSize:
    """DeepSeek-V3.2, likewise."""
    return read_model(transformers.DeepseekV32Config(quantization_config=FP8, dtype="bfloat16"))


@cache
def read_glm5() -> ModelSize:
    """GLM-5 with IndexCache: after the first layers, one of four selects."""
    return read_model(transformers.GlmMoeDsaConfig(dtype="bfloat16", index_topk_freq=4))


@cache
def read_published(name: str) -> ModelSize:
    """Read a config of `configs`: a model as its checkpoint stores it."""
    return read_model(load_config(CONFIGS / f"{name}.json"))


def read_v4() -> ModelSize:
    return read_published("deepseek_v4_flash")


def write(path: Path, content: Any) -> str:
    path.write_text(json.dumps(content))
    return str(path)
