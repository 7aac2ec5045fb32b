from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Router:
    scoring: str
    group_score: str
    num_groups: int
    topk_groups: int
    top_k: int
    renormalize: bool
    routed_scaling_factor: float
    num_shared: int
def router_logits(x, weight):
    return x.float() @ weight.float().T
def route(logits, bias, how):
    s = logits.sigmoid() if how.scoring == "sigmoid" else logits.softmax(-1)
    c = s if bias is None else s + bias
    if how.num_groups > 1:
        g = c.unflatten(-1, (how.num_groups, -1))
        gs = g.amax(-1) if how.group_score == "max" else g.topk(2, -1)[0].sum(-1)
        keep = gs.topk(how.topk_groups, -1)[1]
        m = torch.zeros_like(gs, dtype=torch.bool).scatter_(1, keep, True)
        c = g.masked_fill(~m[..., None], -torch.inf).flatten(1)
    ids = c.topk(how.top_k, -1)[1]
    w = s.gather(1, ids)
    if how.renormalize:
        w = w / (w.sum(-1, keepdim=True) + 1e-20)
    w = w * how.routed_scaling_factor
    if how.num_shared:
        n = logits.shape[1]
        sh = torch.arange(n, n + how.num_shared).expand(len(ids), -1)
        ids, w = torch.cat([ids, sh], 1), torch.cat([w, torch.ones_like(sh, dtype=w.dtype)], 1)
    return ids.int(), w.float()
