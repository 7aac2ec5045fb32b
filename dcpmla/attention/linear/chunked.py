"""Kimi Delta Attention over long pieces of prompts, chunk by chunk, with flash-linear-attention's kernels.

The package `fla-core` is optional: without it such pieces go through the recurrence, token after token.
"""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F

from dcpmla.attention.linear.calls import DeltaState, DeltaTokens, DeltaWeights
from dcpmla.attention.linear.step import DeltaPieces

# Bytes for each element of the output: the convolved rows, their decays, chunks' products and states, gates in float32.
# The number is summed from shapes, not measured.
BYTES_PER_ELEMENT = 40


def takes_chunks(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether long pieces attend in chunks: on a GPU, in 16 bits, if flash-linear-attention is installed."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and has_library()


@cache
def has_library() -> bool:
    """Return whether flash-linear-attention is installed."""
    return find_spec("fla") is not None


def claim_chunks(out: Tensor) -> None:
    """Allocate and free the memory of `attend_in_chunks` for an output [T, h D], for memory profiling."""
    out.new_empty(out.numel() * BYTES_PER_ELEMENT, dtype=torch.uint8)


def attend_in_chunks(
    out: Tensor,
    tokens: DeltaTokens,
    weights: DeltaWeights,
    state: DeltaState,
    pieces: DeltaPieces,
    eps: float,
    decay_floor: float | None,
) -> None:
    """Attend with the tokens of long pieces alone, as `delta_attention` does.

    Args:
        out: Output [T, h D] of the pieces' tokens.
        tokens: Projections of the pieces' tokens.
        pieces: Rows and states of the pieces.
        eps: Epsilon of the output's norm.
        decay_floor: Lower bound of the decay's logarithm, or None.
    """
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.ops.kda import chunk_kda

    num_heads = len(weights.log_rate)
    recent, memory = state.recent.flatten(0, 1), state.memory.flatten(0, 1)
    lens: dict[str, Tensor] = {"cu_seqlens": pieces.start_loc, "cu_seqlens_cpu": pieces.host_start_loc}
    before = torch.where(pieces.has_before[..., None], recent[pieces.before], 0).transpose(1, 2).contiguous()
    qkv, _ = causal_conv1d(tokens.qkv[None], weights.conv, initial_state=before, activation="silu", **lens)
    recent.index_copy_(0, pieces.kept_slots, tokens.qkv.index_select(0, pieces.kept_rows))
    q, k, v = qkv.unflatten(-1, (3, num_heads, -1)).unbind(2)
    memory_before = torch.where(pieces.has_memory[:, None, None, None], memory[pieces.memory_before], 0)
    attended, memory_after = chunk_kda(
        q,
        k,
        v,
        tokens.decay.unflatten(-1, (num_heads, -1))[None],
        tokens.beta[None],
        initial_state=memory_before,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=decay_floor is not None,
        lower_bound=decay_floor,
        A_log=weights.log_rate,
        dt_bias=weights.decay_bias,
        **lens,
    )
    memory.index_copy_(0, pieces.memory_after, memory_after)
    gate = tokens.gate.float().unflatten(-1, (num_heads, -1)).sigmoid()
    normed = F.rms_norm(attended[0].float(), attended.shape[-1:], weights.norm.float(), eps)
    out.copy_((normed * gate).flatten(1))
