"""Memory that a layer touches before the cache is sized."""

import dataclasses
import weakref
from typing import Any
from unittest.mock import Mock, patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dcpmla import MLAAttention, MLAConfig, Placement, init_mesh
from dcpmla.attention.backends.choice import Backend
from dcpmla.attention.mla import peak_memory
from dcpmla.comm.select import select_exchange
from dcpmla.integrations.families.table import attention_of
from tests.attention.test_layer import layout
from tests.support.models import tiny_config
from tests.support.ranks import on_ranks


class Allocations(TorchDispatchMode):
    """The peak of memory that is allocated in its context."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.storages.add(result.untyped_storage())
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self.storages))
        return result


def touched(layer: MLAAttention, num_tokens: int) -> int:
    """Return the peak of bytes, without the exchange's."""
    with Allocations() as allocations:
        layer.touch_peak_memory(num_tokens)
    return allocations.peak


@on_ranks(2)
def test_the_peak_of_memory() -> None:
    dcp, mesh = layout(2, 2), init_mesh(2, 2)
    exchange = Mock(wraps=select_exchange(dcp, mesh.dcp_group, "cpu").exchange)
    config, num_keys = attention_of(tiny_config("deepseek_v3")).config, dcp.context_workspace_tokens

    def new_layer(config: MLAConfig, **formats: str) -> MLAAttention:
        placement = Placement(dataclasses.replace(dcp, **formats), mesh, exchange, torch.float32, "cpu")
        return MLAAttention(config, placement)

    # A key and a value of each of 12 heads, 8 + 8 and 4 wide; what the backend joins of keys, 16 wide.
    of_heads = num_keys * 12 * (8 + 4 + 16) * 4
    exchange.reserve_context.side_effect = lambda *_: None
    assert touched(new_layer(config), 1) == of_heads
    exchange.reserve_context.assert_called_once_with(num_keys, 24, torch.float32, torch.device("cpu"))
    assert touched(new_layer(config, kv_cache_dtype="fp8"), 1) == of_heads + num_keys * 24 * 4  # dequantized latents
    exchange.reserve_context.assert_called_with(num_keys, 24, torch.float8_e4m3fn, torch.device("cpu"))
    # Of each token's absorbed rows, of both ranks' heads, 24 columns of queries and 16 of outputs, each twice.
    assert touched(new_layer(config), 100) == 100 * 24 * 2 * (24 + 16) * 4
    assert touched(new_layer(config), 10**6) == peak_memory.PART_ROWS * 2 * (24 + 16) * 4
    with patch.object(peak_memory, "select_backend", return_value=Backend("one", Mock(), Mock())):
        assert touched(new_layer(config), 1) == num_keys * 12 * (8 + 4) * 4
    sparse = new_layer(attention_of(tiny_config("deepseek_v32")).config)
    few, many = (sparse.indexer.selector.workspace_bytes(num_tokens, 4) for num_tokens in (1, 1001))
    assert many - few == 2 * 1000 * 32 * 16 * 4  # queries of 32 heads, 16 wide, before and after what finishes them
    assert touched(sparse, 1001) == many
    nothing_else = patch.object(peak_memory, "PART_ROWS", 0)
    with nothing_else, patch.object(sparse.indexer.selector, "workspace_bytes", return_value=0):
        assert touched(sparse, 800) == of_heads + 800 * num_keys // 8  # a bit for each pair: a mask
