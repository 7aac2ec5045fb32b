"""Grouped products of many rows per expert on Hopper GPUs, in 16, 8 or 4 bits; `model.kernels` handles few rows.

A program computes one tile of the result after the other: 128 routes of an expert by two parts of 128 of its weight's
rows, gate and up, or adjacent ones. Producers copy rows and weights into shared memory, stages ahead of two consumers,
which multiply 64 routes each.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from dcpmla.attention.hopper.stage_ring import describe
from dcpmla.cache.formats import FP8
from dcpmla.model.glu import SWIGLU, Glu
from dcpmla.model.hopper.consumers import consume
from dcpmla.model.hopper.pipeline import COLUMNS, ROW_BYTES, Routes, new_buffers
from dcpmla.model.hopper.producers import allocate_codes, dequantize_weights, gather_rows, load_weights
from dcpmla.model.kernels.blocks import Blocks
from dcpmla.parallel.formats import FP4, GROUP, INT4, NVFP4, AnyWeight, Quantized
from dcpmla.parallel.quantized import QuantizedRows, empty_groups, fields, unpack

_GLUON = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@gluon.jit(do_not_specialize=["num_experts", "x_scales_stride_block", "out_scales_stride"])
def grouped_product_kernel(
    x_ptr,
    x_scales_ptr,
    x_scales_stride_row,
    x_scales_stride_block,
    w_desc,
    w_scales_ptr,
    w_zeros_ptr,
    experts_ptr,
    routes_ptr,
    num_blocks_ptr,
    expert_weights_ptr,
    out_ptr,
    out_scales_ptr,
    out_scales_stride,
    gate_bound,
    up_bound,
    num_experts,
    TOP_K: gl.constexpr,
    WIDTH: gl.constexpr,
    K: gl.constexpr,
    SCALE_STEPS: gl.constexpr,
    GATED: gl.constexpr,
    IS_SMOOTH: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Multiply rows of blocks of routes by their experts' weights; as many programs as run at a time.

    w_desc: Rows [E PARTS WIDTH, K]; packed codes are words, int32 [.., K / 8]. With GATED, the two parts are gate and
        up of a gated linear unit, whose result takes the route's weight and is rounded to DTYPE. One part is a plain
        product.
    w_scales_ptr: Scales: for fp8 float32 [E, PARTS, WIDTH / 128, K / 128]; for packed codes in groups
        of 32 [E, PARTS, WIDTH, K / 64], two groups' scales in one number, and in others one of SCALE_STEPS steps.
    w_zeros_ptr: Zero points of larger groups, uint8; None for 8.
    out_scales_ptr: Scales of a gated result that is quantized in groups of 128, a column after the other; or None.
    """
    is_packed: gl.constexpr = w_desc.dtype == gl.int32
    buffers = new_buffers(
        x_ptr.dtype.element_ty, out_ptr.dtype.element_ty, x_scales_ptr is not None, 2 if is_packed else 1
    )
    routes = Routes(experts_ptr, routes_ptr, gl.load(num_blocks_ptr), num_experts, TOP_K, WIDTH, K, GATED, SCALE_STEPS)
    results = (expert_weights_ptr, out_ptr, out_scales_ptr, out_scales_stride, gate_bound, up_bound, IS_SMOOTH)
    rows = (x_ptr, x_scales_ptr, x_scales_stride_row, x_scales_stride_block, buffers, routes)
    if is_packed:
        first, first_ready = allocate_codes(w_desc)
        second, second_ready = allocate_codes(w_desc)
        fence_async_shared()
        gl.warp_specialize(
            [
                (consume, (0, None, results, buffers, routes, DTYPE, True)),
                (consume, (1, None, results, buffers, routes, DTYPE, True)),
                (dequantize_weights, (0, w_desc, w_scales_ptr, w_zeros_ptr, first, first_ready, buffers, routes)),
                (dequantize_weights, (1, w_desc, w_scales_ptr, w_zeros_ptr, second, second_ready, buffers, routes)),
                (gather_rows, rows),
            ],
            [4, 4, 4, 4],
            [160, 64, 64, 32],
        )
    else:
        fence_async_shared()
        gl.warp_specialize(
            [
                (consume, (0, w_scales_ptr, results, buffers, routes, DTYPE, False)),
                (consume, (1, w_scales_ptr, results, buffers, routes, DTYPE, False)),
                (gather_rows, rows),
                (load_weights, (w_desc, buffers, routes)),
            ],
            [4, 4, 1],
            [208, 64, 32],
        )


