"""Decode graphs of whole models where there is no GPU: the same tokens as without, padding that changes nothing, no
wait for a GPU.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dcpmla.attention.layers.linear import spec as linear_spec
from dcpmla.attention.step import long_pieces
from dcpmla.config import DCPConfig
from dcpmla.integrations.sharded_model import ShardedModel
from dcpmla.runtime.graph import StepGraph
from dcpmla.runtime.sampling import SamplingParams
from tests.integrations.test_transformers import prompts
from tests.support.costs import DrawnCosts
from tests.support.engines import new_engine
from tests.support.graph_checks import BATCHES, check_model, check_stack, open_model_on
from tests.support.models import FAMILIES, LARGE4_SHARING, SPARSE_FAMILIES, WINDOW_FAMILIES, save_tiny
from tests.support.ranks import run_ranks
from tests.support.recording import capture
from tests.support.whole_models import Answers, answers_of, poisoned_cache

aten = torch.ops.aten


class NoHostSync(TorchDispatchMode):
    """Fails at what would wait for a GPU.

    (Inside an operator of this package it does not look: on GPUs that is a kernel.)
    """

    FORBIDDEN = (
        aten._local_scalar_dense,
        aten.nonzero,
        aten.masked_select,
        aten.equal,
        aten.is_nonzero,
        aten._unique2,
        aten.bincount,
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in self.FORBIDDEN, f"{func} waits for the GPU"
        if func.overloadpacket == aten.index or (
            func.overloadpacket == aten.index_put_ and args[2].numel() > 1
        ):  # one value: a masked fill
            assert all(index is None or index.dtype != torch.bool for index in args[1]), (
                f"{func} by a mask waits for the GPU"
            )
        return func(*args, **(kwargs or {}))


def serve(directory: Path, dcp: DCPConfig, enable_expert_parallel: bool) -> list[Answers]:
    """On one rank: tokens and logits of the same prompts by engines without graphs, with decodes', with both."""
    model, mesh = open_model_on(directory, dcp, enable_expert_parallel, "cpu")
    results = []
    for with_graph, with_mixed in ((False, False), (True, False), (True, True)):
        cache, limits = poisoned_cache(model, dcp, [80] * 5, 7), (5, 80)
        steps = model.attention.step_builder(cache.sizes, dcp, mesh.dcp_rank, model.device)
        options: dict[str, Any] = {}
        if with_graph:
            options["graph"] = StepGraph.decodes(watched(model), torch.tensor(0), cache, steps, mesh, *limits)
        if with_mixed:
            options["costs"] = costs = DrawnCosts(0, absorbs=steps.layout.traits.absorbs_pieces)
            mixed = StepGraph.prompts(model, cache, steps, mesh, 40, *limits, costs.tokens_per_request)
            options["mixed_graph"] = mixed
            if mesh.tp_size == 1:  # a recording holds no collectives
                capture(mixed)
        engine = new_engine(model, cache, dcp, mesh, 80, 40 if with_mixed else 1000, max_num_seqs=5, **options)
        requests = [
            engine.add(prompt, SamplingParams(max_new_tokens=2 + index), keep_logits=True)
            for index, prompt in enumerate(prompts())
        ]
        list(engine.run())
        engine.close()
        results.append(answers_of(requests))
    return results


def watched(model: ShardedModel) -> Any:
    def decode(*numbers: Any) -> Tensor:
        with NoHostSync():
            return model.decode(*numbers)

    return decode


def check_alike(eager: Answers, others: list[Answers], name: str = "") -> None:
    """Assert that steps in graphs give the answers of eager ones."""
    for answers in others:
        for (tokens, logits), (other_tokens, other_logits) in zip(eager, answers, strict=True):
            torch.testing.assert_close(other_logits, logits, atol=1e-4, rtol=0, msg=lambda text: f"{name}: {text}")
            assert other_tokens == tokens, name


def serve_all(directories: list[Path], dcp: DCPConfig, enable_expert_parallel: bool) -> list[Any]:
    return [serve(directory, dcp, enable_expert_parallel) for directory in directories]


@pytest.mark.parametrize(
    ("tp", "dcp_size", "enable_expert_parallel", "families"),
    [
        (1, 1, False, FAMILIES),
        (
            2,
            2,
            False,
            ["deepseek_v2", "longcat_flash", *SPARSE_FAMILIES[1:], *WINDOW_FAMILIES],
        ),
        (2, 1, True, ["deepseek_v3", "longcat_flash"]),
    ],
    ids=["one rank", "dcp", "expert parallel"],
)
def test_models_with_and_without_graph(
    tp: int, dcp_size: int, enable_expert_parallel: bool, families: list[str], tmp_path: Path
) -> None:
    for family in families:
        save_tiny(family, tmp_path / family, **(LARGE4_SHARING if family == "mistral_large4_text" else {}))
    layout = {"decode_context_parallel_size": dcp_size, "cp_kv_cache_interleave_size": 2, "block_size": 8}
    dcp = DCPConfig(tensor_parallel_size=tp, context_workspace_tokens=512, **layout)
    directories = [tmp_path / family for family in families]
    for results in run_ranks(tp, serve_all, directories, dcp, enable_expert_parallel, timeout=300):
        for family, (eager, *others) in zip(families, results, strict=True):
            check_alike(eager, others, family)


def serve_in_chunks(directories: list[Path], dcp: DCPConfig) -> list[Any]:
    """Serve models of linear attention whose long pieces take the operator of chunks, here its reference."""
    linear_spec.takes_chunks = lambda device, dtype: True
    long_pieces.LONG_PIECE, long_pieces.TOKENS_PER_PIECE = 5, 16
    return serve_all(directories, dcp, False)


def test_long_pieces_inside_graphs(tmp_path: Path) -> None:
    families = ["kimi_linear", "glm5_next_text"]
    for family in families:
        save_tiny(family, tmp_path / family)
    directories = [tmp_path / family for family in families]
    (results,) = run_ranks(1, serve_in_chunks, directories, DCPConfig(block_size=8), timeout=300)
    for eager, *others in results:
        check_alike(eager, others)


@pytest.mark.parametrize("tp", [1, 2])
def test_padding_changes_nothing(tp: int, tmp_path: Path) -> None:
    """Over caches full of NaN: a whole model, and stacks of layers of other head sizes; sparse, and of 8 bits."""
    save_tiny("deepseek_v3", tmp_path)
    dcp = DCPConfig(tensor_parallel_size=tp, decode_context_parallel_size=tp, block_size=4)
    assert run_ranks(tp, check_stacks, tmp_path, dcp) == [(len(BATCHES),) * 5] * tp


def check_stacks(directory: Path, dcp: DCPConfig) -> tuple[int, ...]:
    return (
        check_model(directory, dcp, False, "cpu"),
        check_stack(dcp, 2, 6, "cpu"),
        check_stack(dcp, 1, 2, "cpu", topk=24),
        check_stack(replace(dcp, kv_cache_dtype="fp8", decode_query_dtype="fp8"), 1, 2, "cpu"),
        check_stack(replace(dcp, kv_cache_dtype="fp8_ds_mla"), 1, 2, "cpu", topk=24),
    )


def test_the_watch_sees_what_waits() -> None:
    with NoHostSync(), pytest.raises(AssertionError, match=r"aten\.nonzero\.default waits for the GPU"):
        torch.ones(2).nonzero()
    with NoHostSync(), pytest.raises(AssertionError, match="by a mask waits"):
        torch.ones(2)[torch.tensor([True, False])]
