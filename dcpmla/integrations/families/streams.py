"""From a checkpoint to a decoder over several streams of the residual (DeepSeek-V4, HY V4, GLM-5-Next)."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from dcpmla.integrations.parts import Parts
from dcpmla.model.mixing import Constants, Projection
from dcpmla.model.stream_decoder import StreamBlock, StreamDecoder, StreamMtpLayer
from dcpmla.model.streams import Connection, DelayedCollapse, StreamMean


def mixing_constants(config: Any, delays: bool = False) -> Constants:
    """Return the constants of DeepSeek-V4's hyper-connections, or of V4.1's, which are delayed."""
    return Constants(config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters)._replace(delays=delays)


def load_streams(
    parts: Parts,
    num_layers: int,
    constants_of: Callable[[Any], Constants] = mixing_constants,
    collapse: type[StreamMean] | type[DelayedCollapse] | None = None,
    collapses: bool = False,
) -> StreamDecoder:
    """Load the decoder.

    Args:
        constants_of: Function of a transformers config.
        collapse: Class of the collapse of the streams; None for a hyper-connection.
        collapses: Same as in `StreamDecoder`.
    """
    config, constants = parts.model.config, constants_of(parts.model.config)
    blocks = [load_stream_block(parts, name, constants) for name in parts.layer_names(num_layers)]
    to_head: Connection | StreamMean | DelayedCollapse
    if collapse is None:
        to_head = load_connection(parts, "model.hc_head.hc_", "model.norm.weight", constants)
    else:
        to_head = collapse(parts.values("model.norm.weight"), config.rms_norm_eps).to(parts.placement.device)
    embedding = nn.Parameter(parts.vector("model.embed_tokens.weight"), requires_grad=False)
    return StreamDecoder(embedding, blocks, config.hc_mult, to_head, collapses)


def load_stream_mtp(parts: Parts, block: str, embedding: Tensor) -> StreamMtpLayer:
    """Load DeepSeek-V4's MTP module, whose block has a name."""
    config, constants = parts.model.config, mixing_constants(parts.model.config)
    enorm, hnorm = (parts.vector(f"{block}.{name}.weight") for name in ("enorm", "hnorm"))
    projections = parts.linear(f"{block}.e_proj.weight"), parts.linear(f"{block}.h_proj.weight")
    to_head = load_connection(parts, f"{block}.hc_head_", f"{block}.shared_head.norm.weight", constants)
    stream_block, sizes = load_stream_block(parts, block, constants), (config.hc_mult, config.rms_norm_eps)
    return StreamMtpLayer(embedding, enorm, hnorm, projections, stream_block, to_head, *sizes)


def load_stream_block(parts: Parts, name: str, constants: Constants) -> StreamBlock:
    """Load a layer of attention and an MLP or experts."""
    attention, layer = parts.attention(f"{name}.self_attn")
    connections = (
        load_connection(parts, f"{name}.attn_hc.", f"{name}.input_layernorm.weight", constants),
        load_connection(parts, f"{name}.ffn_hc.", f"{name}.post_attention_layernorm.weight", constants),
    )
    return StreamBlock(layer, attention, parts.mlp(f"{name}.mlp"), connections, parts.reduce)


def drop_connections(model: Any) -> None:
    """Take the hyper-connections from the MTP module's layer, which has one stream."""
    layers = model.model.layers
    for layer in layers[getattr(model.config, "num_main_layers", len(layers)) :]:
        del layer.attn_hc, layer.ffn_hc


def load_connection(parts: Parts, prefix: str, norm: str, constants: Constants) -> Connection:
    """Load a hyper-connection and the norm after it.

    Args:
        prefix: Prefix of the names of its fn, base and scale.
    """
    projection = Projection(*(parts.values(prefix + name) for name in Projection._fields))
    return Connection(projection, parts.values(norm), constants).to(parts.placement.device)
