"""Captured decode steps on one GPU and over NCCL: bit for bit the padded steps, the same tokens, failed captures."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dcpmla.attention.step.metadata import StepBuilder
from dcpmla.config import DCPConfig
from dcpmla.parallel.mesh import init_mesh
from dcpmla.runtime.capture import CannotCapture
from dcpmla.runtime.graph import StepGraph
from tests.runtime.test_graph_caches import compare
from tests.support.gpus import on_gpus
from tests.support.graph_checks import BATCHES, check_model, check_stack, new_cache, open_model_on, serve_loaded
from tests.support.launchers import GENERATE, run_together, torchrun
from tests.support.layouts import dcp_config
from tests.support.models import MLA_FAMILIES, WINDOW_FAMILIES, save_tiny
from tests.support.ranks import on_ranks, run_ranks

CUTS = [
    pytest.param(2, False, "a2a", id="dcp, a2a"),
    pytest.param(2, False, "ag_rs", id="dcp, ag_rs"),
    pytest.param(1, True, "auto", id="expert parallel"),
]


@pytest.fixture(autouse=True)
def _exact_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")  # ranks inherit it


def layout(tp: int, dcp: int, **changes: Any) -> DCPConfig:
    return dcp_config(tp, dcp, block_size=4, context_workspace_tokens=512, **changes)


@pytest.mark.gpu
@pytest.mark.parametrize("in_half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", [*MLA_FAMILIES, *WINDOW_FAMILIES])
def test_models_on_one_gpu(family: str, in_half: bool, tmp_path: Path) -> None:
    save_tiny(family, tmp_path)
    assert run_ranks(1, check_model, tmp_path, layout(1, 1), False, "cuda", in_half, device="cuda") == [len(BATCHES)]


@on_gpus(1, 2)
@pytest.mark.parametrize("options", [{}, {"index_cache_dtype": "fp8"}], ids=["auto", "fp8"])
def test_models_with_entries(num_gpus: int, options: dict[str, str], tmp_path: Path) -> None:
    save_tiny("deepseek_v4", tmp_path)
    run_ranks(num_gpus, compare, tmp_path, layout(num_gpus, num_gpus, **options), "cuda", device="cuda")


@pytest.mark.gpu_2
@pytest.mark.parametrize("family", ["deepseek_v3", "longcat_flash", "mistral4"])
@pytest.mark.parametrize(("dcp_size", "enable_expert_parallel", "backend"), CUTS)
def test_models_on_two_gpus(
    family: str, dcp_size: int, enable_expert_parallel: bool, backend: str, tmp_path: Path
) -> None:
    save_tiny(family, tmp_path)
    dcp = layout(2, dcp_size, interleave=2, dcp_comm_backend=backend)
    assert run_ranks(2, check_model, tmp_path, dcp, enable_expert_parallel, "cuda", device="cuda") == [len(BATCHES)] * 2


@pytest.mark.gpu_2
def test_an_exchange_whose_calls_are_compared_is_captured(tmp_path: Path) -> None:
    save_tiny("deepseek_v3", tmp_path)
    dcp = layout(2, 2, check_exchange=True)
    assert run_ranks(2, check_model, tmp_path, dcp, False, "cuda", device="cuda") == [len(BATCHES)] * 2


@on_gpus(1, 2)
@pytest.mark.parametrize(
    ("num_heads", "topk", "kv_cache_dtype", "decode_query_dtype"),
    [
        (16, None, "auto", "auto"),
        (6, None, "auto", "auto"),
        (16, 24, "auto", "auto"),
        (16, None, "fp8", "fp8"),
        (16, 24, "fp8_ds_mla", "auto"),
    ],
)
def test_stack_of_layers(
    num_gpus: int, num_heads: int, topk: int | None, kv_cache_dtype: str, decode_query_dtype: str
) -> None:
    dcp = dcp_config(
        num_gpus, num_gpus, block_size=64, kv_cache_dtype=kv_cache_dtype, decode_query_dtype=decode_query_dtype
    )
    assert run_ranks(num_gpus, check_stack, dcp, 3, num_heads, "cuda", topk, device="cuda") == [len(BATCHES)] * num_gpus


@on_gpus(1, 2)
@pytest.mark.parametrize("family", ["deepseek_v3", "longcat_flash"])
def test_engines_with_and_without_graphs(num_gpus: int, family: str, tmp_path: Path) -> None:
    """`load_engine` captures by default, with a cache sized to leave room for the graphs."""
    save_tiny(family, tmp_path)
    dcp = DCPConfig(tensor_parallel_size=num_gpus, decode_context_parallel_size=num_gpus, block_size=16)
    for (tokens, is_captured), (eager_tokens, is_captured_eagerly) in run_ranks(
        num_gpus, serve_loaded, tmp_path, dcp, False, "cuda", device="cuda"
    ):
        assert (is_captured, is_captured_eagerly) == (True, False)
        assert tokens == eager_tokens


def fail_to_capture(directory: Path) -> list[str]:
    """Check that a step that cannot be captured says where, and that the next one is captured."""
    dcp = layout(1, 1)
    model, mesh = open_model_on(directory, dcp, False, "cuda")
    cache = new_cache(model.attention.config, model.attention.num_layers, dcp, torch.float32, model.device)
    token, messages = torch.zeros((), dtype=torch.int64, device=model.device), []
    steps = model.attention.step_builder(cache.sizes, dcp, mesh.dcp_rank, model.device)

    def reads_back(inputs: Tensor, *_: object) -> Tensor:
        return inputs[: int(inputs.max()) + len(inputs)].float()

    def takes_too_much(inputs: Tensor, *_: object) -> Tensor:
        out = inputs.float()
        return torch.empty(1 << 50, device=inputs.device) if torch.cuda.is_current_stream_capturing() else out

    for step in (reads_back, takes_too_much):
        with pytest.raises(CannotCapture) as failure:
            StepGraph.decodes(step, token, cache, steps, mesh, 2, 60).capture()
        messages.append(str(failure.value))
        torch.cuda.empty_cache()  # fails if a capture was aborted
    graph = StepGraph.decodes(model.decode, token, cache, steps, mesh, 2, 60)
    graph.capture()
    torch.randn(3, device=model.device).sum().item()  # random numbers and host syncs work as before
    assert graph.is_captured
    graph.release()
    return messages


@pytest.mark.gpu
def test_what_cannot_be_captured(tmp_path: Path) -> None:
    save_tiny("deepseek_v3", tmp_path)
    ((reads_back, takes_too_much),) = run_ranks(1, fail_to_capture, tmp_path, device="cuda")
    assert "synchroniz" in reads_back
    assert "out of memory" in takes_too_much
    assert all("test_graph_gpu.py" in message for message in (reads_back, takes_too_much))


def break_off() -> list[str]:
    """Check that failures of steps, and those that only a capture meets, are errors and do not disable graphs."""
    from tests.runtime.test_graph import DCP
    from tests.support.hash_model import new_cache

    cache, token, messages = new_cache(40, "cuda"), torch.tensor(0, device="cuda"), []

    def waits(inputs: Tensor, *_: object) -> Tensor:
        torch.cuda.synchronize()
        return inputs.float()

    def takes_too_much(inputs: Tensor, *_: object) -> Tensor:
        return torch.empty(1 << 50, device=inputs.device)

    for step in (takes_too_much, waits):
        with pytest.raises(RuntimeError) as failure:
            StepGraph.decodes(step, token, cache, StepBuilder(DCP, 0), init_mesh(1, 1), 2, 16).capture()
        assert not isinstance(failure.value, CannotCapture)
        messages.append(f"{type(failure.value).__name__}: {failure.value}")
    return messages


@pytest.mark.gpu
def test_what_ends_a_capture() -> None:
    ((takes_too_much, waits),) = run_ranks(1, break_off, device="cuda")
    assert takes_too_much.startswith("OutOfMemoryError")
    assert "requests broke off (--enforce-eager" in waits
    assert "test_graph_gpu.py" in waits


def one_rank_runs_out() -> str:
    """Run one rank out of memory in its capture, after a collective; then both ranks capture and replay that
    collective.
    """
    from tests.runtime.test_graph import DCP, MAX_MODEL_LEN, requests_of
    from tests.support.hash_model import new_cache

    mesh, cache, steps = init_mesh(2, 1), new_cache(40, "cuda"), StepBuilder(DCP, 0, "cuda")
    token, token_ids = torch.tensor(0, device="cuda"), torch.tensor([7, 8, 9], device="cuda")

    def adds(inputs: Tensor, *_: object) -> Tensor:
        out = inputs.clone()
        dist.all_reduce(out, group=mesh.tp_group)
        return out

    def runs_out(inputs: Tensor, *_: object) -> Tensor:
        out = adds(inputs)
        if mesh.tp_rank == 1 and torch.cuda.is_current_stream_capturing():
            torch.empty(1 << 50, device=inputs.device)
        return out

    with pytest.raises(CannotCapture) as failure:  # it keeps the frames of the capture alive
        StepGraph.decodes(runs_out, token, cache, steps, mesh, 4, MAX_MODEL_LEN).capture()
    graph = StepGraph.decodes(adds, token, cache, steps, mesh, 4, MAX_MODEL_LEN)
    graph.capture()
    assert graph.run(token_ids, requests_of([1, 2, 3])).tolist() == [14, 16, 18]
    graph.release()
    return str(failure.value)


@pytest.mark.gpu_2
def test_one_rank_runs_out_of_memory() -> None:
    for message in run_ranks(2, one_rank_runs_out, device="cuda"):
        assert "out of memory" in message
        assert message.endswith("on rank 1")


@pytest.mark.gpu
@on_ranks(1, device="cuda")
def test_refusals(tmp_path: Path) -> None:
    from tests.runtime.test_graph import DCP, MAX_MODEL_LEN, requests_of, step_of, sums
    from tests.support.hash_model import new_cache

    mesh, cache = init_mesh(1, 1), new_cache(40, "cuda")
    graph = StepGraph.decodes(
        sums, torch.tensor(0, device="cuda"), cache, StepBuilder(DCP, 0, "cuda"), mesh, 6, MAX_MODEL_LEN
    )
    graph.capture()
    token_ids, requests = torch.tensor([7, 8, 9], device="cuda"), requests_of([3, 4, 5])
    expected = sums(token_ids, step_of(requests, device="cuda"), cache)
    for inputs in (token_ids, token_ids.cpu()):  # ids may come with the step's numbers
        assert torch.equal(graph.run(inputs, requests), expected)
    for match, arguments in {
        "inputs is torch.int32 on cuda:0; the graph takes torch.int64": (token_ids.int(), requests),
        "3 requests of at most 2 tokens; the graph of decodes": (token_ids, requests_of([3, 4, 5], [1, 1, 2])),
    }.items():
        with pytest.raises(ValueError, match=match):
            graph.run(*arguments)
    assert torch.equal(graph.run(token_ids, requests), expected)
    graph.release()


@on_gpus(1, 2)
def test_commands_end_well(num_gpus: int, tmp_path: Path) -> None:
    """Groups whose operations a graph still holds could not be shut down."""
    save_tiny("deepseek_v3", tmp_path / "model")
    common = ["--model", tmp_path / "model", "-tp", num_gpus, "-dcp", num_gpus, "--block-size", 8, "--device", "cuda"]
    common += ["--kv-cache-memory-bytes", 1 << 24]  # other tests use the same GPU
    prompts = ["--prompt-ids", "5,6,7", "--prompt-ids", ",".join(map(str, range(1, 60)))]
    tokens = []
    for more in ([], ["--enforce-eager"]):
        out = tmp_path / "out.json"
        program = [*GENERATE, *common, *prompts, *more, "--max-new-tokens", 9, "--json", out]
        (run,) = run_together([(torchrun(program, num_gpus), {"NVIDIA_TF32_OVERRIDE": "0"})])
        assert ("decode graphs: 2, the largest of 2 requests" in run.stdout) == (not more), run.stderr
        tokens.append([output["token_ids"] for output in json.loads(out.read_text())["outputs"]])
    assert tokens[0] == tokens[1]
    sizes = ["--batch", "1,3", "--input-len", 9, "--output-len", 8]
    program = ["-m", "dcpmla", "bench", "generate", *common, *sizes, "--json", out]
    run_together([(torchrun(program, num_gpus), {})])
    found = [(row["mode"], row["batch"]) for row in json.loads(out.read_text())["rows"]]
    assert found == [(mode, batch) for batch in (1, 3) for mode in ("graph", "eager")]
