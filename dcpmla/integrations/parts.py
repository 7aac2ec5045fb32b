"""The parts of a model that this package computes, each from transformers' module of it and a checkpoint's slices; the
decoder of a model whose blocks have a norm before attention and one before the MLP, and its MTP module, which
transformers leaves out.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from dcpmla.attention.mla.fp8_scales import missing_scales
from dcpmla.attention.placement import Placement
from dcpmla.attention.spec import AttentionLayer
from dcpmla.attention.stack import Stack
from dcpmla.comm.reduce import Reduce
from dcpmla.fields import check_experts
from dcpmla.integrations.families.routing import Routing
from dcpmla.model.block import Decoder, DecoderBlock, ShortcutBlock, VocabHead
from dcpmla.model.glu import Glu, LayerGlus
from dcpmla.model.latent import Latent
from dcpmla.model.mlp import MLP, MLPPart
from dcpmla.model.moe import Gate, MoE, load_experts, read_expert, unstack_experts
from dcpmla.model.mtp import MtpLayer
from dcpmla.model.norm_gate import NormGate
from dcpmla.model.router import split_weight
from dcpmla.parallel.formats import cut, format_of
from dcpmla.parallel.linear import Linear, Weight, read_linear, read_weight

Shapes = dict[str, tuple[int, ...]]  # shapes of weights by their names

_logger = logging.getLogger(__name__)


@dataclass
class Parts:
    """A maker of loaded modules.

    Attributes:
        model: Model of transformers, without weights.
        weights: Weights of the whole checkpoint.
        shapes: Shapes of all weights that are loaded, but stacked experts', by name.
        placement: Ranks of the model, device of its parameters, and dtype of parameters that are not quantized.
        spreads_experts: Whether each rank has its share of the experts whole, instead of a slice of every one.
        expert_dtype: "auto" or "fp8" (`load_experts`).
        routing: Choice of experts.
        glus: Function of a layer's number that returns its gated linear units.
        stack: Attention of all layers.
        reduce: Sums over the TP ranks.
        eps: Epsilon of the norms of hidden states.
        directory: Directory of the checkpoint.
        default_scales: Names of scales that are 1 in some layer because its checkpoint lacks them.
        num_layers: Number of layers of attention that are loaded.
    """

    model: Any
    weights: Mapping[str, Weight]
    shapes: Mapping[str, tuple[int, ...]]
    placement: Placement
    spreads_experts: bool
    expert_dtype: str
    routing: Routing
    glus: Callable[[int], LayerGlus]
    stack: Stack
    reduce: Reduce
    eps: float
    directory: Path
    default_scales: set[str] = field(default_factory=set)
    num_layers: int = 0

    def _glus_of(self, name: str) -> LayerGlus:
        """Return the gated linear units of the layer that has a module `model.layers.N.*`."""
        return self.glus(int(name.split(".")[2]))

    def _cut(self, size: int) -> slice:
        in_blocks = getattr(self.model.config, "quantization_config", None) is not None
        return cut(size, self.placement.mesh.tp_rank, self.placement.mesh.tp_size, in_blocks)

    def layer_names(self, num_layers: int) -> Iterator[str]:
        """Yield the names of the first decoder layers, with a bar for the first rank if it has a terminal."""
        disable = None if self.placement.mesh.tp_rank == 0 else True
        bar = {"desc": "loading weights", "unit": "layer", "disable": disable}
        yield from (f"model.layers.{number}" for number in tqdm(range(num_layers), **bar))

    def values(self, name: str) -> Tensor:
        """Return a whole weight as it is stored; float32 if it is quantized."""
        return read_weight(self.weights, name, self.shapes[name])

    def vector(self, name: str) -> Tensor:
        """Return a whole weight in the model's dtype."""
        return self.values(name).to(**self.placement.factory_kwargs)

    def norm(self, name: str) -> Tensor:
        """Return the weight of a norm, which may have a gate."""
        beside_gate = f"{name}.norm.weight"
        return self.vector(beside_gate if beside_gate in self.shapes else f"{name}.weight")

    def norm_gate(self, name: str) -> NormGate | None:
        """Return the gate of a norm (A.X-K2); None without."""
        down, up = (f"{name}.mlp.{linear}.weight" for linear in ("fc1", "fc2"))
        return NormGate(self.vector(down), self.vector(up)) if down in self.shapes else None

    def linear(self, name: str, rows: slice = slice(None), cols: slice = slice(None)) -> Linear:
        """Return a linear layer over a slice of a matrix."""
        num_rows, num_cols = self.shapes[name]
        sizes = len(range(num_cols)[cols]), len(range(num_rows)[rows])
        linear = Linear(*sizes, **self.placement.factory_kwargs)
        linear.load(read_linear(self.weights, name, (num_rows, num_cols), rows, cols))
        return linear

    def head(self) -> VocabHead:
        """Return the head, its rows cut over the ranks if they divide evenly."""
        name = "lm_head.weight" if "lm_head.weight" in self.weights else "model.embed_tokens.weight"
        vocab_size, group = self.shapes[name][0], self.placement.mesh.tp_group
        softcap = getattr(self.model.config, "final_logit_softcapping", None)
        return VocabHead(self.linear(name, self.vocab_rows(vocab_size)), vocab_size, group, softcap)

    def vocab_rows(self, vocab_size: int) -> slice:
        """Return this rank's rows of a matrix over the vocabulary."""
        mesh = self.placement.mesh
        is_cut = vocab_size % mesh.tp_size == 0  # the gather of logits takes the same number from each rank
        return cut(vocab_size, mesh.tp_rank, mesh.tp_size) if is_cut else slice(0, vocab_size)

    def attention(self, name: str) -> tuple[AttentionLayer, int]:
        """Load the next layer of attention, and return it with its number."""
        prefix, number, spec = f"{name}.", self.num_layers, self.stack.layers[self.num_layers]
        weights = {key.removeprefix(prefix): self.weights[key] for key in self.weights if key.startswith(prefix)}
        if spec.has_scales:
            self.default_scales |= missing_scales(weights, self.placement.dcp)
        layer = spec.new_layer(self.placement)
        try:
            layer.load_weights(weights)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        self.num_layers += 1
        return layer, number

    def warn_of_missing_scales(self) -> None:
        """Log which scales are 1 because a checkpoint lacks them."""
        if self.default_scales and self.placement.mesh.tp_rank == 0:
            _logger.warning(
                "layers have no %s in their checkpoint, so 1 is taken: e4m3 saturates at 448 and loses what is smaller "
                "than 0.001 (--kv-cache-scale gives a kv_scale, --calculate-kv-scales finds both)",
                " and no ".join(sorted(self.default_scales)),
            )

    def mlp(self, name: str) -> MLP | MoE:
        """Return an MLP or a mixture of experts."""
        return self.dense(name) if f"{name}.gate_proj.weight" in self.shapes else self._moe(name)

    def dense(self, name: str, glu: Glu | None = None) -> MLP:
        """Return an MLP of the checkpoint's size.

        Args:
            glu: Gated linear unit; None takes the unit of the layer's dense MLPs.
        """
        size, hidden_size = self.weights[f"{name}.gate_proj.weight"].shape
        columns = self._cut(size)
        glu = self._glus_of(name).dense if glu is None else glu
        mlp = MLP(hidden_size, columns.stop - columns.start, glu, **self.placement.factory_kwargs)
        mlp.load_weights(self.weights, MLPPart(f"{name}.", size, columns))
        return mlp

    def _moe(self, name: str) -> MoE:
        module = self.model.get_submodule(name)
        tp_rank, tp_size, glus = self.placement.mesh.tp_rank, self.placement.mesh.tp_size, self._glus_of(name)
        num_experts, width, size = module.experts.down_proj.shape
        check_experts(num_experts, size, tp_size, self.spreads_experts)
        weights = unstack_experts(self.weights, f"{name}.experts.", num_experts)
        own, columns = range(num_experts), self._cut(size)
        if self.spreads_experts:
            own = range(tp_rank * num_experts // tp_size, (tp_rank + 1) * num_experts // tp_size)
            columns = slice(0, size)
        parts = [MLPPart(f"{name}.experts.{number}.", size, columns) for number in own]
        shared = self._shared_parts(name, module, weights, parts[0])
        gate = self._gate(name, len(shared))
        experts = load_experts(weights, parts + shared, width, self.expert_dtype, **self.placement.factory_kwargs)
        has_mlp = hasattr(module, "shared_experts") and not shared
        adds_identity = getattr(module.experts, "zero_expert_num", 0) > 0 and tp_rank == 0
        return MoE(
            gate,
            experts,
            own.start,
            self.dense(f"{name}.shared_experts", glus.shared) if has_mlp else None,
            glus.routed,
            num_experts + len(shared),
            adds_identity,
            self._latent(name, width) if hasattr(module, "routed_expert_down_proj") else None,
        )

    def _latent(self, name: str, width: int) -> Latent:
        columns = cut(width, self.placement.mesh.tp_rank, self.placement.mesh.tp_size)
        down = self.linear(f"{name}.routed_expert_down_proj.weight")
        up = self.linear(f"{name}.routed_expert_up_proj.weight", cols=columns)
        norm = f"{name}.routed_expert_norm.weight"
        return Latent(down, up, self.vector(norm) if norm in self.shapes else None, self.eps, columns, self.reduce)

    def _shared_parts(self, name: str, module: Any, weights: Mapping[str, Weight], expert: MLPPart) -> list[MLPPart]:
        """Return the shared MLP as further experts, if it has their activation, width, cut and format."""
        glus = self._glus_of(name)
        if not hasattr(module, "shared_experts") or self.spreads_experts or glus.shared != glus.routed:
            return []
        whole, hidden_size = module.shared_experts.gate_proj.weight.shape
        if whole % expert.size or hidden_size != module.experts.down_proj.shape[1]:
            return []
        columns = expert.cut
        parts = [
            MLPPart(f"{name}.shared_experts.", whole, slice(start + columns.start, start + columns.stop))
            for start in range(0, whole, expert.size)
        ]
        routed, shared = (read_expert(weights, part, hidden_size, self.placement.dtype) for part in (expert, parts[0]))
        return parts if [*map(format_of, routed)] == [*map(format_of, shared)] else []

    def _gate(self, name: str, num_shared: int) -> Gate:
        bias, router = f"{name}.{self.routing.bias}", self.routing.router(self.model.config, num_shared)
        device = self.placement.device
        weight = split_weight(self.values(f"{name}.{self.routing.weight}").to(device), self.placement.dtype)
        if f"{name}.gate.tid2eid" in self.weights:
            return Gate(weight, router, table=self.weights[f"{name}.gate.tid2eid"][:].to(device, torch.int64))
        return Gate(weight, router, self.values(bias).to(device, torch.float32) if bias in self.weights else None)


# Function of parts, a layer's name and the weight of the norm after the layer.
LoadBlock = Callable[[Parts, str, Tensor], DecoderBlock | ShortcutBlock]


def load_block(parts: Parts, name: str, output_norm: Tensor) -> DecoderBlock:
    """Load a layer of attention and an MLP or experts."""
    attention, layer = parts.attention(f"{name}.self_attn")
    second_norm = f"{name}.post_attention_layernorm"
    norms = parts.norm(second_norm), output_norm
    mlp = parts.mlp(f"{name}.mlp")
    mlp_norm = f"{name}.mlp.post_mlp_layernorm.weight"
    last = parts.vector(mlp_norm) if mlp_norm in parts.shapes else None
    gates = parts.norm_gate(f"{name}.input_layernorm"), parts.norm_gate(second_norm)
    return DecoderBlock(layer, attention, mlp, *norms, parts.eps, parts.reduce, last, *gates)


def load_decoder(
    parts: Parts, num_layers: int, first_norm: str = "input_layernorm", load: LoadBlock = load_block
) -> Decoder:
    """Load the decoder.

    Args:
        num_layers: Number of layers, without the MTP module's.
        first_norm: Name of a layer's first norm.
        load: Loader of a layer.
    """
    norms = [parts.norm(f"model.layers.{number}.{first_norm}") for number in range(num_layers)]
    norms.append(parts.vector("model.norm.weight"))
    names = parts.layer_names(num_layers)
    blocks = [load(parts, name, output_norm) for name, output_norm in zip(names, norms[1:], strict=True)]
    return Decoder(parts.vector("model.embed_tokens.weight"), norms[0], blocks, parts.eps)


def load_mtp(parts: Parts, block: str, embedding: Tensor) -> MtpLayer:
    """Load an MTP module whose block is a `DecoderBlock`.

    Args:
        block: Name of the block.
        embedding: Embedding of the model, for a module without its own (dots3).
    """
    own = f"{block}.embed_tokens.weight"
    embedding = parts.vector(own) if own in parts.shapes else embedding
    decoder_block = load_block(parts, block, parts.vector(f"{block}.shared_head.norm.weight"))
    enorm, hnorm, input_norm = (
        parts.vector(f"{block}.{name}.weight") for name in ("enorm", "hnorm", "input_layernorm")
    )
    projection = parts.linear(f"{block}.eh_proj.weight")
    return MtpLayer(embedding, enorm, hnorm, projection, input_norm, decoder_block, parts.eps)
