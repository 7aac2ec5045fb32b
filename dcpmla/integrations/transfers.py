"""A rank's end of transfers with other jobs, made at start (`new_staging`, `link_engine`)."""

import json
from base64 import b64decode, b64encode
from hashlib import sha256
from uuid import uuid4

import psutil
import torch
from torch import Tensor

from dcpmla.cache.plan import CachePlan
from dcpmla.config import DCPConfig
from dcpmla.integrations.open_model import ModelFiles
from dcpmla.integrations.sharded_model import ShardedModel
from dcpmla.integrations.weights_digest import norms_digest
from dcpmla.job.bootstrap import agree
from dcpmla.parallel.collectives import broadcast_value, gather_values
from dcpmla.runtime.engine import Engine
from dcpmla.transfer.incoming import Incoming
from dcpmla.transfer.layout import describe
from dcpmla.transfer.outgoing import Outgoing
from dcpmla.transfer.parts import RowMover
from dcpmla.transfer.staging import NUM_SLOTS, allocate_staging, slot_size
from dcpmla.transfer.transport import Peer, rank_name

ROLES = ("both", "prefill", "decode")
# GB/s: NVLink of an H100 or H200 each way, an adapter of 400 Gbit/s, a host's memory.
_NVLINK, _NETWORK, _MEMORY = 450.0, 50.0, 10.0
# Entries of a config that say nothing about the rows of a cache.
_IRRELEVANT = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")


def check_role(role: str, dcp: DCPConfig) -> None:
    """Raise ValueError if a server of a role cannot exchange blocks with others."""
    if role != "both" and dcp.calculate_kv_scales:
        raise ValueError(
            f"role (--role) is {role}, whose blocks another server shares, but calculate_kv_scales "
            "(--calculate-kv-scales) finds other scales on each server; give kv_cache_scale (--kv-cache-scale) instead"
        )
    if role != "both" and dcp.kv_hot_tokens is not None:
        raise ValueError(
            f"role (--role) is {role}, but kv_hot_tokens (--kv-hot-tokens) {dcp.kv_hot_tokens} keeps latents in host "
            "memory, from which servers do not exchange blocks; leave one of them out"
        )


def new_staging(device: torch.device, is_within_host: bool) -> Tensor:
    """Return this rank's staging memory [num_slots, slot_bytes] uint8, for the link to the other servers.

    It is allocated before the engine, because the cache takes all remaining device memory. The first large tensor of a
    process also has an allocation of its own: CUDA IPC opens whole allocations to another process.

    Args:
        device: Device of this rank.
        is_within_host: Whether all other servers are on this host.
    """
    if device.type == "cuda":
        rate = _NVLINK if is_within_host else _NETWORK
        return allocate_staging(
            device, NUM_SLOTS, slot_size(rate, torch.cuda.get_device_properties(device).total_memory)
        )
    return allocate_staging(device, NUM_SLOTS, slot_size(_MEMORY, psutil.virtual_memory().total))


def link_engine(engine: Engine, files: ModelFiles, role: str, staging: Tensor) -> Peer:
    """Make this rank's transport, let the engine use it, and return this job as others see it. Collective over the job.

    Args:
        role: "prefill" sends blocks, "decode" receives them.
        staging: Staging memory of this rank (`new_staging`).
    Raises:
        ValueError: NIXL does not start.
    """
    from dcpmla.transfer.nixl import NixlTransport  # NIXL is an extra

    group, rank = engine.mesh.tp_group, engine.mesh.tp_rank
    name = str(broadcast_value(uuid4().hex, group, "naming the engine"))
    assert isinstance(engine.model, ShardedModel)
    layout = describe(engine.cache, engine.dcp, cache_facts(files, engine.model, engine.cache.sizes))
    with agree():
        try:
            transport = NixlTransport(rank_name(name, rank), staging)
        except OSError as error:
            raise ValueError(f"role (--role) is {role}, but blocks cannot be exchanged: {error}") from error
    mover = RowMover(engine.cache, layout)
    if role == "prefill":
        engine.link(Outgoing(transport, mover, layout, rank), None)
    else:
        engine.link(None, Incoming(transport, mover, layout, rank))
    agents = gather_values(b64encode(transport.metadata()).decode(), group, "gathering the agents of transfers")
    return Peer(name, layout, [b64decode(agent) for agent in agents])


def cache_facts(files: ModelFiles, model: ShardedModel, sizes: CachePlan) -> list[tuple[str, str]]:
    """Return what must be equal on two servers whose caches have the same rows, by the names of options."""
    dcp = model.placement.dcp
    config = {name: value for name, value in files.config.to_dict().items() if name not in _IRRELEVANT}
    return [
        (
            "the digest of the model's config (--model)",
            sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16],
        ),
        ("the digest of the norms of the model's weights (--model)", norms_digest(*model.modules())),
        ("dtype (--dtype)", str(model.dtype)),
        ("the format of kv_cache_dtype (--kv-cache-dtype)", str(sizes.dtype)),
        ("kv_cache_scale (--kv-cache-scale)", str(dcp.kv_cache_scale)),
        ("the format of index_cache_dtype (--index-cache-dtype)", str(sizes.index_dtype)),
        ("index_hadamard (--index-hadamard)", str(dcp.index_hadamard)),
        (
            "deterministic (--deterministic), with its tensor_parallel_size (-tp)",
            f"on with {dcp.tensor_parallel_size}" if dcp.deterministic else "off",
        ),
    ]
