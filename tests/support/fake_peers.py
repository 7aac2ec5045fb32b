"""Peers in plain torch for `bench decode` and `bench exchange`; FlashAttention-3's ignores the causal bound."""

from pathlib import Path

PEERS = """
import torch

def load_flashmla(): pass
def load_fa3(): pass

def attend(q, keys, scale):
    scores = torch.einsum("hd,sd->hs", q.float(), keys.float()) * scale
    return (scores.softmax(-1) @ keys[:, :512].float()).to(q.dtype), scores.logsumexp(-1)

def cached(cache, table, length):
    return cache[table.long()].flatten(0, 1)[:length]

class FlashMLADense:
    def __call__(self, q, kv, block_table, seqlens, scale, causal=False):
        out, lse = q.new_empty(*q.shape[:3], 512), torch.empty(q.shape[0], q.shape[2], q.shape[1])
        for i, (table, length) in enumerate(zip(block_table, seqlens.tolist())):
            for j in range(q.shape[1]):
                bound = length - (q.shape[1] - 1 - j if causal else 0)
                out[i, j], lse[i, :, j] = attend(q[i, j], cached(kv[:, :, 0], table, bound), scale)
        return out, lse

class FlashMLADenseFP8(FlashMLADense):
    def __call__(self, q, kv, block_table, seqlens, scale, causal, descale_q, descale_k):
        assert (q.dtype, kv.dtype) == (torch.float8_e4m3fn,) * 2
        return super().__call__(q.float() * descale_q, kv.float() * descale_k, block_table, seqlens, scale, causal)

class FlashMLASparseFP8:
    def __call__(self, q, kv, indices, scale):
        out, lse = q.new_empty(*q.shape[:3], 512), torch.empty(q.shape[0], q.shape[2], q.shape[1])
        tokens = kv.flatten(0, 2)
        if q.shape[-1] == 512:
            assert kv.shape[1:] == (64, 1, 584) and kv.stride(0) % 576 == 0
            tokens = torch.cat([rows.reshape(-1, rows.shape[-1] // 64) for rows in kv.flatten(1).split(64 * 576, 1)], 1)
            scales = 2.0 ** (tokens[:, 576:583].float() - 127)
            tokens = tokens[:, :576]
        else:
            scales = tokens[:, 512:528].contiguous().view(torch.float32)
            tokens = torch.cat([tokens[:, :512], tokens[:, 528:]], 1)
        latents = tokens[:, :-128].contiguous().view(torch.float8_e4m3fn).float().unflatten(1, (scales.shape[1], -1))
        rope = tokens[:, -128:].contiguous().view(torch.bfloat16).float()
        keys = torch.cat([(latents * scales[..., None]).flatten(1), rope], 1)
        for i, j in torch.cartesian_prod(*map(torch.arange, q.shape[:2])):
            out[i, j], lse[i, :, j] = attend(q[i, j], keys[indices[i, j][indices[i, j] >= 0]], scale)
        return out, lse

class FA3MLA:
    def __call__(self, q, cache, block_table, seqlens, cu_q, max_q, max_k, scale):
        rows = []
        for i, (table, length) in enumerate(zip(block_table, seqlens.tolist())):
            rows += [attend(row, cached(cache, table, length), scale) for row in q[cu_q[i] : cu_q[i + 1]]]
        out, lse = zip(*rows)
        return torch.stack(out), torch.stack(lse, 1)
"""
FLASHINFER = """
import torch

class BatchMLAPagedAttentionWrapper:
    def __init__(self, workspace, backend): pass
    def plan(self, q_start, kv_start, blocks, lens, heads, latent, rope, block_size, causal, scale, q_dtype, kv_dtype):
        self.numbers = q_start, kv_start, blocks, lens, causal, scale
    def run(self, q_nope, q_pe, ckv, kpe, return_lse, return_lse_base_on_e):
        q_start, kv_start, blocks, lens, causal, scale = self.numbers
        q, cache, out, lses = torch.cat([q_nope, q_pe], -1).float(), torch.cat([ckv, kpe], -1).float(), [], []
        for i, length in enumerate(lens.tolist()):
            keys = cache[blocks[kv_start[i] : kv_start[i + 1]].long()].flatten(0, 1)[:length]
            scores = torch.einsum("qhd,sd->hqs", q[q_start[i] : q_start[i + 1]], keys) * scale
            if causal:
                hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(scores.shape[2] - scores.shape[1] + 1)
                scores = scores.masked_fill(hidden, -torch.inf)
            out.append(torch.einsum("hqs,sl->qhl", scores.softmax(-1), keys[:, :512]))
            lses.append(scores.logsumexp(-1).T)
        return torch.cat(out).to(q_nope.dtype), torch.cat(lses)
"""
PEER_DIRECT = """
import torch
import torch.distributed as dist

def load(path):
    if open(path).read() != "operator":
        raise OSError("undefined symbol\\nsecond line")

class DirectA2A:
    def __init__(self, lib, group, device, max_tokens, heads_per_rank, head_dim, dtype):
        load(lib)
        self.group, self.shape = group, (max_tokens, group.size() * heads_per_rank, head_dim, dtype)

    def reduce(self, out, lse):
        assert out.shape[0] <= self.shape[0] and (*out.shape[1:], out.dtype) == self.shape[1:]
        outs, lses = [[torch.empty_like(mine) for _ in range(self.group.size())] for mine in (out, lse)]
        dist.all_gather(outs, out, group=self.group)
        dist.all_gather(lses, lse, group=self.group)
        weights = torch.stack(lses).softmax(0).nan_to_num()
        merged = (torch.stack(outs).nan_to_num() * weights.unsqueeze(-1)).sum(0)
        return merged.chunk(self.group.size(), 1)[self.group.rank()]
"""


def write_peers(directory: Path) -> Path:
    """Write peers.py, and a package flashinfer next to it, into a directory."""
    (directory / "peers.py").write_text(PEERS)
    (directory / "flashinfer").mkdir()
    (directory / "flashinfer" / "__init__.py").touch()
    (directory / "flashinfer" / "mla.py").write_text(FLASHINFER)
    return directory


def write_exchange_peer(directory: Path, library: str = "operator") -> Path:
    """Write direct/peer_direct.py into a directory, and its library, which it loads only with the right content."""
    (directory / "direct").mkdir()
    (directory / "direct" / "peer_direct.py").write_text(PEER_DIRECT)
    (directory / "direct" / "vllm_direct.so.xz").write_text(library)
    return directory
