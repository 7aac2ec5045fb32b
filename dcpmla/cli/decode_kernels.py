"""The decode kernels that `bench decode` compares, behind one interface: ours, and those of others (peers).

Peers come from a directory with a `peers.py` that has `load_flashmla`, `FlashMLADense`, `load_fa3` and `FA3MLA` (thin callers of the
published kernels); FlashInfer is imported. A kernel is made for one case: what it plans, it plans then, outside the timed region.
"""

import importlib
import importlib.util
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from dcpmla.attention.backends import DECODE_BACKENDS, DecodeBackend
from dcpmla.attention.decode import mla_decode
from dcpmla.cli.decode_inputs import LATENT_DIM, ROPE_DIM, SCALE, DecodeInputs

_FLASHINFER_WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends


class Kernel(Protocol):
    """A kernel made for a case. Its constructor raises ValueError for a case that it does not take."""

    def launch(self, index: int) -> tuple[Tensor, Tensor]:
        """The timed call, over set `index`: (out, lse) in the kernel's own layout."""

    def result(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """What `launch` gave as [T, H, 512] and [T, H] natural log, (0, -inf) for a query that sees no token."""


MakeKernel = Callable[[DecodeInputs], Kernel]


class Ours:
    """`dcpmla.mla_decode`, with the backend that it selects or with a given one."""

    def __init__(self, inputs: DecodeInputs, backend: DecodeBackend | None = None) -> None:
        q, kv_cache, _ = inputs.at(0)
        if backend is not None and not backend.takes(q, kv_cache, LATENT_DIM):
            raise ValueError(f"does not take {q.dtype} on {q.device.type}")
        self.decode: Callable[..., tuple[Tensor, Tensor]] = mla_decode if backend is None else backend.load()
        self.inputs = inputs

    def launch(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, (q, kv_cache, block_table) = self.inputs, self.inputs.at(index)
        return self.decode(
            q,
            kv_cache,
            block_table,
            inputs.seq_lens,
            SCALE,
            LATENT_DIM,
            query_start_loc=None,
            max_query_len=inputs.case.query_len,
            workspace=inputs.workspace,
            kv_scale=None,
            q_scale=None,
            dtype=q.dtype,
        )

    def result(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return out, lse


class FlashMLA:
    """DeepSeek's dense decode: [batch, query_len, H, 512] and lse [batch, H, query_len], +inf for a query that sees no token."""

    def __init__(self, peers: ModuleType, inputs: DecodeInputs) -> None:
        if inputs.block_size != 64:
            raise ValueError(f"takes blocks of 64 tokens, not of {inputs.block_size}")
        self.inputs, self.decode = inputs, peers.FlashMLADense()

    def launch(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, (q, kv_cache, block_table) = self.inputs, self.inputs.at(index)
        q = q.unflatten(0, (inputs.case.batch, inputs.case.query_len))
        return self.decode(q, kv_cache.unsqueeze(2), block_table, inputs.context_lens, SCALE, causal=inputs.case.query_len > 1)

    def result(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return out.flatten(0, 1), lse.masked_fill(lse == math.inf, -math.inf).transpose(1, 2).flatten(0, 1)


class FlashAttention3:
    """FlashAttention-3 with the latent part as q_v: [T, H, 512] and lse [H, T]."""

    def __init__(self, peers: ModuleType, inputs: DecodeInputs) -> None:
        if inputs.block_size % 16 or inputs.dtype != torch.bfloat16:
            raise ValueError(f"takes bfloat16 and blocks of 16 n tokens, not {inputs.dtype} and {inputs.block_size}")
        self.inputs, self.decode = inputs, peers.FA3MLA()

    def launch(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, (q, kv_cache, block_table) = self.inputs, self.inputs.at(index)
        case = inputs.case
        return self.decode(q, kv_cache, block_table, inputs.context_lens, inputs.query_start_loc, case.query_len, case.context, SCALE)

    def result(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return out, lse.transpose(0, 1)


class FlashInfer:
    """FlashInfer's MLA over FlashAttention-3: [T, H, 512] and lse [T, H]. A plan holds a block table, so each set has its own."""

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


def _load_flashmla(directory: Path) -> MakeKernel:
    peers = import_file(directory / "peers.py")
    peers.load_flashmla()
    return partial(FlashMLA, peers)


def _load_fa3(directory: Path) -> MakeKernel:
    peers = import_file(directory / "peers.py")
    peers.load_fa3()
    return partial(FlashAttention3, peers)


def _load_flashinfer(_: Path) -> MakeKernel:
    return partial(FlashInfer, importlib.import_module("flashinfer.mla"))


OURS = {"dcpmla": None, **{f"dcpmla-{backend.name}": backend for backend in DECODE_BACKENDS}}
PEERS: dict[str, Callable[[Path], MakeKernel]] = {"flashmla": _load_flashmla, "fa3": _load_fa3, "flashinfer": _load_flashinfer}


def load_kernel(name: str, peers: Path | None) -> MakeKernel:
    """The kernel of a name in OURS or PEERS; a peer's libraries are loaded, and whatever goes wrong with that is raised.

    Args:
        peers: directory with peers.py; asked for by PEERS.
    """
    if name in OURS:
        return partial(Ours, backend=OURS[name])
    assert peers is not None
    return PEERS[name](peers)


def import_file(path: Path) -> Any:
    """The module in a file; it may lie anywhere, so it is not looked for on sys.path."""
    spec = importlib.util.spec_from_file_location(f"dcpmla_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
