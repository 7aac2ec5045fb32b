"""Attention kernels of others (peers) that `bench decode` and `bench sparse` compare with ours, in one interface.

They come from a directory with a `peers.py` that has `load_flashmla`, `FlashMLADense`, `FlashMLADenseFP8`,
`FlashMLASparseFP8`, `load_fa3` and `FA3MLA` (thin callers of the published kernels); FlashInfer is imported. A kernel
is made for one case: it plans then, outside the timed region.
"""

import importlib
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from benchmarks.peers import import_file
from dcpmla.bench.decode_inputs import LATENT_DIM, ROPE_DIM, SCALE, DecodeInputs
from dcpmla.bench.peers import Kernel, MakeKernel
from dcpmla.cache.shared_format import PAGE_ROWS, SCALE_BYTES, data_bytes

_FLASHINFER_WORKSPACE_BYTES = 128 << 20  # FlashInfer's recommendation
_SPARSE_TILE = 64  # FlashMLA takes whole tiles of so many indices
_SPARSE_HEADS = (64, 128)
_SHARED_ROW = data_bytes(LATENT_DIM) + SCALE_BYTES


class FlashMLA:
    """DeepSeek's dense decode: [batch, query_len, H, 512] and lse [batch, H, query_len], +inf for a query that sees
    no token.

    With e4m3 queries it is vLLM's kernel of that interface, which multiplies in e4m3.
    """

    def __init__(self, peers: ModuleType, inputs: DecodeInputs) -> None:
        if inputs.block_size != 64:
            raise ValueError(f"takes blocks of 64 tokens, not of {inputs.block_size}")
        self.inputs = inputs
        self.decode = peers.FlashMLADense() if inputs.q_scale is None else peers.FlashMLADenseFP8()
        self.scales = () if inputs.q_scale is None else (inputs.q_scale, inputs.caches.kv_scale)

    def launch(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, (q, kv_cache, block_table) = self.inputs, self.inputs.at(index)
        q = q.unflatten(0, (inputs.case.batch, inputs.case.query_len))
        is_causal = inputs.case.query_len > 1
        lens = inputs.context_lens
        return self.decode(q, kv_cache.unsqueeze(2), block_table, lens, SCALE, is_causal, *self.scales)

    def result(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return out.flatten(0, 1), lse.masked_fill(lse == math.inf, -math.inf).transpose(1, 2).flatten(0, 1)


class FlashMLASparse(FlashMLA):
    """DeepSeek's decode over selected tokens of an fp8_ds_mla cache, of latents or of shared keys, in the layout of the
    dense one.

    Over whole caches it is given all tokens that a query sees; over `inputs.selected_blocks` the slots in the block
    tables.
    """

    def __init__(self, peers: ModuleType, inputs: DecodeInputs) -> None:
        if inputs.case.heads not in _SPARSE_HEADS:
            raise ValueError(f"takes 64 or 128 heads, not {inputs.case.heads}")
        self.inputs, self.decode = inputs, peers.FlashMLASparseFP8()
        self.indices = [self._indices(table) for table in inputs.caches.block_tables]

    def _indices(self, table: Tensor) -> Tensor:
        """Return the slots [batch, query_len, n] int32 that queries attend to, -1 past the last."""
        lens = self.inputs.seq_lens.view(self.inputs.case.batch, -1, 1)
        num_indices = -(-int(lens.max()) // _SPARSE_TILE) * _SPARSE_TILE
        position, block_size = torch.arange(num_indices, device=table.device), self.inputs.block_size
        block = (position // block_size).clamp(max=table.shape[-1] - 1)
        slots = (table[:, block] * block_size + position % block_size)[:, None]
        return torch.where(position < lens, slots, -1).to(torch.int32)

    def launch(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, (q, kv_cache, _) = self.inputs, self.inputs.at(index)
        q = q.unflatten(0, (inputs.case.batch, inputs.case.query_len))
        blocks = kv_cache if inputs.selected_blocks is None else inputs.selected_blocks
        if q.shape[-1] == LATENT_DIM:  # pages of shared keys, given without their padding
            blocks = blocks.flatten(1)[:, : PAGE_ROWS * _SHARED_ROW].unflatten(1, (PAGE_ROWS, _SHARED_ROW))
        return self.decode(q, blocks.unsqueeze(2), self.indices[index % len(self.indices)], SCALE)


class FlashAttention3:
    """FlashAttention-3 with the latent part as q_v: [T, H, 512] and lse [H, T]."""

    def __init__(self, peers: ModuleType, inputs: DecodeInputs) -> None:
        if inputs.block_size % 16 or inputs.dtype != torch.bfloat16:
            raise ValueError(f"takes bfloat16 and blocks of 16 n tokens, not {inputs.dtype} and {inputs.block_size}")
        self.inputs, self.decode = inputs, peers.FA3MLA()

    def launch(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, (q, kv_cache, block_table) = self.inputs, self.inputs.at(index)
        lens = inputs.context_lens, inputs.query_start_loc, inputs.case.query_len, inputs.case.context
        return self.decode(q, kv_cache, block_table, *lens, SCALE)

    def result(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return out, lse.transpose(0, 1)


class FlashInfer:
    """FlashInfer's MLA over FlashAttention-3: [T, H, 512] and lse [T, H].

    A plan holds a block table, so each set has its own.
    """

    def __init__(self, mla: ModuleType, inputs: DecodeInputs) -> None:
        case, tables = inputs.case, inputs.caches.block_tables
        workspace = torch.empty(_FLASHINFER_WORKSPACE_BYTES, device=tables.device, dtype=torch.uint8)
        block_starts = torch.arange(case.batch + 1, device=tables.device, dtype=torch.int32) * tables.shape[-1]
        self.inputs, self.plans = inputs, [mla.BatchMLAPagedAttentionWrapper(workspace, backend="fa3") for _ in tables]
        is_causal, dtypes = case.query_len > 1, (inputs.dtype, inputs.dtype)
        sizes = case.heads, LATENT_DIM, ROPE_DIM, inputs.block_size
        for plan, table in zip(self.plans, tables, strict=True):
            lens = inputs.query_start_loc, block_starts, table.flatten(), inputs.context_lens
            plan.plan(*lens, *sizes, is_causal, SCALE, *dtypes)

    def launch(self, index: int) -> tuple[Tensor, Tensor]:
        q, kv_cache, _ = self.inputs.at(index)
        parts = (part for rows in (q, kv_cache) for part in rows.split([LATENT_DIM, ROPE_DIM], -1))
        return self.plans[index % len(self.plans)].run(*parts, return_lse=True, return_lse_base_on_e=True)

    def result(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return out, lse


def _load_from_peers(make: Callable[[ModuleType, DecodeInputs], Kernel], load: str, directory: Path) -> MakeKernel:
    """Return the maker of a kernel whose library is loaded by the function of peers.py with the name `load`."""
    peers = import_file(directory / "peers.py")
    getattr(peers, load)()
    return partial(make, peers)


def _load_flashinfer(_: Path) -> MakeKernel:
    return partial(FlashInfer, importlib.import_module("flashinfer.mla"))


_MAKERS = {
    "flashmla": partial(_load_from_peers, FlashMLA, "load_flashmla"),
    "fa3": partial(_load_from_peers, FlashAttention3, "load_fa3"),
    "flashinfer": _load_flashinfer,
    "flashmla-fp8": partial(_load_from_peers, FlashMLA, "load_flashmla"),
    "flashmla-sparse": partial(_load_from_peers, FlashMLASparse, "load_flashmla"),
}


def load_kernel(name: str, directory: Path) -> MakeKernel:
    """Return the maker of a kernel of `dcpmla.bench.peers.PEERS`.

    Args:
        directory: Folder with peers.py.
    """
    return _MAKERS[name](directory)
