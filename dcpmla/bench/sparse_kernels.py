"""The peer of attention in `bench sparse`: FlashMLA's sparse decode over fp8_ds_mla."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

from torch import Tensor
from torch.nn import functional as F

from dcpmla.bench.decode_inputs import SCALE
from dcpmla.bench.decode_kernels import FlashMLA, Kernel, import_file
from dcpmla.bench.sparse_inputs import AttentionInputs

_TILE = 64  # indices that it takes at a time
MakePeer = Callable[[AttentionInputs], Kernel | None]


class FlashMLASelected(FlashMLA):
    """Over the slots of this rank side by side, as ours has them: as many for each request as the most have, -1 behind
    a request's last.
    """

    def __init__(self, peers: ModuleType, inputs: AttentionInputs) -> None:
        slots = inputs.caches.block_tables
        width = -(-int(inputs.seq_lens.max()) // _TILE) * _TILE
        self.inputs, self.blocks, self.decode = inputs, inputs.blocks.unsqueeze(2), peers.FlashMLASparseFP8()
        self.indices = F.pad(slots, (0, width - slots.shape[-1]), value=-1).unsqueeze(2).contiguous()

    def launch(self, index: int) -> tuple[Tensor, Tensor]:
        q, _, _ = self.inputs.at(index)
        out, lse = self.decode(q.unsqueeze(1), self.blocks, self.indices[index % len(self.indices)], SCALE)
        return out, lse


def load_flashmla(directory: Path) -> MakePeer:
    """FlashMLA from a directory with `peers.py`, None for a case that it does not take.

    Whatever goes wrong with its library is raised.
    """
    peers = import_file(directory / "peers.py")
    peers.load_flashmla()
    return partial(_flashmla, peers)


def _flashmla(peers: ModuleType, inputs: AttentionInputs) -> FlashMLASelected | None:
    case = inputs.case
    return (
        FlashMLASelected(peers, inputs) if case.kv_cache_dtype == "fp8_ds_mla" and case.num_heads in (64, 128) else None
    )
