"""The part of an MLA layer that one rank holds: its heads' weights, and the scales of its cache."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from dcpmla.attention.scales import KV_SCALE_NAMES, Q_SCALE_NAMES, new_scale, read_scale
from dcpmla.config import DCPConfig, MLAConfig
from dcpmla.parallel.linear import RowParallelLinear, Weight, fill, read_weight, shard
from dcpmla.parallel.mesh import DCPMesh


@dataclass(frozen=True)
class HeldHeads:
    """Neighbouring heads that one rank's weight covers, in TP order: its own, or those of its whole DCP group.

    Attributes:
        first: the first of them, counted over the model's heads.
        count: how many they are.
        own: those among them whose values this rank hands to o_proj.
    """

    first: int
    count: int
    own: slice

    @classmethod
    def of(cls, mesh: DCPMesh, heads_per_rank: int, whole_group: bool) -> "HeldHeads":
        """Return the heads of this rank, or with whole_group those of all ranks of its DCP group."""
        first_own = mesh.tp_rank * heads_per_rank
        if not whole_group:
            return cls(first_own, heads_per_rank, slice(0, heads_per_rank))
        before = mesh.dcp_rank * heads_per_rank  # heads of the group's ranks before this one
        return cls(first_own - before, mesh.dcp_size * heads_per_rank, slice(before, before + heads_per_rank))

    def rows(self, rows_per_head: int) -> slice:
        """Return their rows of a model's whole weight, in which each head has rows_per_head."""
        return slice(self.first * rows_per_head, (self.first + self.count) * rows_per_head)


def check_mesh(dcp: DCPConfig, mesh: DCPMesh) -> None:
    """Raise ValueError unless the options are for groups of the mesh's sizes."""
    if (dcp.tensor_parallel_size, dcp.decode_context_parallel_size) != (mesh.tp_size, mesh.dcp_size):
        raise ValueError(
            f"dcp is for tensor_parallel_size {dcp.tensor_parallel_size} and decode_context_parallel_size "
            f"{dcp.decode_context_parallel_size}; the mesh has {mesh.tp_size} and {mesh.dcp_size}"
        )


