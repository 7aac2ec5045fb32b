"""Experts spread whole over the ranks: the tokens of transformers' unsharded models, and what each rank holds."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from dcpmla.attention.step.metadata import StepBuilder
from dcpmla.attention.step.table import StepRequests
from dcpmla.cache.latent import LatentCache, num_blocks
from dcpmla.comm.select import select_exchange
from dcpmla.config import DCPConfig
from dcpmla.integrations.model_files import load_config
from dcpmla.integrations.sharded_model import ShardedModel
from dcpmla.integrations.transformers import load_model
from dcpmla.model.moe import MoE
from dcpmla.parallel.mesh import DCPMesh, init_mesh
from dcpmla.parallel.quantized import dequantize
from tests.integrations.test_checkpoint import save_fp8
from tests.integrations.test_quantized_families import outcome
from tests.support.models import FAMILIES, VOCAB_SIZE, random_model, save_tiny, tiny_config
from tests.support.ranks import run_ranks

ARCHITECTURES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "mistral4")
WITH_EXPERTS = [family for family in FAMILIES if family not in ("youtu", "minicpm3")]
NUM_EXPERTS = 8
PROMPT_LENS = (1, 5, 37)
NUM_DECODES = 2
Generated = list[tuple[list[int], Tensor]]  # of each prompt, its new tokens and their logits [NUM_DECODES + 1, vocab]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCAB_SIZE - 1, (length,), generator=generator).tolist() for length in PROMPT_LENS]


def save(family: str, directory: Path, **changes: int) -> Any:
    config = tiny_config(family)
    for name, value in {"n_routed_experts": NUM_EXPERTS, **changes}.items():
        setattr(config, name, value)
    model = random_model(config)
    model.save_pretrained(directory)
    return model


def layout(tp: int, dcp: int) -> DCPConfig:
    return DCPConfig(tensor_parallel_size=tp, decode_context_parallel_size=dcp, block_size=4)


def load(
    directory: Path, dcp: DCPConfig, enable_expert_parallel: bool, device_type: str = "cpu"
) -> tuple[ShardedModel, DCPMesh]:
    device = torch.device(device_type, dist.get_rank()) if device_type == "cuda" else torch.device("cpu")
    mesh = init_mesh(dcp.tensor_parallel_size, dcp.decode_context_parallel_size)
    selection = select_exchange(dcp, mesh.dcp_group, "cpu")
    config = load_config(directory)
    model = load_model(
        directory, config, dcp, mesh, selection, torch.float32, device, enable_expert_parallel=enable_expert_parallel
    )
    return model, mesh


def generate(model: ShardedModel, dcp: DCPConfig, mesh: DCPMesh) -> Generated:
    """Run a prefill of all prompts and NUM_DECODES greedy steps, straight through the model."""
    tokens, final_lens = prompts(), [length + NUM_DECODES for length in PROMPT_LENS]
    cache = LatentCache(
        LatentCache.plan(model.attention.config, dcp, model.attention.num_layers, final_lens, torch.float32),
        model.device,
    )
    blocks = iter(range(cache.sizes.num_blocks))
    tables = [[next(blocks) for _ in range(num_blocks(length, dcp))] for length in final_lens]
    new, logits = list(tokens), []
    for _ in range(NUM_DECODES + 1):
        query_lens = [len(ids) for ids in new]
        metadata = StepBuilder(dcp, mesh.dcp_rank, model.device).build(
            StepRequests(query_lens, [len(ids) for ids in tokens], tables)
        )
        token_ids, last_rows = (torch.tensor(ids, device=model.device) for ids in (sum(new, []), query_lens))
        logits.append(model.logits(model.hidden(token_ids, metadata, cache)[last_rows.cumsum(0) - 1]).cpu())
        new = [[token] for token in logits[-1].argmax(-1).tolist()]
        tokens = [ids + more for ids, more in zip(tokens, new, strict=True)]
    of_prompts = torch.stack(logits, 1)
    return [(ids[length:], rows) for ids, length, rows in zip(tokens, PROMPT_LENS, of_prompts, strict=True)]


Held = list[tuple[Tensor, Tensor, Tensor, int]]  # of each mixture: gate_up, down, the gate's weight, shared columns


def held(model: ShardedModel) -> Held:
    """Return this rank's part of every mixture of experts."""
    mixtures = [module for module in model.hidden_states.modules() if isinstance(module, MoE)]
    values = []
    for moe in mixtures:
        gate_up, down = (dequantize(weight, torch.float32) for weight in moe.experts)
        columns = 0 if moe.shared is None else moe.shared.down_proj.in_features
        values.append((gate_up.cpu(), down.cpu(), moe.gate.weight.sum(0).detach().cpu(), columns))
    return values


