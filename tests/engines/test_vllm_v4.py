"""DeepSeek-V4 in vLLM with this package's attention: vLLM's real engine on CPUs, against transformers."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dcpmla.attention.compressed.cache import CompressedCache, CompressedPlan
from dcpmla.integrations.families.deepseek_v4_config import compressed_config
from dcpmla.integrations.vllm import FIRST_WITH_V4
from dcpmla.integrations.vllm.compressed import options
from dcpmla.integrations.vllm.compressed.memory import fixed_bytes
from dcpmla.integrations.vllm.compressed.weights import reformatted
from tests.engines.test_vllm_names import VERSIONS
from tests.engines.trees import vllm_tree, vllm_variables
from tests.engines.vllm_names import Name, has, moved, uncalled
from tests.engines.vllm_v4_drafts import save_v4_with_module
from tests.engines.vllm_v4_model import save_v4
from tests.support.launchers import ROOT, run_together, torchrun
from tests.support.models import tiny_config
from tests.support.quantized_models import dequantize, quantize

PLUG_IN = ROOT / "dcpmla" / "integrations" / "vllm" / "compressed"
SCHEDULES_AHEAD = {"distributed_executor_backend": "uni", "async_scheduling": True}
# Methods of vLLM's that the plug-in replaces, by the modules that call them.
CALLED = {
    "vllm.v1.core.sched.scheduler": (
        "get_computed_blocks",
        "_mamba_block_aligned_split",
        "_update_after_schedule",
        "reset_prefix_cache",
    ),
    "vllm.v1.worker.gpu.model_runner": ("add_requests", "set_attn"),
    "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator": ("_update_draft_decode_metadata",),
}
WITH_V4 = [version for version in VERSIONS if tuple(map(int, version.split(".")[:2])) >= FIRST_WITH_V4]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_v4(tmp_path_factory.mktemp("v4"))


def run_engine(
    model: Path, folder: Path, num_ranks: int, variables: dict[str, str], **engine: Any
) -> tuple[dict[str, Any], str]:
    """Run `vllm_v4_cases.py`: return its report and its stderr."""
    variables = vllm_variables(vllm_tree(WITH_V4[-1]), folder) | variables
    program = [ROOT / "tests" / "engines" / "vllm_v4_cases.py", model, json.dumps(engine)]
    (ended,) = run_together([(torchrun(program, num_ranks), variables)], timeout=500)
    return json.loads(ended.stdout.splitlines()[-1]), ended.stderr


def check(report: dict[str, Any], num_layers: int = 4, tolerance: float = 1e-4) -> None:
    """Check logprobs, the code that has run, reuse, and that the cache is a part of vLLM's allocation."""
    for turn, ended in (("first", 20), ("aborted", 19), ("tight", 4), ("dummies", 4), ("static", 4)):
        assert report[turn]["ended"] == ended, turn
        assert report[turn]["error"] < tolerance, turn
    calls = report["calls"]
    assert calls["attend"] > 40 * num_layers
    assert calls["dcp_mla_decode"] > 20 * num_layers
    assert calls["attend_prefill"] > 5 * num_layers
    assert report["static"]["steps"] >= 5
    assert report["layers"] == num_layers, "vLLM has caches of its own for windows, states or index keys"
    assert report["in one piece"]
    assert report["bytes"] >= report["needed"]
    assert report["bytes"] <= report["pages"] + report["fixed"]
    assert report["left for pages"] == -report["fixed"], "vLLM's plan counts windows and sums"
    assert report["calls"]["dummy batches"] >= 8
    check_reuse(report, tolerance)


def check_reuse(report: dict[str, Any], tolerance: float = 1e-4, remembers_answers: bool = True) -> None:
    """Check the tokens that requests have reused, and their logprobs."""
    block, reuse = report["tokens"] // report["blocks"], report["reuse"]
    # The first of two prompts that part from others in an earlier block finds a state if a piece has ended there.
    is_short, is_cut, has_room = block == 256, report["cuts prompts"], report["blocks"] > 5
    earlier = [256 * (is_short and is_cut), 256 * is_short]
    assert reuse["one by one"]["cached"] == [0, 512, 512, *earlier, 0, block * remembers_answers]
    assert reuse["together"]["cached"] == [512, 512, block] or not has_room
    assert reuse["after a reset"]["cached"] == [0]
    for turn, ended in (("one by one", 7), ("together", 3), ("after a reset", 1)):
        assert reuse[turn]["ended"] == ended, turn
        assert reuse[turn]["error"] < tolerance, turn
    assert reuse["without copies"]["error"] > 0.05, "states decide nothing: the test would not see that one is wrong"


