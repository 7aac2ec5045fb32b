"""From a checkpoint of DeepSeek-V4 to its decoder and its MTP module."""

from torch import Tensor

from dcpmla.integrations.decoder import read_norm, read_projections
from dcpmla.integrations.parts import Parts
from dcpmla.model.mixing import Constants, Projection
from dcpmla.model.moe import MoE
from dcpmla.model.stream_decoder import StreamBlock, StreamDecoder, StreamMtpLayer
from dcpmla.model.streams import Connection
from dcpmla.parallel.linear import read_weight


def load_streams(parts: Parts, num_layers: int) -> StreamDecoder:
    """Load the decoder."""
    blocks = [_load_block(parts, name) for name in parts.layer_names(num_layers)]
    to_head = _load_connection(parts, "model.hc_head.hc_", "model.norm.weight", is_head=True)
    return StreamDecoder(parts.vector("model.embed_tokens.weight"), blocks, parts.model.config.hc_mult, to_head)


def load_stream_mtp(parts: Parts, block: str, embedding: Tensor) -> StreamMtpLayer:
    """Load the MTP module, whose block has a name."""
    config = parts.model.config
    input_norms = read_norm(parts, f"{block}.enorm.weight"), read_norm(parts, f"{block}.hnorm.weight")
    of_embedding, of_stream = read_projections(parts, block, "e_proj", "h_proj")
    to_head = _load_connection(parts, f"{block}.hc_head_", f"{block}.shared_head.norm.weight", is_head=True)
    projections, stream_block = (of_embedding, of_stream), _load_block(parts, block)
    sizes = config.hc_mult, config.rms_norm_eps
    return StreamMtpLayer(embedding, *input_norms, projections, stream_block, to_head, *sizes)


def _load_block(parts: Parts, name: str) -> StreamBlock:
    attention, layer = parts.attention(f"{name}.self_attn")
    experts = parts.mlp(f"{name}.mlp")
    assert isinstance(experts, MoE)
    connections = (
        _load_connection(parts, f"{name}.attn_hc.", f"{name}.input_layernorm.weight"),
        _load_connection(parts, f"{name}.ffn_hc.", f"{name}.post_attention_layernorm.weight"),
    )
    return StreamBlock(layer, attention, experts, connections, parts.reduce)


def _load_connection(parts: Parts, prefix: str, norm: str, is_head: bool = False) -> Connection:
    """Load a hyper-connection and the norm after it.

    Args:
        prefix: Prefix of the names of its fn, base and scale.
    """
    config, size = parts.model.config, parts.model.config.hidden_size
    num = config.hc_mult * (1 if is_head else 2 + config.hc_mult)
    shapes = {"fn": (num, config.hc_mult * size), "base": (num,), "scale": (1 if is_head else 3,)}
    projection, weight = (
        Projection(*(read_weight(parts.weights, prefix + name, shape) for name, shape in shapes.items())),
        read_weight(parts.weights, norm, (size,)),
    )
    constants = Constants(config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters)
    return Connection(projection, weight, constants).to(parts.placement.device)
