"""Experts spread whole over the ranks: the tokens of transformers' unsharded models, and what each rank holds."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dcpmla.config import DCPConfig
from dcpmla.integrations.sharded_model import ShardedModel
from dcpmla.model.moe import MoE
from dcpmla.parallel.formats import dequantize
from dcpmla.parallel.mesh import DCPMesh
from tests.support.engines import new_engine
from tests.support.models import FAMILIES, drop_zero_experts, save_tiny
from tests.support.oracle import Oracle
from tests.support.ranks import message_of, run_ranks
from tests.support.whole_models import Answers, answers_of, draw_prompts, load_on_rank, poisoned_cache, serve

ARCHITECTURES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "mistral4")
WITH_EXPERTS = [family for family in FAMILIES if family not in ("youtu", "minicpm3")]
NUM_EXPERTS = 8
PROMPT_LENS = (1, 5, 37)
NUM_NEW = 3


def prompts() -> list[list[int]]:
    return draw_prompts(PROMPT_LENS)


def save(family: str, directory: Path, **changes: int) -> Any:
    """Save a model of NUM_EXPERTS experts; as published, it has no weights of LongCat's zero experts."""
    model = save_tiny(family, directory, **{"n_routed_experts": NUM_EXPERTS, **changes})
    if family == "longcat_flash":
        drop_zero_experts(directory, NUM_EXPERTS)
    return model


def layout(tp: int, dcp: int) -> DCPConfig:
    return DCPConfig(tensor_parallel_size=tp, decode_context_parallel_size=dcp, block_size=4)


def load(
    directory: Path, dcp: DCPConfig, enable_expert_parallel: bool, device_type: str = "cpu"
) -> tuple[ShardedModel, DCPMesh]:
    return load_on_rank(directory, dcp, device_type, enable_expert_parallel=enable_expert_parallel)


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
) -> tuple[list[Answers], Held]:
    """On one rank: return the answers by an engine of each layout, and what the last model holds."""
    results = []
    for dcp in layouts:
        model, mesh = load(directory, dcp, enable_expert_parallel, device_type)
        engine = new_engine(model, poisoned_cache(model, dcp, [48] * 4, 6), dcp, mesh, 48, 64, max_num_seqs=3)
        results.append(answers_of(serve(engine, prompts(), NUM_NEW, ignore_eos=True)))
        engine.close()
    return results, held(model)


def check_generated(generated: Answers, reference: Oracle, where: str) -> None:
    for prompt, (tokens, logits) in zip(prompts(), generated, strict=True):
        reference.check(prompt, tokens, logits, where)


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
    ("family", "tp", "num_experts"),
    [
        *((family, 2, NUM_EXPERTS) for family in ARCHITECTURES),
        ("longcat_flash", 1, NUM_EXPERTS),
        ("longcat_flash", 4, NUM_EXPERTS),
        ("deepseek_v3", 4, 4),
        *(
            pytest.param(family, 4, NUM_EXPERTS, marks=pytest.mark.thorough)
            for family in ARCHITECTURES
            if family != "longcat_flash"
        ),
        pytest.param("longcat_flash", 8, NUM_EXPERTS, marks=pytest.mark.thorough),
    ],
)
def test_logits_tokens_and_whole_experts(family: str, tp: int, num_experts: int, tmp_path: Path) -> None:
    reference = save(family, tmp_path, n_routed_experts=num_experts)
    layouts = [layout(tp, dcp) for dcp in sorted({1, tp})]
    results, oracle = run_ranks(tp, run, tmp_path, layouts), Oracle(reference)
    for rank, (generated, _) in enumerate(results):
        for dcp, of_layout in zip(layouts, generated, strict=True):
            check_generated(of_layout, oracle, f"rank {rank}, dcp {dcp.decode_context_parallel_size}")
    check_held([parts for _, parts in results], reference, num_experts)


def run_all(directories: list[Path], dcp: DCPConfig) -> list[Answers]:
    """On one rank: return the answers of each model."""
    return [run(directory, [dcp])[0][0] for directory in directories]


def test_other_kinds_of_attention(tmp_path: Path) -> None:
    """Over the caches of each family."""
    families = [family for family in WITH_EXPERTS if family not in ARCHITECTURES]
    oracles = [Oracle(save_tiny(family, tmp_path / family)) for family in families]
    for of_rank in run_ranks(2, run_all, [tmp_path / family for family in families], layout(2, 2), timeout=400):
        for family, oracle, generated in zip(families, oracles, of_rank, strict=True):
            check_generated(generated, oracle, family)


@pytest.mark.gpu_2
@pytest.mark.parametrize("family", ["deepseek_v3", "longcat_flash"])
def test_on_gpus(family: str, tmp_path: Path) -> None:
    reference = save(family, tmp_path)
    results = run_ranks(2, run, tmp_path, [layout(2, 2)], True, "cuda", device="cuda")
    for generated, _ in results:
        check_generated(generated[0], Oracle(reference), "on GPUs")
    check_held([parts for _, parts in results], reference, NUM_EXPERTS)


def test_experts_that_tp_cannot_cut(tmp_path: Path) -> None:
    """TP must cut every expert and refuses; whole experts need no such thing."""
    reference = save("glm4_moe_lite", tmp_path, moe_intermediate_size=44, n_routed_experts=6)
    for generated, _ in run_ranks(3, run, tmp_path, [layout(3, 3)]):
        check_generated(generated[0], Oracle(reference), "experts of width 44")
    for message in run_ranks(3, message_of, load, tmp_path, layout(3, 1), False):
        wanted = "tensor_parallel_size (-tp) is 3; it must divide the experts' intermediate size 44: choose 1, 2, 4, 11"
        assert message.startswith(wanted)


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


def profile(directory: Path, dcp: DCPConfig) -> dict[str, tuple[int, list[int]]]:
    """Return, by family, the tokens that the experts of one layer see in a dummy run, and the rows of all logits that
    it wants.
    """
    profiles = {}
    for family in WITH_EXPERTS:
        model, _ = load(directory / family, dcp, enable_expert_parallel=False)
        seen: list[int] = []
        rows: list[int] = []
        experts = next(module for module in model.hidden_states.modules() if isinstance(module, MoE))
        experts.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0].shape[0]))
        model.head.register_forward_hook(lambda _, __, logits, rows=rows: rows.append(logits.shape[0]))
        model.profile(50, num_logits=7)
        profiles[family] = seen[0], rows
    return profiles


def test_profile_runs_all_tokens(tmp_path: Path) -> None:
    for family in WITH_EXPERTS:
        save_tiny(family, tmp_path / family)
    dcp = dataclasses.replace(layout(2, 2), context_workspace_tokens=64)
    assert run_ranks(2, profile, tmp_path, dcp) == [dict.fromkeys(WITH_EXPERTS, (50, [7]))] * 2