def test_preempted_requests(model: Path, tmp_path: Path) -> None:
    """TP 1, chosen by --attention-backend CUSTOM, with four blocks for the requests: some lose theirs and restart. vLLM
    schedules steps before it knows the tokens of the last one, as on GPUs.
    """
    report, stderr = run_engine(
        model,
        tmp_path,
        1,
        {},
        attention_backend="CUSTOM",
        num_gpu_blocks_override=5,
        max_num_seqs=4,
        max_num_batched_tokens=1100,
        **SCHEDULES_AHEAD,
    )
    check(report)
    assert report["calls"]["_preempt_request"] >= 1
    assert report["async"]
    assert "dcpmla: prefix caching is off" not in stderr


def test_decode_context_parallel_matches_transformers(model: Path, tmp_path: Path) -> None:
    """TP 2 x DCP 2: prompts of 1 to 300 tokens, 20 at once, in chunks of at most 100 tokens; a block holds twice the
    tokens in as many bytes.
    """
    report, stderr = run_engine(
        model,
        tmp_path,
        2,
        {"DCPMLA_VLLM": "default"},
        decode_context_parallel_size=2,
        cp_kv_cache_interleave_size=2,
        num_gpu_blocks_override=9,
    )
    check(report)
    assert report["tokens"] == 9 * 2 * 256
    assert report["calls"]["gather_heads"] > 100
    assert report["calls"]["combine"] == report["calls"]["gather_heads"]
    assert report["without merge"]["error"] > 0.1, "the merge decides nothing: the test would not see that it is wrong"
    assert "dcpmla: exchange a2a" in stderr


@pytest.fixture(scope="module")
def model_with_module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_v4_with_module(tmp_path_factory.mktemp("v4_mtp"))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_drafts(model_with_module: Path, tmp_path: Path, num_ranks: int) -> None:
    """Drafts of the module are those of a module in plain torch; answers are transformers', whether drafts are rejected
    or accepted. On one rank the number of rejected drafts is known when the next step is already scheduled.
    """
    options = SCHEDULES_AHEAD if num_ranks == 1 else {"decode_context_parallel_size": 2}
    drafts = {"method": "mtp", "num_speculative_tokens": 4 - num_ranks}
    options |= {"attention_backend": "CUSTOM", "num_gpu_blocks_override": 9, "speculative_config": drafts}
    report, _ = run_engine(model_with_module, tmp_path, num_ranks, {}, **options)
    for turn in ("first", "guided"):
        assert report[turn]["ended"] == 20
        assert report[turn]["error"] < 1e-4
    assert report["static"]["ended"] == 6
    assert report["static"]["error"] < 1e-4
    assert report["static"]["steps"] >= 4
    assert report["drafts"]["right"] == report["drafts"]["made"] > 200
    assert report["guided"]["calls"] < 0.8 * report["first"]["calls"], "more drafts are accepted"
    assert report["layers"] == 5
    assert report["bytes"] <= report["pages"] + report["fixed"]
    assert report["async"] == (num_ranks == 1)
    check_reuse(report, remembers_answers=False)


def test_caches_in_8_bits(tmp_path: Path) -> None:
    """Rows and index keys as vLLM caches them by default: transformers' logprobs over rounded rows. Indexers select all
    entries, since rounded keys would tip a choice.
    """
    (tmp_path / "entry_points").mkdir()
    model = save_v4(tmp_path / "model", index_topk=128)
    options = {"attention_backend": "CUSTOM", "num_gpu_blocks_override": 9, "kv_cache_dtype": "fp8"}
    report, _ = run_engine(model, tmp_path / "entry_points", 1, {}, **options)
    check(report, tolerance=0.05)  # a few codes are others; over exact rows the error is 1


@pytest.mark.parametrize("version", WITH_V4)
def test_every_name_is_there(version: str) -> None:
    """Every name that the attention of DeepSeek-V4 imports or replaces, in vLLM's own files."""
    tree = vllm_tree(version)
    models = (("nvidia", "_select_dsv4_attn_cls"), ("cpu", "DeepseekV4CPUAttention"))
    lines = moved(tree, PLUG_IN)
    for module, called in CALLED.items():
        lines += uncalled(tree, module, called)
    for platform, name in models:
        module = f"vllm.models.deepseek_v4.{platform}.model"
        lines += [] if has(tree, Name(module, name)) else [f"{module}.{name} is gone"]
        assert name in (PLUG_IN / "names.py").read_text()
    assert not lines, f"vLLM {version}: {'; '.join(lines)}"


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
        ({"speculative_config": SimpleNamespace(method="dspark")}, "drafts .*--speculative-config.* method mtp"),
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


def test_options_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    options.check(job())
    custom, other = SimpleNamespace(name="CUSTOM"), SimpleNamespace(name="FLASHMLA_SPARSE")
    assert [options.is_chosen(job(backend=backend)) for backend in (None, custom, other)] == [False, True, False]
    monkeypatch.setenv("DCPMLA_VLLM", "default")
    assert [options.is_chosen(job(backend=backend)) for backend in (None, custom, other)] == [True, True, False]


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
