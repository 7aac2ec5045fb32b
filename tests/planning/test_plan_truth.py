"""Bytes of weights as planned, against those that ranks hold."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dcpmla.comm.select import select_exchange
from dcpmla.config import DCPConfig
from dcpmla.integrations.sharded_model import ShardedModel
from dcpmla.integrations.transformers import load_config, load_model
from dcpmla.parallel.mesh import init_mesh
from dcpmla.planning.weights import read_model
from tests.support.models import MLA_FAMILIES, save_tiny
from tests.support.quantized_models import save_wide, write_quantized
from tests.support.ranks import run_ranks


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Return a module's own weights: parameters, buffers that are saved, tensors in other attributes (experts)."""
    passing = module._non_persistent_buffers_set
    saved = [tensor for name, tensor in module._buffers.items() if name not in passing]
    others = [value for name, value in vars(module).items() if not name.startswith("_")]
    return [leaf for leaf in tree_leaves([*module._parameters.values(), saved, others]) if isinstance(leaf, Tensor)]


def held_bytes(model: ShardedModel) -> int:
    roots = [root for root in vars(model).values() if isinstance(root, nn.Module)]
    tensors = {id(tensor): tensor for root in roots for module in root.modules() for tensor in tensors_of(module)}
    return sum(tensor.nbytes for tensor in tensors.values())


def load_and_weigh(directories: list[Path], tp_size: int) -> list[tuple[int, int]]:
    """On one rank: bytes held of each model, with experts cut and with experts spread."""
    dcp, mesh, cpu = DCPConfig(tensor_parallel_size=tp_size), init_mesh(tp_size, 1), torch.device("cpu")
    exchange, found = select_exchange(dcp, mesh.dcp_group, cpu), []
    for directory in directories:
        config = load_config(directory)
        cut, spread = (
            held_bytes(load_model(directory, config, dcp, mesh, exchange, None, cpu, is_spread))
            for is_spread in (False, True)
        )
        found.append((cut, spread))
    return found


def check(directories: list[Path], tp_size: int) -> None:
    ranks = run_ranks(tp_size, load_and_weigh, directories, tp_size)
    for directory, *held in zip(directories, *ranks, strict=True):
        model = read_model(load_config(directory))
        planned = tuple(model.weight_bytes(tp_size, is_spread)["total"] for is_spread in (False, True))
        assert (directory.name, max(held)) == (directory.name, planned)


def test_every_family(tmp_path: Path) -> None:
    directories = [tmp_path / family for family in (*MLA_FAMILIES, "deepseek_v4")]
    for directory in directories:
        save_tiny(directory.name, directory)
    check(directories, 2)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_quantized_models(tp_size: int, tmp_path: Path) -> None:
    """Two ranks cut between blocks; four cut through those of experts and of queries, and hold these dequantized."""
    schemes = [("deepseek_v32", "block"), ("longcat_flash", "tensor"), ("deepseek_v3", "compressed_channel")]
    directories = []
    for family, scheme in [*schemes, *([("deepseek_v4", "published")] if tp_size < 4 else [])]:
        save_wide(family, tmp_path / "wide" / family)
        directories.append(tmp_path / f"{family}_{scheme}")
        write_quantized(tmp_path / "wide" / family, directories[-1], scheme)
    check(directories, tp_size)
