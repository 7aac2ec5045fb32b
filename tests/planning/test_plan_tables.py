"""The planner against measured tables, real checkpoints and real caches, and decode steps of whole models as `bench
generate` measured them.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dcpmla.bench.geometries import config_of
from dcpmla.bench.plots import select
from dcpmla.cache.states import num_states
from dcpmla.comm import nccl
from dcpmla.integrations.model_size import read_model
from dcpmla.parallel import collectives
from dcpmla.parallel.formats import FORMATS
from dcpmla.planning.capacity import capacity_table
from dcpmla.planning.deployment import Deployment, attention_us
from dcpmla.planning.exchange import ExchangeCosts
from dcpmla.planning.machine import COLLECTIVES, H200X8, Collective, Machine
from dcpmla.planning.measured import calibrate, predict_row, read_rows
from dcpmla.planning.parameter import Parameter
from dcpmla.planning.recommend import make_plan
from dcpmla.planning.setting import Setting
from dcpmla.planning.weights import ModelSize
from tests.support.plan_cases import (
    BEST_ATTENTION,
    COMBINE_OF_8,
    GATHER_OF_8,
    NCCL,
    NUM_TOKENS,
    RESULTS,
    make_plans,
    read_glm5,
    read_published,
    read_v3,
    read_v4,
    read_v32,
    setting_of,
    within,
)


@pytest.mark.parametrize("kind", NCCL)
def test_collectives_are_as_measured(kind: str) -> None:
    wrong = {
        size: time for size, time in NCCL[kind].items() if not within(H200X8.collective_us(kind, size, 8), time, 1.4)
    }
    assert not wrong


@pytest.mark.parametrize(
    ("operation", "width", "table"), [("gather_heads", 576, GATHER_OF_8), ("combine", 512, COMBINE_OF_8)]
)
def test_exchange_of_8_ranks_is_as_measured(operation: str, width: int, table: tuple[float, ...]) -> None:
    for num_tokens, time in zip(NUM_TOKENS, table, strict=True):
        predicted = ExchangeCosts(H200X8, 8).time_us(operation, num_tokens, 128, width)
        if operation == "combine":
            predicted -= H200X8.kernel_us  # it packs LSEs and rows with one kernel, we with two
        assert within(predicted, time, 1.3), f"{num_tokens} tokens: predicted {predicted:.1f} us, measured {time} us"


@pytest.mark.parametrize(("exchange", "factor"), [("direct", 1.3), ("a2a", 1.5), ("ag_rs", 1.5)])
def test_our_exchange_is_as_measured(exchange: str, factor: float, v3: ModelSize) -> None:
    """On 4 GPUs, 1 to 4,096 tokens. The file is measured again from time to time: single rows may be further off."""
    rows = select(read_rows(RESULTS / "h200x4" / "exchange.json", "--measured", v3), exchange=exchange)
    ratios = [time / row["median_us"] for row in rows if (time := predict_row(H200X8, v3, row))]
    assert len(ratios) == 3 * 11  # gather_heads, combine, and combine of narrower rows
    assert all(within(ratio, 1, factor) for ratio in ratios)
    assert sum(within(ratio, 1, 1.35) for ratio in ratios) >= 0.8 * len(ratios)


class Kernels(TorchDispatchMode):
    """Whatever launches a kernel on a GPU (all but views and new tensors), and the bytes that it reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.number = self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket.__name__ not in ("new_empty", "empty_like", "_unsafe_view"):
            tensors = {id(leaf): leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor)}
            self.number += 1
            self.num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        return result


def planned(predict: Callable[[Machine], float]) -> dict[str, float]:
    """Return what the planner counts, by machines on which one thing alone takes time, a microsecond each or a byte."""
    free = Collective(overhead_us=0, per_rank_us=0, gb_per_s=1e15)
    nothing = replace(H200X8, kernel_us=0, copy_gb_per_s=1e15, **dict.fromkeys(COLLECTIVES, free))
    changes = {"number": {"kernel_us": 1}, "num_bytes": {"copy_gb_per_s": 1e-3}}
    changes |= {kind: {kind: Collective(overhead_us=0, per_rank_us=0, gb_per_s=1e-3)} for kind in COLLECTIVES}
    return {name: predict(replace(nothing, **change)) for name, change in changes.items()}


