"""Decode steps of whole models as `bench generate` measured them, and as the planner predicts them."""

import json
from dataclasses import replace
from typing import Any

import pytest

from dcpmla.bench.geometries import config_of
from dcpmla.integrations.model_size import read_model
from dcpmla.planning.deployment import Deployment
from dcpmla.planning.machine import H200X8, Machine
from dcpmla.planning.measured import calibrate, predict_row
from dcpmla.planning.setting import Setting
from dcpmla.planning.weights import ModelSize
from tests.support.plan_cases import RESULTS, within

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
STEP = {"mode": "graph", "exchange": "direct", "kv_cache_dtype": "bf16", "index_cache_dtype": "auto"}
STEP |= {"enable_expert_parallel": False, "input_len": 8192}


def read_size(model: str, weights: str, vocab_size: int) -> ModelSize:
    """Sizes of the models in results' step*.json: V2-Lite whole, four of DeepSeek-V3's layers, or eight of V4's."""
    if model == "v2lite":
        return read_model(config_of("v2-lite", dtype="bfloat16"))
    if model == "v4":
        ratios = [0, 0, 4, 128, 4, 128, 4, 128]
        config = config_of("deepseek-v4-flash", num_hidden_layers=8, compress_ratios=ratios, dtype="bfloat16")
        config.quantization_config = {**FP8, "expert_dtype": "fp4"}
        return read_model(config)
    sizes = {"num_hidden_layers": 4, "first_k_dense_replace": 1, "n_routed_experts": 256 if "256" in model else 64}
    config = config_of("deepseek-v3", vocab_size=vocab_size, dtype="bfloat16", **sizes)
    if weights == "fp8":
        config.quantization_config = FP8
    return read_model(config)


@pytest.mark.parametrize(
    ("path", "vocab_size", "num_rows"),
    [
        ("h200/step.json", 16384, 12),
        ("h200/step_v3_bf16.json", 16384, 4),
        ("h200/step_32k.json", 16384, 2),
        ("h200/step_v4.json", 129280, 3),
        ("h200x2/step.json", 129280, 8),
        ("h200x4/step.json", 129280, 8),
    ],
)
def test_the_preset_predicts_the_steps_that_were_measured(path: str, vocab_size: int, num_rows: int) -> None:
    rows = json.loads((RESULTS / path).read_text())["rows"]
    rows = [row for row in rows if "device_us" in row]
    assert len(rows) >= num_rows
    for row in rows:
        model = read_size(row["model"], row["weights"], 129280 if "256" in row["model"] else vocab_size)
        setting = Setting(tp=row["tp"], dcp=row["dcp"], kv_cache_dtype="bf16")
        predicted = Deployment(H200X8, model, setting).step_us(row["batch"], row["input_len"])["total"]
        assert within(predicted / row["device_us"], 1, {"v2lite": 1.15, "v4": 1.2}.get(row["model"], 1.1))


def rows_of(machine: Machine, model: ModelSize) -> list[dict[str, Any]]:
    rows = []
    for tp, dcp in ((1, 1), (4, 1), (8, 8)):
        for batch in (1, 8, 128):
            row = {**STEP, "num_parameters": model.num_parameters, "tp": tp, "dcp": dcp, "batch": batch}
            rows.append({**row, "device_us": predict_row(machine, model, row | {"device_us": 1.0})})
    return rows


def test_steps_calibrate_products() -> None:
    model = read_size("v3", "fp8", 129280)
    other = replace(H200X8, product_us=11.0, product_read_share=0.7)
    found = calibrate(H200X8, model, rows_of(other, model))
    assert found.product_us == pytest.approx(11, rel=0.05)
    assert found.product_read_share == pytest.approx(0.7, rel=0.05)
    assert found.packed_read_share == H200X8.packed_read_share  # no row depends on it


def test_steps_that_have_no_prediction() -> None:
    """Those of other models and with drafts."""
    model = read_size("v3", "fp8", 129280)
    row = rows_of(H200X8, model)[0]
    assert predict_row(H200X8, model, row) is not None
    for change in (
        {"num_parameters": 1},
        {"acceptance": 0.8},
        {"dcp_q_replicate": True},
        {"decode_query_dtype": "fp8"},
    ):
        assert predict_row(H200X8, model, row | change) is None
