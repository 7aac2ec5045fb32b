"""From a checkpoint to a decoder over several streams of the residual (DeepSeek-V4, HY V4, GLM-5-Next)."""

from dcpmla.integrations.parts import Parts
from dcpmla.model.mixing import Constants, Projection
from dcpmla.model.stream_decoder import StreamBlock, StreamDecoder
from dcpmla.model.streams import Connection, DelayedCollapse, StreamMean
from dcpmla.parallel.linear import read_weight


def load_streams(
    parts: Parts,
    num_layers: int,
    constants: Constants,
    collapses: bool = False,
    to_head: Connection | StreamMean | DelayedCollapse | None = None,
) -> StreamDecoder:
    """Load the decoder (`StreamDecoder`).

    Args:
        to_head: Collapse of the streams; None to load it.
    """
    blocks = [load_stream_block(parts, name, constants) for name in parts.layer_names(num_layers)]
    if to_head is None:
        to_head = load_connection(parts, "model.hc_head.hc_", "model.norm.weight", constants, is_head=True)
    num_streams = parts.model.config.hc_mult
    return StreamDecoder(parts.vector("model.embed_tokens.weight"), blocks, num_streams, to_head, collapses)


def load_stream_block(parts: Parts, name: str, constants: Constants) -> StreamBlock:
    """Load a layer of attention and an MLP or experts."""
    attention, layer = parts.attention(f"{name}.self_attn")
    connections = (
        load_connection(parts, f"{name}.attn_hc.", f"{name}.input_layernorm.weight", constants),
        load_connection(parts, f"{name}.ffn_hc.", f"{name}.post_attention_layernorm.weight", constants),
    )
    return StreamBlock(layer, attention, parts.mlp(f"{name}.mlp"), connections, parts.reduce)


def load_connection(parts: Parts, prefix: str, norm: str, constants: Constants, is_head: bool = False) -> Connection:
    """Load a hyper-connection and the norm after it.

    Args:
        prefix: Prefix of the names of its fn, base and scale.
    """
    size, streams = parts.model.config.hidden_size, parts.model.config.hc_mult
    num_scales = 1 if is_head else 3 if constants.num_iters else 2
    num = sum((streams, streams, streams**2)[:num_scales])
    shapes = {"fn": (num, streams * size), "base": (num,), "scale": (num_scales,)}
    projection = Projection(*(read_weight(parts.weights, prefix + name, shape) for name, shape in shapes.items()))
    weight = read_weight(parts.weights, norm, (size,))
    return Connection(projection, weight, constants).to(parts.placement.device)
