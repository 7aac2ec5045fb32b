"""The decode kernels that `bench decode` compares, behind one interface: ours, and those of others (peers).

Peers come from a directory with a `peers.py` that has `load_flashmla`, `FlashMLADense`, `FlashMLADenseFP8`,
`FlashMLASparseFP8`, `load_fa3` and `FA3MLA` (thin callers of the published kernels); FlashInfer is imported. A kernel
is made for one
case: what it plans, it plans then, outside the timed region.
"""

import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from dcpmla.attention import decode  # noqa: F401  (registers the custom op)
from dcpmla.attention.backends import DECODE_BACKENDS, select_backend
from dcpmla.attention.calls import DecodeCall
from dcpmla.bench.decode_inputs import LATENT_DIM, ROPE_DIM, SCALE, DecodeCase, DecodeInputs

_FLASHINFER_WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends
_SPARSE_TILE = 64  # of which FlashMLA wants whole ones


class Kernel(Protocol):
    """A kernel made for a case. Its constructor raises ValueError for a case that it does not take."""

    def launch(self, index: int) -> tuple[Tensor, Tensor]:
        """The timed call, over set `index`: (out, lse) in the kernel's own layout."""

    def result(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """What `launch` gave as [T, H, 512] and [T, H] natural log, (0, -inf) for a query that sees no token."""


MakeKernel = Callable[[DecodeInputs], Kernel]


class Ours:
    """`dcpmla.mla_decode`, on the backend that it selects or on a given one."""

    def __init__(self, inputs: DecodeInputs, backend: str = "auto") -> None:
        self.inputs, self.backend = inputs, backend
        select_backend(DECODE_BACKENDS, self.call(0))

    def call(self, index: int) -> DecodeCall:
        """Return the call over set `index`."""
        inputs, (q, kv_cache, block_table) = self.inputs, self.inputs.at(index)
        sizes = inputs.seq_lens, SCALE, LATENT_DIM, None, inputs.case.query_len, inputs.workspace
        scales = inputs.caches.kv_scale, inputs.q_scale, inputs.dtype
        return DecodeCall.check(q, kv_cache, block_table, *sizes, *scales, self.backend)

    def launch(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.ops.dcpmla.mla_decode(*self.call(index).flat())

    def result(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return out, lse


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
        out, lse = self.decode(
            q, kv_cache.unsqueeze(2), block_table, inputs.context_lens, SCALE, is_causal, *self.scales
        )
        return out, lse

    def result(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return out.flatten(0, 1), lse.masked_fill(lse == math.inf, -math.inf).transpose(1, 2).flatten(0, 1)


class FlashMLASparse(FlashMLA):
    """DeepSeek's decode over chosen tokens of an fp8_ds_mla cache, here all that a query sees; in the layout of the
    dense one.
    """

    def __init__(self, peers: ModuleType, inputs: DecodeInputs) -> None:
        case, block_size = inputs.case, inputs.block_size
        if case.num_heads not in (64, 128):
            raise ValueError(f"takes 64 or 128 heads, not {case.num_heads}")
        self.inputs, self.decode = inputs, peers.FlashMLASparseFP8()
        num_indices = -(-case.context // _SPARSE_TILE) * _SPARSE_TILE
        position = torch.arange(num_indices, device=inputs.seq_lens.device)
        block = (position // block_size).clamp(max=inputs.caches.block_tables.shape[-1] - 1)
        is_seen = position < inputs.seq_lens.view(case.batch, case.query_len, 1)
        self.indices = [
            torch.where(is_seen, (table[:, block] * block_size + position % block_size)[:, None], -1).to(torch.int32)
            for table in inputs.caches.block_tables
        ]

    def launch(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, (q, kv_cache, _) = self.inputs, self.inputs.at(index)
        q = q.unflatten(0, (inputs.case.batch, inputs.case.query_len))
        out, lse = self.decode(q, kv_cache.unsqueeze(2), self.indices[index % len(self.indices)], SCALE)
        return out, lse


class FlashAttention3:
    """FlashAttention-3 with the latent part as q_v: [T, H, 512] and lse [H, T]."""

    def __init__(self, peers: ModuleType, inputs: DecodeInputs) -> None:
        if inputs.block_size % 16 or inputs.dtype != torch.bfloat16:
            raise ValueError(f"takes bfloat16 and blocks of 16 n tokens, not {inputs.dtype} and {inputs.block_size}")
        self.inputs, self.decode = inputs, peers.FA3MLA()

    def launch(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, (q, kv_cache, block_table) = self.inputs, self.inputs.at(index)
        case = inputs.case
        return self.decode(
            q, kv_cache, block_table, inputs.context_lens, inputs.query_start_loc, case.query_len, case.context, SCALE
        )

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
        for plan, table in zip(self.plans, tables, strict=True):
            plan.plan(
                inputs.query_start_loc,
                block_starts,
                table.flatten(),
                inputs.context_lens,
                case.num_heads,
                LATENT_DIM,
                ROPE_DIM,
                inputs.block_size,
                case.query_len > 1,  # causal
                SCALE,
                inputs.dtype,
                inputs.dtype,
            )

    def launch(self, index: int) -> tuple[Tensor, Tensor]:
        q, kv_cache, _ = self.inputs.at(index)
        parts = (part for rows in (q, kv_cache) for part in rows.split([LATENT_DIM, ROPE_DIM], -1))
        return self.plans[index % len(self.plans)].run(*parts, return_lse=True, return_lse_base_on_e=True)

    def result(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return out, lse


def _load_from_peers(make: Callable[[ModuleType, DecodeInputs], Kernel], load: str, directory: Path) -> MakeKernel:
    """`load` names the function of peers.py that loads the kernel's library."""
    peers = import_file(directory / "peers.py")
    getattr(peers, load)()
    return partial(make, peers)


def _load_flashinfer(_: Path) -> MakeKernel:
    return partial(FlashInfer, importlib.import_module("flashinfer.mla"))


@dataclass(frozen=True)
class Peer:
    """How a peer is loaded, and what it reads."""

    load: Callable[[Path], MakeKernel]
    kv_cache_dtype: str = "bf16"
    decode_query_dtype: str = "auto"

    def reads(self, case: DecodeCase) -> bool:
        return (self.kv_cache_dtype, self.decode_query_dtype) == (case.kv_cache_dtype, case.decode_query_dtype)


OURS = {"dcpmla": "auto", **{f"dcpmla-{backend.name}": backend.name for backend in DECODE_BACKENDS}}
PEERS = {
    "flashmla": Peer(partial(_load_from_peers, FlashMLA, "load_flashmla")),
    "fa3": Peer(partial(_load_from_peers, FlashAttention3, "load_fa3")),
    "flashinfer": Peer(_load_flashinfer),
    "flashmla-fp8": Peer(partial(_load_from_peers, FlashMLA, "load_flashmla"), "fp8", "fp8"),
    "flashmla-sparse": Peer(partial(_load_from_peers, FlashMLASparse, "load_flashmla"), "fp8_ds_mla"),
}


def load_kernel(name: str, peers: Path | None) -> MakeKernel:
    """The kernel of a name in OURS or PEERS; a peer's libraries are loaded, and whatever goes wrong with that is
    raised.

    Args:
        peers: directory with peers.py; asked for by PEERS.
    """
    if name in OURS:
        return partial(Ours, backend=OURS[name])
    assert peers is not None
    return PEERS[name].load(peers)


def import_file(path: Path) -> Any:
    """The module in a file; it may lie anywhere, so it is not looked for on sys.path."""
    spec = importlib.util.spec_from_file_location(f"dcpmla_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
