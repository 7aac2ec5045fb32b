"""From a checkpoint of DeepSeek-V4 to its decoder and its MTP module."""

from typing import Any

from torch import Tensor

from dcpmla.integrations.decoder import read_norm, read_projections
from dcpmla.integrations.families.streams import load_connection, load_stream_block, load_streams
from dcpmla.integrations.parts import Parts
from dcpmla.model.mixing import Constants
from dcpmla.model.stream_decoder import StreamDecoder, StreamMtpLayer


def load_mixed_streams(parts: Parts, num_layers: int) -> StreamDecoder:
    """Load the decoder."""
    return load_streams(parts, num_layers, _constants(parts.model.config))


def load_stream_mtp(parts: Parts, block: str, embedding: Tensor) -> StreamMtpLayer:
    """Load the MTP module, whose block has a name."""
    config, constants = parts.model.config, _constants(parts.model.config)
    input_norms = read_norm(parts, f"{block}.enorm.weight"), read_norm(parts, f"{block}.hnorm.weight")
    of_embedding, of_stream = read_projections(parts, block, "e_proj", "h_proj")
    to_head = load_connection(parts, f"{block}.hc_head_", f"{block}.shared_head.norm.weight", constants, is_head=True)
    projections, stream_block = (of_embedding, of_stream), load_stream_block(parts, block, constants)
    sizes = config.hc_mult, config.rms_norm_eps
    return StreamMtpLayer(embedding, *input_norms, projections, stream_block, to_head, *sizes)


def _constants(config: Any) -> Constants:
    return Constants(config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters)