def run(
    directory: Path, layouts: list[DCPConfig], enable_expert_parallel: bool = True, device_type: str = "cpu"
) -> tuple[list[Generated], Held]:
    loaded = [(*load(directory, dcp, enable_expert_parallel, device_type), dcp) for dcp in layouts]
    return [generate(model, dcp, mesh) for model, mesh, dcp in loaded], held(loaded[0][0])


def check_generated(generated: Generated, reference: Any, where: str) -> None:
    for prompt, (tokens, logits) in zip(prompts(), generated, strict=True):
        with torch.no_grad():
            expected = reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0, msg=lambda text: f"{where}: {text}")
        assert tokens == expected.argmax(-1).tolist(), where


def check_held(parts: list[Held], reference: Any, num_experts: int) -> None:
    """Whole experts in order, every expert on one rank; shared MLPs are cut, gates are everywhere."""
    num_own = num_experts // len(parts)
    mixtures = [module for module in reference.modules() if hasattr(module, "experts")]
    assert len(mixtures) == len(parts[0]) > 0
    for index, mixture in enumerate(mixtures):
        gate = mixture.router.classifier if hasattr(mixture, "router") else mixture.gate
        for rank, (gate_up, down, weight, _) in enumerate(part[index] for part in parts):
            own = slice(rank * num_own, (rank + 1) * num_own)
            assert torch.equal(gate_up, mixture.experts.gate_up_proj[own]), f"gate_up of layer {index} on rank {rank}"
            assert torch.equal(down, mixture.experts.down_proj[own]), f"down of layer {index} on rank {rank}"
            assert torch.equal(weight, gate.weight), f"gate of layer {index} on rank {rank}"
        if hasattr(mixture, "shared_experts"):
            assert sum(part[index][3] for part in parts) == mixture.shared_experts.down_proj.in_features


@pytest.mark.parametrize(
    ("family", "tp"), [*((family, tp) for family in ARCHITECTURES for tp in (2, 4)), ("longcat_flash", 8)]
)
def test_logits_tokens_and_whole_experts(family: str, tp: int, tmp_path: Path) -> None:
    reference, layouts = save(family, tmp_path), [layout(tp, 1), layout(tp, tp)]
    results = run_ranks(tp, run, tmp_path, layouts)
    for rank, (generated, _) in enumerate(results):
        for dcp, of_layout in zip(layouts, generated, strict=True):
            check_generated(of_layout, reference, f"rank {rank}, dcp {dcp.decode_context_parallel_size}")
    check_held([parts for _, parts in results], reference, NUM_EXPERTS)


def outcomes(directories: list[Path], tp: int) -> list[Any]:
    """On one rank: tokens and logits of each model."""
    return [outcome(directory, tp, True)[0] for directory in directories]


def test_other_kinds_of_attention(tmp_path: Path) -> None:
    """Over the caches of each family, in an engine."""
    families = [family for family in WITH_EXPERTS if family not in ARCHITECTURES]
    references = [save_tiny(family, tmp_path / family) for family in families]
    results = run_ranks(2, outcomes, [tmp_path / family for family in families], 2, timeout=400)
    for index, family in enumerate(families):
        for tokens, logits in sum((of_rank[index] for of_rank in results), []):
            with torch.no_grad():
                expected = references[index](torch.tensor([tokens[:-1]])).logits[0, -len(logits) :]
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
            assert tokens[-len(logits) :] == expected.argmax(-1).tolist(), family


@pytest.mark.gpu_2
@pytest.mark.parametrize("family", ["deepseek_v3", "longcat_flash"])
def test_on_gpus(family: str, tmp_path: Path) -> None:
    reference = save(family, tmp_path)
    results = run_ranks(2, run, tmp_path, [layout(2, 2)], True, "cuda", device="cuda")
    for generated, _ in results:
        check_generated(generated[0], reference, "on GPUs")
    check_held([parts for _, parts in results], reference, NUM_EXPERTS)


