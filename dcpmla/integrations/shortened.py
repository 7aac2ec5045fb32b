"""A model with only one layer of each sort (`shortened`)."""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from dcpmla.integrations.sharded_model import ShardedModel


@contextmanager
def shortened(model: ShardedModel) -> Iterator[None]:
    """Leave out layers that launch the same kernels as others: the first stays, and one of each sort of the others."""
    decoder: Any = model.hidden_states
    blocks, tap = decoder.blocks, getattr(decoder, "tap", None)
    sorts = {_sort(model, block): block for block in reversed(blocks[1:])}
    kept = {id(block) for block in (blocks[0], *sorts.values())}
    decoder.blocks = nn.ModuleList(block for block in blocks if id(block) in kept)
    if tap is not None:  # A module that drafts takes as many hidden states as before.
        decoder.tap = tap._replace(layers=tuple(min(number, len(kept)) for number in tap.layers))
    try:
        yield
    finally:
        decoder.blocks = blocks
        if tap is not None:
            decoder.tap = tap


def _sort(model: ShardedModel, block: Any) -> Hashable:
    """Return what the kernels of a block depend on: its attention, its modules, the sizes of its weights."""
    weights = (*block.named_parameters(), *block.named_buffers())
    return (
        model.attention.layers[block.layer],
        getattr(block, "quantizes_output", False),
        *((name, type(module)) for name, module in block.named_modules()),
        *((name, weight.shape, weight.dtype) for name, weight in weights),
    )
