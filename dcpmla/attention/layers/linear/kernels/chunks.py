"""Long pieces of prompts through flash-linear-attention's kernels, between kernels that read and write states."""

import os
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dcpmla.attention.layers.linear.calls import DeltaCall, DeltaPieces
from dcpmla.attention.layers.linear.kernels.read import read_memory, read_tokens
from dcpmla.attention.layers.linear.kernels.write import write_outputs, write_state
from dcpmla.attention.step.long_pieces import CHUNK

# Launch options of the library's kernels, in its own format, as it chose them for 32 heads of 128 on an H200.
_CONFIGS = Path(__file__).parent.parent / "configs"


def attend_in_chunks(call: DeltaCall, pieces: DeltaPieces) -> None:
    """Launch the kernels of `dcpmla.attention.layers.linear.delta.attend_in_chunks`."""
    out, tokens, weights, state, eps, decay_floor = call
    q, k, v, decay, beta = read_tokens(tokens, weights.conv, state.recent, pieces)
    # The public `chunk_kda` would lay out the chunks again in each layer.
    attended, memory_after, *_ = _library()(
        q=q,
        k=k,
        v=v,
        g=decay,
        beta=beta,
        scale=q.shape[-1] ** -0.5,
        initial_state=read_memory(state.memory, pieces),
        output_final_state=True,
        cu_seqlens=pieces.start_loc,
        chunk_indices=pieces.chunks,
        chunk_offsets=pieces.chunk_starts,
        chunk_size=CHUNK,
        safe_gate=decay_floor is not None,
        lower_bound=decay_floor,
        use_gate_in_kernel=True,
        A_log=weights.log_rate,
        dt_bias=weights.decay_bias,
        use_graph=True,
    )
    write_state(state, memory_after, tokens.qkv, pieces)
    write_outputs(out, attended, tokens.gate, weights.norm, pieces, eps)


@cache
def _library() -> Any:
    """Return the library's forward pass.

    On Hopper GPUs it takes our options, unless the user has set variables of the library for others: to choose options
    itself takes it more than a minute.
    """
    is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    if is_hopper and not {"FLA_CACHE_MODE", "FLA_CONFIG_DIR"} & os.environ.keys():
        os.environ.update(FLA_CACHE_MODE="full", FLA_CONFIG_DIR=str(_CONFIGS))
    from fla.ops.kda.chunk_fwd import chunk_kda_fwd

    return chunk_kda_fwd