@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("kind", [nccl.AllToAll, nccl.AllGatherReduceScatter])
def test_exchange_counts_what_the_code_does(
    kind: type[nccl.AllToAll | nccl.AllGatherReduceScatter], num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_heads, num_ranks, sent = 8, 4, dict.fromkeys(COLLECTIVES, 0)
    monkeypatch.setattr(dist, "get_world_size", lambda _: num_ranks)
    monkeypatch.setattr(dist, "get_rank", lambda _: 1)
    monkeypatch.setattr(collectives, "_all_gather", lambda out, rows, group: sent.update(all_gather=out.nbytes))
    monkeypatch.setattr(nccl, "_reduce_scatter", lambda out, rows, group: sent.update(reduce_scatter=rows.nbytes))
    monkeypatch.setattr(dist, "all_to_all_single", lambda out, rows, group: sent.update(all_to_all=rows.nbytes))
    exchange = kind(None)  # type: ignore[arg-type]
    lse = torch.zeros(num_tokens, num_heads)
    costs_on = partial(ExchangeCosts, num_ranks=num_ranks, backend=exchange.name)
    for operation, heads, width in (("gather_heads", num_heads // num_ranks, 48), ("combine", num_heads, 32)):
        rows = torch.zeros(num_tokens, heads, width, dtype=torch.bfloat16)
        sent.update(dict.fromkeys(COLLECTIVES, 0))
        with Kernels() as kernels:
            exchange.gather_heads(rows) if operation == "gather_heads" else exchange.combine(rows, lse)
        done = {"number": kernels.number, "num_bytes": kernels.num_bytes, **sent}
        sizes = operation, num_tokens, num_heads, width
        assert planned(lambda machine, sizes=sizes: costs_on(machine).time_us(*sizes)) == pytest.approx(done, abs=1e-6)
    sent.update(dict.fromkeys(COLLECTIVES, 0))
    candidates = torch.zeros(num_tokens, 24, dtype=torch.int64)
    with Kernels() as kernels:
        exchange.gather_candidates(candidates).flatten(1)  # as the indexer takes them
    done = {"number": kernels.number, "num_bytes": kernels.num_bytes, **sent}
    assert planned(lambda machine: costs_on(machine).candidates_us(num_tokens, 24)) == pytest.approx(done, abs=1e-6)


def test_attention_is_near_the_best_kernels(v3: ModelSize) -> None:
    for (batch, context, num_heads), time in BEST_ATTENTION.items():
        (layer,) = v3.attention.sorts
        predicted = attention_us(H200X8, layer.reads(context), layer.row_bytes("bf16"), num_heads, batch)
        assert within(predicted, time, 1.4), (
            f"{batch} x {context}, {num_heads} heads: predicted {predicted:.1f} us, measured {time} us"
        )


def test_fp8_weights_carry_a_scale_a_block(v3: ModelSize) -> None:
    """As DeepSeek-V3 is published; `test_plan_truth.py` compares each format with what ranks hold."""
    # 671.03e9 parameters, of which embedding, head, routers and norms take a second byte and each block of 16,384 four
    # more
    assert v3.weight_bytes(1)["total"] == pytest.approx(
        671.03e9 * (1 + 4 / 16384) + 2 * 129280 * 7168 + 58 * 256 * 7168, rel=1e-4
    )


def test_indexers_are_on_every_rank() -> None:
    """GLM-5 has 744e9 parameters (its card) if all its layers select."""
    every_layer = read_model(transformers.GlmMoeDsaConfig(dtype="bfloat16"))
    assert every_layer.weight_bytes(1)["total"] / 2 == pytest.approx(744e9, rel=1e-3)
    indexer = 2 * (32 * 128 * 2048 + (128 + 32) * 6144 + 2 * 128)
    assert every_layer.weight_bytes(8)["total"] - read_glm5().weight_bytes(8)["total"] == (78 - 21) * indexer


def test_cuts_through_fp8_blocks_are_weighed_as_bfloat16(v3: ModelSize) -> None:
    """2048 columns of an expert are 16 blocks: 16 ranks have one each, 32 ranks half of one. Experts whole over the
    ranks, a dense MLP of 144 blocks, and attention keep theirs.
    """
    wide = read_model(transformers.DeepseekV3Config(dtype="bfloat16"))
    for tp, cuts in ((1, False), (8, False), (16, False), (32, True), (64, True)):
        (plan,) = make_plans(v3, tp, (1,), 1, 64)
        assert plan.weights_widened == cuts
        parts, wide_parts = v3.weight_bytes(tp), wide.weight_bytes(tp)
        assert plan.weight_bytes_per_rank == parts["total"]
        assert (parts["experts"] == wide_parts["experts"]) == cuts
        assert parts["attention"] < 0.51 * wide_parts["attention"]
        assert parts["mlp"] < 0.7 * wide_parts["mlp"]  # of 64 ranks some have three blocks, most have two
        spread = v3.weight_bytes(tp, expert_parallel=True)
        assert spread["experts"] < 0.51 * wide.weight_bytes(tp, expert_parallel=True)["experts"]
    attention = replace(v3.attention, config=replace(v3.attention.config, num_heads=384))
    many_heads = replace(v3, attention=attention)
    with pytest.raises(ValueError, match=r"enable_expert_parallel .* must be one of 1, 2, 4"):
        many_heads.weight_bytes(384, expert_parallel=True)


def test_an_uneven_cut_counts_the_fullest_rank() -> None:
    assert Parameter("lm_head.weight", (10, 6), 1, "column", 2).shard_bytes(4) == 10 * 6 * 2  # rows that do not divide
    assert Parameter("down_proj.weight", (10, 6), 1, "row", 2).shard_bytes(4) == 10 * 2 * 2
    blocks = Parameter("mlp.down_proj.weight", (256, 11 * 128), 1, "row", 2, FORMATS["fp8"], in_blocks=True)
    assert blocks.shard_shape(4) == (256, 3 * 128)
    assert blocks.shard_bytes(4) == 256 * 3 * 128 + 2 * 3 * 4


@given(
    read=st.sampled_from([read_v3, partial(read_published, "deepseek_v4_pro")]),
    dcp=st.sampled_from([1, 2, 4, 8]),
    kv_cache_dtype=st.sampled_from(["bf16", "fp8_ds_mla"]),
    batch=st.integers(1, 64),
    context=st.integers(1, 1_000_000),
)
def test_what_fits_is_what_the_cache_takes(
    read: Callable[[], ModelSize], dcp: int, kv_cache_dtype: str, batch: int, context: int
) -> None:
    model, setting = read(), setting_of(8, dcp, kv_cache_dtype)
    plan = make_plan(Deployment(H200X8, model, setting), batch, context)
    room = H200X8.memory_bytes * (1 - H200X8.workspace_share) - plan.weight_bytes_per_rank

    def fits(num_requests: int, seq_len: int) -> bool:
        lens, states = [seq_len] * num_requests, num_states(num_requests)
        return model.attention.plan_cache(setting.dcp_config, lens, torch.bfloat16, states).bytes_per_rank <= room

    assert plan.fits == fits(batch, context)
    assert plan.longest_context == 0 or fits(batch, plan.longest_context)
    assert not fits(batch, plan.longest_context + 1)
    assert plan.max_num_seqs == 0 or fits(plan.max_num_seqs, context)
    assert not fits(plan.max_num_seqs + 1, context)
    assert plan.kv_tokens_total == plan.kv_tokens_per_rank * dcp


@pytest.mark.parametrize(
    ("read", "kv_cache_dtypes", "gain"),
    [
        (read_v32, ("bf16", "fp8", "fp8_ds_mla"), 7.8),
        (read_glm5, ("bf16", "fp8", "fp8_ds_mla"), 7.8),
        (read_v4, ("bf16", "fp8_ds_mla"), 7.5),
    ],
)
def test_sharding_keeps_its_gain(read: Callable[[], ModelSize], kv_cache_dtypes: tuple[str, ...], gain: float) -> None:
    """Entries and index keys are both sharded: 8 ranks hold 8 times as much. Were index keys on every rank, it would be
    3.5 times as much of DeepSeek-V4-Flash in fp8. The capacity table, and the plans beside it.
    """
    model, room, machine = read(), 40 * 10**9, replace(H200X8, memory_bytes=1 << 40)
    table = capacity_table(model.attention, room, 8, (1, 8), num_states=1)
    formats = [(kv, index) for kv in kv_cache_dtypes for index in ("auto", "fp8")]
    assert len(table) == 2 * len(formats)
    for (kv, index), whole, shard in zip(formats, table[::2], table[1::2], strict=True):
        assert shard.tokens_total >= gain * whole.tokens_total > 0
        assert shard.bytes_per_rank <= room < replace(shard, num_blocks=shard.num_blocks + 1).bytes_per_rank
        setting = Setting(tp=8, dcp=8, kv_cache_dtype=kv, index_cache_dtype=index, num_gpus=8)
        plan, plain = (make_plan(Deployment(machine, model, s), 1, 4096) for s in (setting, replace(setting, dcp=1)))
        assert plan.kv_tokens_total >= gain * plain.kv_tokens_total > 0
        assert asdict(setting).items() <= asdict(plan).items()
        assert plan.kv_bytes_per_token == plain.kv_bytes_per_token == shard.bytes_per_token
        assert plan.bytes_per_state == plain.bytes_per_state
        block = replace(shard, num_blocks=1).allocate(torch.device("cpu"))
        keys = [layer.index_keys for layer in block if layer.index_keys is not None]
        assert len(keys) == {61: 61, 78: 21, 43: 21}[model.attention.num_layers]
        if read is not read_v4:
            assert {part.nbytes for part in keys} == {64 * {"auto": 256, "fp8": 132}[index]}
            assert sum(memory.nbytes for memory in block.tensors) == 64 * shard.bytes_per_token


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
