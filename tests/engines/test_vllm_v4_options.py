"""The options, sizes and weights of DeepSeek-V4 in vLLM with this package's attention, without vLLM."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dcpmla.attention.layers.compressed.cache import CompressedCache, CompressedPlan
from dcpmla.integrations.families.deepseek_v4_config import compressed_config
from dcpmla.integrations.vllm import register
from dcpmla.integrations.vllm.compressed import options
from dcpmla.integrations.vllm.compressed.memory import fixed_bytes
from dcpmla.integrations.vllm.compressed.weights import joined, reformatted
from tests.support.models import tiny_config
from tests.support.quantized_models import dequantize, quantize


def job(**fields: Any) -> Any:
    """Return a substitute for vLLM's config of a job, with some fields changed."""
    parallel = {
        "tensor_parallel_size": 2,
        "decode_context_parallel_size": 2,
        "prefill_context_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "cp_kv_cache_interleave_size": 1,
        "use_ubatching": False,
    }
    absent = {"speculative_config": None, "kv_transfer_config": None, "use_v2_model_runner": True}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{name: fields.get(name, value) for name, value in parallel.items()}),
        cache_config=SimpleNamespace(
            cache_dtype=fields.get("cache_dtype", "auto"),
            block_size=fields.get("block_size", 256),
            kv_offloading_size=fields.get("kv_offloading_size"),
        ),
        model_config=SimpleNamespace(hf_config=fields.get("hf_config", tiny_config("deepseek_v4")), max_model_len=1024),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        attention_config=SimpleNamespace(backend=fields.get("backend")),
        **{name: fields.get(name, value) for name, value in absent.items()},
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prefill_context_parallel_size": 2}, "prefill context parallelism"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"use_ubatching": True}, "--enable-dbo"),
        ({"speculative_config": SimpleNamespace(method="dspark")}, r"drafts \(--speculative-config\) .*method mtp"),
        ({"kv_transfer_config": "nixl"}, "--kv-transfer-config"),
        ({"kv_offloading_size": 4.0}, "--kv-offloading-size"),
        ({"use_v2_model_runner": False}, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"cache_dtype": "nvfp4"}, "'nvfp4'; .* has auto, bfloat16, fp8, fp8_ds_mla"),
        ({"tensor_parallel_size": 5}, "tensor_parallel_size .*is 5"),
    ],
)
def test_options_that_it_does_not_have(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options.check(job(**changed))


def test_batch_invariance_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ValueError, match=r"not support .* \(VLLM_BATCH_INVARIANT\); leave it out"):
        options.check(job())
    monkeypatch.setenv("DCPMLA_VLLM", "exchange")
    with pytest.raises(ValueError, match="DCPMLA_VLLM is 'exchange', .* leave VLLM_BATCH_INVARIANT out"):
        register()


def test_options_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    options.check(job())
    custom, other = SimpleNamespace(name="CUSTOM"), SimpleNamespace(name="FLASHMLA_SPARSE")
    assert [options.is_chosen(job(backend=backend)) for backend in (None, custom, other)] == [False, True, False]
    monkeypatch.setenv("DCPMLA_VLLM", "default")
    assert [options.is_chosen(job(backend=backend)) for backend in (None, custom, other)] == [True, True, False]
    alone = [job(backend=backend, decode_context_parallel_size=1) for backend in (None, custom, other)]
    assert [options.is_chosen(each) for each in alone] == [False, True, False]


