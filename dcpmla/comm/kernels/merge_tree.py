"""The merge of parts in a fixed order on GPUs, in one form for all kernels: `dcpmla.merge` is its reference.

A compiler may round a x b + c x d in two ways; here the form is explicit, so that all kernels round alike.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def find_shares(lse, other_lse):
    """Return the shares of two parts by their lse and other_lse [N], and their merged lse.

    Shares of 1 and 0 are exact, so an empty part leaves the bits of the other unchanged.
    """
    peak = tl.maximum(lse, other_lse)
    shift = tl.where(peak == -float("inf"), 0.0, peak)  # -inf - -inf is NaN
    weight, other_weight = tl.exp2((lse - shift) * LOG2_E), tl.exp2((other_lse - shift) * LOG2_E)
    total = weight + other_weight
    is_any = total != 0
    divisor = tl.where(is_any, total, 1.0)
    merged_lse = tl.where(is_any, tl.fma(tl.log2(divisor), tl.where(is_any, LN_2, 0.0), shift), peak)
    return tl.div_rn(weight, divisor), tl.div_rn(other_weight, divisor), merged_lse


@triton.jit
def merge_pair(out, lse, other, other_lse):
    """Merge rows out and other [N, D] float32 by lse and other_lse [N] (`dcpmla.merge.merge_pair`)."""
    share, other_share, merged_lse = find_shares(lse, other_lse)
    share, other_share = share[:, None], other_share[:, None]
    out, other = tl.where(share != 0, out, 0.0), tl.where(other_share != 0, other, 0.0)  # empty rows may hold NaN
    return tl.fma(out, tl.broadcast_to(share, out.shape), other * other_share), merged_lse


@triton.jit
def merge_tree(out, lse):
    """Merge parts out [N, D] float32, lse [N], N a power of two, into [1, D] and [1] (`dcpmla.merge.merge_tree`).

    Parts with lse -inf have rows of finite numbers.
    """
    for _ in tl.static_range(4):  # up to 16 parts
        if out.shape[0] > 1:
            halves = tl.reshape(out, [2, out.shape[0] // 2, out.shape[1]])
            first, second = tl.split(tl.permute(halves, [1, 2, 0]))
            first_lse, second_lse = tl.split(tl.trans(tl.reshape(lse, [2, lse.shape[0] // 2])))
            out, lse = merge_pair(first, first_lse, second, second_lse)
    return out, lse
