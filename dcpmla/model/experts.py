from typing import NamedTuple

import torch

from dcpmla.parallel.quantized import AnyWeight, dequantize


class ExpertWeights(NamedTuple):
    gate_up: AnyWeight
    down: AnyWeight
def swiglu(x, limit=None):
    g, u = x.chunk(2, -1)
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return torch.nn.functional.silu(g) * u
def compute_experts(x, ids, w, weights, limit=None):
    out = torch.zeros(x.shape, dtype=torch.float32 if x.dtype != torch.float64 else x.dtype)
    gu = dequantize(weights.gate_up, x.dtype); dn = dequantize(weights.down, x.dtype)
    for e in range(gu.shape[0]):
        t, k = torch.where(ids == e)
        if len(t):
            out.index_add_(0, t, (swiglu(x[t] @ gu[e].T, limit) @ dn[e].T).to(out.dtype) * w[t, k, None].to(out.dtype))
    return out.to(x.dtype)
