"""The MTP module of a checkpoint, which transformers leaves out: its names, and its slices."""

from typing import NamedTuple

from torch import Tensor

from dcpmla.integrations.parts import Parts
from dcpmla.model.block import DecoderBlock
from dcpmla.model.mlp import MLP
from dcpmla.model.moe import MoE
from dcpmla.model.mtp import MtpLayer
from dcpmla.parallel.linear import Linear, read_linear, read_weight

NO_MODULE = "leave --speculative-method mtp out, or take ngram"  # the end of messages


class MtpNames(NamedTuple):
    """Names of a module's weights in a checkpoint.

    Attributes:
        projections: Projections of embeddings and hidden states at once, or one of each.
        collapse: Beginning of the names that collapse streams; empty in families without streams.
    """

    block: str
    mlp: str
    embedding_norm: str
    hidden_norm: str
    projections: tuple[str, ...]
    output_norm: str
    collapse: str = ""

    def shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of norms and projections around the module's block."""
        norms = self.embedding_norm, self.hidden_norm, self.output_norm
        projection = hidden_size, 2 * hidden_size // len(self.projections)
        return dict.fromkeys(norms, (hidden_size,)) | dict.fromkeys(self.projections, projection)


def load_mtp(parts: Parts, names: MtpNames, embedding: Tensor, mlp: MLP | MoE) -> MtpLayer:
    """Load a module whose block is a `DecoderBlock`.

    Args:
        embedding: Embedding of the model.
        mlp: MLP or experts of the block.
    """
    eps = parts.model.config.rms_norm_eps
    attention, layer = parts.attention(f"{names.block}.self_attn")
    second_norm = read_norm(parts, f"{names.block}.post_attention_layernorm.weight")
    block = DecoderBlock(layer, attention, mlp, second_norm, read_norm(parts, names.output_norm), eps, parts.reduce)
    input_norms = read_norm(parts, names.embedding_norm), read_norm(parts, names.hidden_norm)
    (projection,) = read_projections(parts, names)
    input_norm = read_norm(parts, f"{names.block}.input_layernorm.weight")
    return MtpLayer(embedding, *input_norms, projection, input_norm, block, eps)


def read_norm(parts: Parts, name: str) -> Tensor:
    """Return the weight of one of the module's norms."""
    return read_weight(parts.weights, name, (parts.model.config.hidden_size,)).to(parts.device, parts.dtype)


def read_projections(parts: Parts, names: MtpNames) -> list[Linear]:
    """Load the module's projections, whole."""
    size = parts.model.config.hidden_size
    shape = size, 2 * size // len(names.projections)
    linears = [Linear(shape[1], size, dtype=parts.dtype, device=parts.device) for _ in names.projections]
    for linear, name in zip(linears, names.projections, strict=True):
        linear.load(read_linear(parts.weights, name, shape))
    return linears