def takes(x: Tensor, *weights: AnyWeight) -> bool:
    """Return whether the kernel multiplies rows x [T, H], before any quantization, by experts of one format, gate_up
    [E, 2 I, ..] and down [E, H, ..].
    """
    gate_up = unpack(weights[0])[0]
    if not x.is_cuda or torch.version.cuda is None or torch.cuda.get_device_capability(x.device)[0] != 9:
        return False
    is_packed = gate_up.dtype == torch.uint8  # dequantized to bfloat16
    is_known = x.dtype == torch.bfloat16 if is_packed else x.dtype in _GLUON and gate_up.dtype in (x.dtype, FP8)
    # TMA and cp.async bring 16 bytes at a time.
    multiple = 2 * GROUP if is_packed else 16 // gate_up.itemsize
    if is_packed and not all(map(_takes_packed, weights)):
        return False
    parts = [part for weight in weights for part in fields(weight) if part is not None]
    is_aligned = all(part.data_ptr() % 16 == 0 and part.is_contiguous() for part in parts)
    sizes = x.shape[1], gate_up.shape[1] // 2
    return is_known and is_aligned and x.data_ptr() % 16 == 0 and all(size % multiple == 0 for size in sizes)


def _takes_packed(weight: AnyWeight) -> bool:
    """Return whether a step's columns have scales in one or two numbers of a kind that the kernel reads."""
    if not isinstance(weight, Quantized) or weight.format == NVFP4:
        return False
    return weight.format in (FP4, INT4) or weight.format.columns > GROUP


def interleave(x: Tensor) -> Tensor:
    """Return rows [T, K] in the column order of 4-bit products: 0, 4, 1, 5, 2, 6, 3, 7 in each eight."""
    return x.unflatten(1, (-1, 2, 4)).transpose(2, 3).flatten(1)


def multiply(
    x: Tensor | QuantizedRows,
    weight: AnyWeight,
    blocks: Blocks,
    dtype: torch.dtype,
    fuses: bool,
    expert_weights: Tensor | None = None,
    glu: Glu = SWIGLU,
) -> Tensor | QuantizedRows:
    """Return each route's row of x times its expert's weight; the gated linear unit, times the route's
    weight, if expert_weights are given.

    Args:
        x: A row of each route; of each token [T, H] in a gated product. Quantized for fp8 weights; interleaved for
            4-bit weights, and a gated result likewise.
        weight: Weights [E, N, K]; in a gated product gate's and up's rows.
        blocks: Blocks of BLOCK_ROWS routes.
        fuses: Whether the compiler may fuse products and sums.
        expert_weights: float32 [T, k].
    Returns:
        [routes, N], or of a gated product [routes, N / 2], in dtype, or quantized as x is.
    """
    values, x_scales = x if isinstance(x, QuantizedRows) else (x, None)
    weights, scales, zeros, _ = fields(weight)
    num_routes, width = len(values), weights.shape[1]
    if expert_weights is not None:
        num_routes, width = expert_weights.numel(), width // 2
    result: Tensor | QuantizedRows
    if x_scales is not None and expert_weights is not None:
        result = QuantizedRows(*empty_groups(values[:1, :1].expand(num_routes, width)))
    else:
        result = torch.empty(num_routes, width, dtype=dtype, device=weights.device)
    out, out_scales = result if isinstance(result, QuantizedRows) else (result, None)
    row_bytes, scale_steps = ROW_BYTES.value, 1
    if isinstance(weight, Quantized) and weight.format.is_packed:
        weights, row_bytes, scale_steps = weights.view(torch.int32), GROUP, max(1, weight.format.columns // (2 * GROUP))
        if weight.format.columns == GROUP:
            scales = weight.scales.view(torch.uint16 if weight.format == FP4 else torch.int32)
    num_programs = torch.cuda.get_device_properties(weights.device).multi_processor_count
    grouped_product_kernel[(num_programs,)](
        values.contiguous(),
        x_scales,
        *((0, 0) if x_scales is None else x_scales.stride()),
        describe(weights.reshape(-1, weights.shape[-1]), COLUMNS.value, row_bytes // weights.itemsize),
        scales,
        zeros,
        *blocks,
        expert_weights,
        out,
        out_scales,
        0 if out_scales is None else out_scales.stride(1),
        *glu[:2],
        len(weights),
        TOP_K=1 if expert_weights is None else expert_weights.shape[1],
        WIDTH=width,
        K=values.shape[1],
        SCALE_STEPS=scale_steps,
        GATED=expert_weights is not None,
        IS_SMOOTH=glu.is_smooth,
        DTYPE=_GLUON[dtype],
        num_warps=4,
        enable_fp_fusion=fuses,
    )
    return result