@pytest.mark.parametrize(("is_caching", "chosen"), [(True, None), (True, "own.Scheduler"), (False, None)])
def test_prefix_caching_needs_this_scheduler(
    is_caching: bool, chosen: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    asked = SimpleNamespace(
        scheduler_config=SimpleNamespace(scheduler_cls=chosen),
        cache_config=SimpleNamespace(enable_prefix_caching=is_caching),
    )
    options.choose_scheduler(asked)
    assert asked.cache_config.enable_prefix_caching == (is_caching and chosen is None)
    assert asked.scheduler_config.scheduler_cls == (options.SCHEDULER if is_caching and chosen is None else chosen)
    assert ("dcpmla: prefix caching is off" in caplog.text) == (chosen is not None)


def test_blocks_hold_whole_entries() -> None:
    """A block of vLLM's has as many rows of the smallest ratio."""
    config = compressed_config(tiny_config("deepseek_v4"))  # ratios 4 and 8
    layout = options.layout_of(job(cache_dtype="fp8"), config)
    assert (layout.block_size, layout.kv_cache_dtype, layout.index_cache_dtype) == (64, "fp8_ds_mla", "fp8")
    with pytest.raises(ValueError, match=r"block_size \(--block-size\) is 20; it must be a multiple of 8"):
        options.layout_of(job(block_size=20), config)
    with pytest.raises(ValueError, match="multiple of 24"):
        options.layout_of(job(block_size=256, cp_kv_cache_interleave_size=3), config)


@pytest.mark.parametrize("block_size", [8, 24, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_pages_and_fixed_bytes_hold_any_cache(block_size: int, dtype: torch.dtype) -> None:
    raw = tiny_config("deepseek_v4")
    raw.head_dim, raw.index_head_dim = 128, 64
    config = compressed_config(raw)
    dcp = options.layout_of(job(block_size=block_size), config)
    fields = {"config": config, "dcp": dcp, "dcp_size": 2, "num_states": 5, "dtype": dtype, "index_dtype": dtype}
    plan = CompressedPlan(num_blocks=1, **fields)
    fixed, page = fixed_bytes(plan), plan.bytes_per_block
    for num_blocks in (1, 2, 3, 31, 63, 64, 65, 100, 127, 128, 1000, 1001):
        plan = CompressedPlan(num_blocks=num_blocks, **fields)
        assert plan.bytes_carved <= num_blocks * page + fixed
        memory = torch.empty(plan.bytes_carved, dtype=torch.int8)
        cache = CompressedCache(plan, torch.device("cpu"), memory)
        starts = [tensor.data_ptr() - memory.data_ptr() for tensor in cache.tensors]
        ends = [start + tensor.nbytes for start, tensor in zip(starts, cache.tensors, strict=True)]
        assert all(end <= start for end, start in zip(ends, [*starts[1:], memory.numel()], strict=True))
        assert all(tensor.untyped_storage().data_ptr() == memory.data_ptr() for tensor in cache.tensors)
    with pytest.raises(ValueError, match="memory has .* bytes; the tensors need"):
        CompressedCache(plan, torch.device("cpu"), memory[1:])


def test_weights_of_a_checkpoint() -> None:
    """Heads of an indexer have their rotated columns first, quantized ones, too; wo_a has its values."""
    torch.manual_seed(0)
    prefix, width, rope = "layers.3.attn.", 128, 64
    codes, scales = quantize(torch.randn(256, 128), (128, 128), powers_of_two=True)
    queries = torch.randn(2 * width, 8)
    plain = {
        "indexer.compressor.wkv.weight": torch.randn(2 * width, 8),
        "indexer.compressor.ape": torch.randn(4, 2 * width),
        "indexer.compressor.norm.weight": torch.randn(width),
        "compressor.wkv.weight": torch.randn(2 * width, 8),
        "wo_b.weight": torch.randn(8, 8),
    }
    stored = {
        "wo_a.scale": scales.to(torch.float8_e8m0fnu),
        "indexer.wq_b.weight": queries.to(torch.float8_e4m3fn),
        **plain,
        "wo_a.weight": codes,
    }
    loaded = dict(reformatted(((prefix + name, tensor) for name, tensor in stored.items()), width, rope))
    assert len(loaded) == len(stored) - 1
    order = torch.cat([torch.arange(rope, width), torch.arange(rope)])
    both = torch.cat([order, order + width])
    for name, expected in (
        ("indexer.wq_b.weight", queries.to(torch.float8_e4m3fn).float()[both]),
        ("indexer.compressor.wkv.weight", plain["indexer.compressor.wkv.weight"][both]),
        ("indexer.compressor.ape", plain["indexer.compressor.ape"][:, both]),
        ("indexer.compressor.norm.weight", plain["indexer.compressor.norm.weight"][order]),
        ("compressor.wkv.weight", plain["compressor.wkv.weight"]),
        ("wo_b.weight", plain["wo_b.weight"]),
        ("wo_a.weight", dequantize(codes, scales, (128, 128)).bfloat16().float()),
    ):
        assert torch.equal(loaded[prefix + name].float(), expected), name
    whole = {"layers.0.attn.wo_a.weight": torch.randn(4, 4)}
    assert dict(reformatted(whole.items(), width, rope)) == whole


class _Quantized(torch.nn.Linear):
    """A layer whose weight has codes; vLLM's return the bias, too."""

    def forward(self, x: torch.Tensor) -> Any:
        return torch.nn.functional.linear(x, self.weight.float()), None


@pytest.mark.parametrize(("is_quantized", "num_more"), [(False, 0), (False, 1), (False, 3), (True, 1), (True, 3)])
def test_projections_of_the_same_rows(is_quantized: bool, num_more: int) -> None:
    """Their outputs stay the same, and so do their weights, in the memory of one matrix where there are several. New
    weights are used.
    """
    torch.manual_seed(0)
    first = _Quantized(8, 6, bias=False) if is_quantized else torch.nn.Linear(8, 6, bias=False)
    if is_quantized:
        first.weight = torch.nn.Parameter(first.weight.to(torch.float8_e4m3fn), requires_grad=False)
    linears = [torch.nn.Linear(8, 2 + index, bias=False) for index in range(num_more)]
    weights, x = [linear.weight.clone() for linear in linears], torch.randn(5, 8)
    expected = [first(x)[0] if is_quantized else first(x), *(linear(x) for linear in linears)]
    with torch.inference_mode():  # as in vLLM's profile
        project = joined([first, *linears])
        outputs = project(x)
    for output, tensor in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, tensor)
    assert all(map(torch.equal, (linear.weight for linear in linears), weights))
    is_joined = num_more + (not is_quantized) > 1
    parts = linears if is_quantized else [first, *linears]
    assert len({linear.weight.untyped_storage().data_ptr() for linear in parts}) == (1 if is_joined else len(parts))
    with torch.no_grad():
        for linear in parts:
            linear.weight.zero_()  # new weights that vLLM loads
    assert not any(output.any() for output in project(x)[len(linears) + 1 - len(parts) :])