class AttentionWeights(nn.Module):
    """Parameters and scales of `dcpmla.MLAAttention`, which documents arguments, attributes and errors."""

    kv_scale: Tensor | None
    q_scale: Tensor | None

    def __init__(
        self, config: MLAConfig, dcp: DCPConfig, mesh: DCPMesh, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        check_mesh(dcp, mesh)
        self.config, self.dcp, self.mesh = config, dcp, mesh
        self.num_heads = config.heads_per_rank(mesh.tp_size)
        self.q_heads = HeldHeads.of(mesh, self.num_heads, dcp.dcp_q_replicate)
        self.kv_heads = HeldHeads.of(mesh, self.num_heads, dcp.dcp_q_replicate or dcp.dcp_project_before_merge)
        kv_scale = new_scale(dcp.kv_cache_scale, device) if dcp.kv_cache_dtype == "fp8" else None
        self.register_buffer("kv_scale", kv_scale, persistent=False)
        self.register_buffer(
            "q_scale", new_scale(None, device) if dcp.decode_query_dtype == "fp8" else None, persistent=False
        )
        new: dict[str, Any] = {"dtype": dtype, "device": device}
        q_dim = self.q_heads.count * config.qk_head_dim
        if config.q_lora_rank is None:
            self.q_proj = skip_init(nn.Linear, config.hidden_size, q_dim, bias=False, **new)
            self.kv_a_proj = skip_init(
                nn.Linear, config.hidden_size, config.latent_dim, bias=config.attention_bias, **new
            )
        else:
            down_dim = config.q_lora_rank + config.latent_dim
            self.fused_qkv_a_proj = skip_init(
                nn.Linear, config.hidden_size, down_dim, bias=config.attention_bias, **new
            )
            self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, config.rms_norm_eps, **new)
            self.q_b_proj = skip_init(nn.Linear, config.q_lora_rank, q_dim, bias=False, **new)
        self.kv_a_layernorm = nn.RMSNorm(config.kv_lora_rank, config.rms_norm_eps, **new)
        kv_b_shape = (self.kv_heads.count, config.qk_nope_head_dim + config.v_head_dim, config.kv_lora_rank)
        self.w_kv_b = nn.Parameter(torch.empty(kv_b_shape, **new))
        self.o_proj = skip_init(
            RowParallelLinear,
            config.num_heads * config.v_head_dim,
            config.hidden_size,
            config.attention_bias,
            mesh.tp_group,
            **new,
        )

    @property
    def query_proj(self) -> nn.Linear:
        """The projection that makes queries from q_c, or from hidden states in a model that does not compress them."""
        return self.q_proj if self.config.q_lora_rank is None else self.q_b_proj

    @property
    def w_uk(self) -> Tensor:
        """[h, P, L], absorbed into decode's queries; [W h, P, L] with dcp_q_replicate."""
        heads = slice(None) if self.dcp.dcp_q_replicate else self.kv_heads.own
        return self.w_kv_b[heads, : self.config.qk_nope_head_dim]

    @property
    def w_uv(self) -> Tensor:
        """[h, V, L], applied to the merged output."""
        return self.w_kv_b[self.kv_heads.own, self.config.qk_nope_head_dim :]

    @property
    def w_uv_group(self) -> Tensor:
        """[W h, V, L] with dcp_project_before_merge, applied to this rank's partial output."""
        return self.w_kv_b[:, self.config.qk_nope_head_dim :]

    def load_weights(self, weights: Mapping[str, Weight]) -> None:
        """Read this rank's part of every parameter, and the scales that no option gives.

        Args:
            weights: whole weights by their names in a checkpoint, from "q_a_proj.weight" to "o_proj.weight"; only the
                slices that this rank needs are read. Scales by the names of `dcpmla.attention.scales`, 1 without.
        Raises:
            ValueError: a weight that is missing or has another shape than the config asks for; a scale that is not a
                finite number above 0.
        """
        config, tp_group = self.config, self.mesh.tp_group
        hidden, rank = config.hidden_size, config.kv_lora_rank
        kv_b_width, o_cols = config.qk_nope_head_dim + config.v_head_dim, config.num_heads * config.v_head_dim
        whole = slice(None)
        down = {"kv_a_proj_with_mqa": config.latent_dim}
        if config.q_lora_rank is None:
            down_proj, q_name = self.kv_a_proj, "q_proj.weight"
        else:
            down = {"q_a_proj": config.q_lora_rank, **down}
            down_proj, q_name = self.fused_qkv_a_proj, "q_b_proj.weight"
            fill(self.q_a_layernorm.weight, read_weight(weights, "q_a_layernorm.weight", (config.q_lora_rank,)))
        q_shape = (config.num_heads * config.qk_head_dim, self.query_proj.in_features)
        fill(
            self.query_proj.weight, read_weight(weights, q_name, q_shape, self.q_heads.rows(config.qk_head_dim), whole)
        )
        fill(
            down_proj.weight,
            *(read_weight(weights, f"{name}.weight", (rows, hidden), whole, whole) for name, rows in down.items()),
        )
        fill(self.kv_a_layernorm.weight, read_weight(weights, "kv_a_layernorm.weight", (rank,)))
        kv_b_shape = (config.num_heads * kv_b_width, rank)
        kv_b = read_weight(weights, "kv_b_proj.weight", kv_b_shape, self.kv_heads.rows(kv_b_width), whole)
        fill(self.w_kv_b, kv_b.unflatten(0, self.w_kv_b.shape[:2]))
        fill(
            self.o_proj.weight, read_weight(weights, "o_proj.weight", (hidden, o_cols), whole, shard(o_cols, tp_group))
        )
        if self.kv_scale is not None and self.dcp.kv_cache_scale is None:
            self.kv_scale.fill_(read_scale(weights, KV_SCALE_NAMES))
        if self.q_scale is not None:
            self.q_scale.fill_(read_scale(weights, Q_SCALE_NAMES))
        if config.attention_bias:
            fill(down_proj.bias, *(read_weight(weights, f"{name}.bias", (rows,)) for name, rows in down.items()))
            fill(self.o_proj.bias, read_weight(weights, "o_proj.bias", (hidden,)))
