"""The deterministic mode of a model's modules: a token's rows depend on no other token of the step."""

from torch import nn

from dcpmla.attention.mla.weights import AttentionWeights
from dcpmla.model.block import Decoder, DecoderBlock, ShortcutBlock, VocabHead
from dcpmla.model.eagle3 import Eagle3Layer
from dcpmla.model.mlp import MLP
from dcpmla.model.moe import Gate, MoE
from dcpmla.model.mtp import MtpLayer
from dcpmla.parallel.formats import Quantized, is_block_fp8, is_packed
from dcpmla.parallel.linear import Linear, RowParallelLinear

# Modules that only look rows up, or norm rows by kernels of one row per program; and attention, whose kind has a check.
_APART = (
    *(nn.ParameterList, nn.RMSNorm, Decoder, DecoderBlock, ShortcutBlock, VocabHead, MtpLayer, Eagle3Layer),
    AttentionWeights,
)


def make_deterministic(model: nn.Module) -> None:
    """Set `is_deterministic` of all modules that multiply or choose.

    Raises:
        ValueError: A module has no such mode, or its weights have scales for groups of inputs.
    """
    for name, module in model.named_modules():
        kind = type(module)
        if kind in (Linear, RowParallelLinear, Gate, MLP, MoE):
            _check_weights(name, module)
            module.is_deterministic = True
        elif not isinstance(module, _APART) and next(module.parameters(recurse=False), None) is not None:
            raise ValueError(f"deterministic (--deterministic) does not support {kind.__name__} ({name}); leave it out")


def _check_weights(name: str, module: nn.Module) -> None:
    has_groups = isinstance(module, MoE) and is_packed(module.experts.gate_up)
    if isinstance(module, Linear) and module.weight_scale is not None:
        has_groups = not is_block_fp8(Quantized(module.weight, module.weight_scale))
    if has_groups:
        raise ValueError(
            f"deterministic (--deterministic) does not support weights with scales for groups of inputs ({name}); "
            f"leave it out, or choose a checkpoint in bfloat16 or in fp8 with blocks of 128 x 128"
        )
