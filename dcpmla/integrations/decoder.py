"""From a checkpoint to the decoder of a model whose blocks have a norm before attention and one before the MLP, and to
its MTP module, which transformers leaves out.
"""

from collections.abc import Callable

from torch import Tensor

from dcpmla.integrations.parts import Parts
from dcpmla.model.block import Decoder, DecoderBlock, ShortcutBlock
from dcpmla.model.mtp import MtpLayer

Shapes = dict[str, tuple[int, ...]]  # shapes of weights by their names
# Function of parts, a layer's name and the weight of the norm after the layer.
LoadBlock = Callable[[Parts, str, Tensor], DecoderBlock | ShortcutBlock]


def load_block(parts: Parts, name: str, output_norm: Tensor) -> DecoderBlock:
    """Load a layer of attention and an MLP or experts."""
    attention, layer = parts.attention(f"{name}.self_attn")
    norms = parts.vector(f"{name}.post_attention_layernorm.weight"), output_norm
    mlp = parts.mlp(f"{name}.mlp")
    mlp_norm = f"{name}.mlp.post_mlp_layernorm.weight"
    last = parts.vector(mlp_norm) if mlp_norm in parts.shapes else None
    return DecoderBlock(layer, attention, mlp, *norms, parts.eps, parts.reduce, last)


def load_decoder(
    parts: Parts, num_layers: int, first_norm: str = "input_layernorm", load: LoadBlock = load_block
) -> Decoder:
    """Load the decoder.

    Args:
        num_layers: Number of layers, without the MTP module's.
        first_norm: Name of a layer's first norm.
        load: Loader of a layer.
    """
    norms = [parts.vector(f"model.layers.{number}.{first_norm}.weight") for number in range(num_layers)]
    norms.append(parts.vector("model.norm.weight"))
    names = parts.layer_names(num_layers)
    blocks = [load(parts, name, output_norm) for name, output_norm in zip(names, norms[1:], strict=True)]
    return Decoder(parts.vector("model.embed_tokens.weight"), norms[0], blocks, parts.eps)


def load_mtp(parts: Parts, block: str, embedding: Tensor) -> MtpLayer:
    """Load an MTP module whose block is a `DecoderBlock`.

    Args:
        block: Name of the block.
        embedding: Embedding of the model.
    """
    decoder_block = load_block(parts, block, parts.vector(f"{block}.shared_head.norm.weight"))
    enorm, hnorm, input_norm = (
        parts.vector(f"{block}.{name}.weight") for name in ("enorm", "hnorm", "input_layernorm")
    )
    projection = parts.linear(f"{block}.eh_proj.weight")
    return MtpLayer(embedding, enorm, hnorm, projection, input_norm, decoder_block, parts.eps)
