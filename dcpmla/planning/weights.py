"""The sizes of a model: its parameters without weights, as ranks hold them."""

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from dcpmla.attention.stack import Stack
from dcpmla.fields import check_experts
from dcpmla.parallel.formats import BLOCK, FP4, FP8
from dcpmla.planning.parameter import PARTS, Parameter


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Sizes of a model, as predictions need them.

    Attributes:
        attention: Attention of the model.
        num_routed: Choices of a router, LongCat's zero experts included; 0 without experts.
        experts_per_token: Choices that a token takes.
        expert_dtype: Format "auto", or "fp8" for experts in 4 bits that are held in 8 (--expert-dtype).
    """

    attention: Stack
    max_position_embeddings: int
    num_routed: int
    experts_per_token: int
    parameters: tuple[Parameter, ...]
    expert_dtype: str = "auto"

    @property
    def num_parameters(self) -> int:
        """Number of values in all parameters; a value in 4 or 8 bits counts as one."""
        return sum(parameter.count * prod(parameter.shape) for parameter in self.parameters)

    @property
    def has_shortcut(self) -> bool:
        """True if experts' outputs are summed over the ranks with an MLP's (`model.block.ShortcutBlock`)."""
        return any(".mlps." in parameter.name for parameter in self.parameters)

    @property
    def is_stack(self) -> bool:
        """True if it is attention layers alone."""
        return all(parameter.part == "attention" for parameter in self.parameters)

    def weight_bytes(self, tensor_parallel_size: int, expert_parallel: bool = False) -> dict[str, int]:
        """Return the bytes of the fullest rank, by PARTS and in "total".

        Args:
            expert_parallel: Whether each rank has its share of the routed experts whole (--enable-expert-parallel).
        Raises:
            ValueError: Heads or experts that the runtime cannot divide so.
        """
        self.attention.config.heads_per_rank(tensor_parallel_size)
        self._check_experts(tensor_parallel_size, expert_parallel)
        parts = dict.fromkeys(PARTS, 0)
        for parameter in self.parameters:
            num_bytes = parameter.shard_bytes(tensor_parallel_size, expert_parallel)
            parts[parameter.part] += parameter.count * num_bytes
        return {"total": sum(parts.values()), **parts}

    def cuts_blocks(self, tensor_parallel_size: int, expert_parallel: bool = False) -> bool:
        """Return whether a cut runs through blocks of quantized weights, which the ranks then hold dequantized."""
        return any(parameter.is_cut_apart(tensor_parallel_size, expert_parallel) for parameter in self.parameters)

    def _check_experts(self, tensor_parallel_size: int, expert_parallel: bool) -> None:
        for parameter in self.parameters:
            if parameter.is_expert and parameter.style == "row":
                num_experts, _, size = parameter.shape
                check_experts(num_experts, size, tensor_parallel_size, expert_parallel)
            is_whole = parameter.stays_quantized(tensor_parallel_size, expert_parallel)
            if self.expert_dtype == "fp8" and parameter.is_expert and not is_whole:
                raise ValueError(
                    f"expert_dtype (--expert-dtype) is 'fp8', but with tensor_parallel_size (-tp) "
                    f"{tensor_parallel_size} a rank's experts are not whole blocks of {BLOCK} x {BLOCK}; choose auto"
                )

    def with_expert_dtype(self, expert_dtype: str) -> "ModelSize":
        """Return the model as it is loaded with --expert-dtype: "auto", as stored, or "fp8", experts in e2m1 in 8 bits.

        Raises:
            ValueError: The dtype fp8 for experts that are not stored in e2m1.
        """
        if expert_dtype == "auto":
            return self
        experts = [parameter for parameter in self.parameters if parameter.is_expert]
        if not experts or any(expert.format != FP4 for expert in experts):
            raise ValueError(
                f"expert_dtype (--expert-dtype) is {expert_dtype!r}, but the model's experts are not in e2m1; "
                f"choose auto"
            )
        parameters = (replace(each, format=FP8) if each.is_expert else each for each in self.parameters)
        return replace(self, parameters=tuple(parameters), expert_dtype=expert_dtype)

    def widened(self) -> "ModelSize":
        """Return the model without quantization."""
        return replace(self, parameters=tuple(parameter.widened() for parameter in self.parameters))

    @cached_property
    def attention_stack(self) -> "ModelSize | None":
        """Its attention layers alone, as `MLAAttention` holds them; of sparse MLA without indexers, as benchmarks of
        layers have it. None without layers of MLA.
        """
        attention = self.attention.dense_stack()
        if attention is None:
            return None
        layers = (each for each in self.parameters if each.part == "attention" and ".indexer." not in each.name)
        return replace(self, attention=attention, parameters=tuple(layer.widened() for layer in layers))