def test_one_expert_a_rank(tmp_path: Path) -> None:
    reference = save("deepseek_v3", tmp_path)
    (*results,) = run_ranks(8, run, tmp_path, [layout(8, 4)])
    for generated, _ in results:
        check_generated(generated[0], reference, "one expert a rank")
    check_held([parts for _, parts in results], reference, NUM_EXPERTS)


def test_experts_that_tp_cannot_cut(tmp_path: Path) -> None:
    """TP must cut every expert and refuses; whole experts need no such thing."""
    reference = save("glm4_moe_lite", tmp_path, moe_intermediate_size=44, n_routed_experts=6)
    for generated, _ in run_ranks(3, run, tmp_path, [layout(3, 3)]):
        check_generated(generated[0], reference, "experts of width 44")
    for message in run_ranks(3, message_of, load, tmp_path, layout(3, 1), False):
        wanted = "tensor_parallel_size (-tp) is 3; it must divide the experts' intermediate size 44: choose 1, 2, 4, 11"
        assert message.startswith(wanted)


@pytest.mark.parametrize("enable_expert_parallel", [False, True])
def test_longcat_as_published(enable_expert_parallel: bool, tmp_path: Path) -> None:
    """Zero experts are the identity: published checkpoints have no such weights, those that transformers writes do."""
    reference = save("longcat_flash", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    published = {name: tensor for name, tensor in tensors.items() if not re.search(r"\.experts\.(8|9)\.", name)}
    assert len(published) < len(tensors)
    save_file(published, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for generated, _ in run_ranks(2, run, tmp_path, [layout(2, 2)], enable_expert_parallel):
        check_generated(generated[0], reference, "without weights of zero experts")


def test_one_rank_holds_all_experts(tmp_path: Path) -> None:
    reference = save("longcat_flash", tmp_path)
    ((generated, parts),) = run_ranks(1, run, tmp_path, [layout(1, 1)])
    check_generated(generated[0], reference, "one rank")
    assert len(parts[0][1]) == NUM_EXPERTS


def test_fp8_checkpoint(tmp_path: Path) -> None:
    reference = save_fp8(tmp_path)
    results = run_ranks(2, run, tmp_path, [layout(2, 2)])
    for generated, _ in results:
        check_generated(generated[0], reference, "fp8")
    assert all(len(parts[0][1]) == 2 for _, parts in results)


def message_of(function: Callable[..., Any], *args: Any) -> str:
    try:
        function(*args)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("changes", "tp", "expected"),
    [
        (
            {},
            3,
            "--enable-expert-parallel): 8 experts cannot be spread over 3 ranks; tensor_parallel_size (-tp) must "
            "be one of 1, 2, 4, 8",
        ),
        ({"first_k_dense_replace": 2}, 2, "--enable-expert-parallel): the model has no experts; leave the option out"),
    ],
)
def test_mistakes_are_named(changes: dict[str, int], tp: int, expected: str, tmp_path: Path) -> None:
    save("deepseek_v3", tmp_path, **changes)
    for message in run_ranks(tp, message_of, load, tmp_path, layout(tp, 1), True):
        assert message == f"enable_expert_parallel ({expected}"


def profile(directory: Path, dcp: DCPConfig) -> tuple[int, list[int]]:
    """Tokens that the experts of one layer see in a dummy run, and the shapes of all logits that it wants."""
    model, _ = load(directory, dcp, enable_expert_parallel=False)
    seen: list[int] = []
    rows: list[int] = []
    experts = next(module for module in model.hidden_states.modules() if isinstance(module, MoE))
    experts.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[0]))
    model.head.register_forward_hook(lambda _, __, logits: rows.append(logits.shape[0]))
    model.profile(50, num_logits=7)
    return seen[0], rows


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_profile_runs_all_tokens(family: str, tmp_path: Path) -> None:
    save_tiny(family, tmp_path)
    dcp = dataclasses.replace(layout(2, 2), context_workspace_tokens=64)
    assert run_ranks(2, profile, tmp_path, dcp) == [(50, [7])] * 2
