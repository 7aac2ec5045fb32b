"""Parameters of a model: their cuts over ranks and their bytes."""

import re
from dataclasses import dataclass, replace
from math import prod

from dcpmla.parallel.formats import BLOCK, FP8, GROUP, MXFP8, Format, cut

PARTS = ("attention", "mlp", "experts", "embedding", "head", "rest")
_NAMED = {
    **{"embed_tokens": "embedding", "engram.embed": "embedding", "lm_head": "head"},
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp"),
}
# Of DeepSeek-V4's one product of the hidden states: all but the query latent's part.
_JOINED = re.compile(
    r"\.self_attn\.(kv_proj|compressor\.(indexer\.)?(kv_proj|gate_proj|scorer\.weights_proj))\.weight$"
)


@dataclass(frozen=True)
class Parameter:
    """All parameters of one name, layer numbers replaced by *, and one shape.

    Attributes:
        count: Number of such parameters.
        style: Cut, "column" (outputs cut), "row" (inputs cut; a sum over the ranks follows) or "whole" (on every rank).
        itemsize: Bytes of an element that is not quantized.
        format: Format of the checkpoint where it has blocks or groups that the runtime can keep; else None.
        num_pieces: Equal parts of the cut dim, cut one by one: gate and up of experts, shared experts.
        least: Fewest outputs of a cut: of keys and values, those of a head, which several ranks may hold.
        in_blocks: True if cuts are moved to multiples of 128 where every rank gets some: MLPs and experts of a
            quantized model.
    """

    name: str
    shape: tuple[int, ...]
    count: int
    style: str
    itemsize: int
    format: Format | None = None
    num_pieces: int = 1
    in_blocks: bool = False
    least: int = 1

    @property
    def is_expert(self) -> bool:
        return ".experts." in self.name

    @property
    def is_matrix(self) -> bool:
        """True if hidden states or tokens are multiplied by it, or look it up."""
        return len(self.shape) > 1 and not self.name.endswith((".position_bias", ".tid2eid", ".conv1d.weight"))

    @property
    def is_shared_expert(self) -> bool:
        return ".shared_experts." in self.name

    @property
    def is_block_norm(self) -> bool:
        """True of the norms before attention and before an MLP."""
        return self.name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight"))

    @property
    def is_hyper_connection(self) -> bool:
        return self.name.endswith("_hc.fn")

    @property
    def is_joined(self) -> bool:
        """True if it is multiplied as a part of another one's product."""
        return _JOINED.search(self.name) is not None

    @property
    def part(self) -> str:
        """One of PARTS."""
        if ".self_attn." in self.name:
            return "attention"
        if self.is_expert or self.is_shared_expert:
            return "experts"
        return next((part for word, part in _NAMED.items() if f"{word}." in self.name), "rest")

    def widened(self) -> "Parameter":
        """Return the same without quantization."""
        return replace(self, format=None, in_blocks=False)

    def shard_shape(self, tensor_parallel_size: int, expert_parallel: bool = False) -> tuple[int, ...]:
        """Return the shape on the rank that has most of it."""
        shape = list(self.shape)
        if self.is_expert and expert_parallel:
            shape[0] //= tensor_parallel_size
        elif self._dim is not None:
            pieces = self._pieces(expert_parallel)
            shape[self._dim] = pieces * self._largest_cut(shape[self._dim] // pieces, tensor_parallel_size)
        return tuple(shape)

    def held_format(self, tensor_parallel_size: int, expert_parallel: bool = False) -> Format | None:
        """Return the format in which the ranks hold it: they cut it between blocks or groups (`read_linear`). The gate
        and up of an MLP, one above the other, must be whole blocks of fp8, and so must experts, which are stacked. None
        if it is not quantized.
        """
        if self.format is None:
            return None
        shape, pieces = self.shard_shape(tensor_parallel_size, expert_parallel), self._pieces(expert_parallel)
        rows, cols = shape[-2] // (pieces if self._dim == -2 else 1), shape[-1] // (pieces if self._dim == -1 else 1)
        if self.format == MXFP8:
            return self.format if cols % BLOCK == 0 else None  # each row has its own scales
        if self.format.is_packed:  # an expert's three matrices are held alike, and `down` has a column for each row
            is_whole = not (self.is_expert and rows % GROUP)
            return self.format.cut_at(cols, self.shape[-1]) if is_whole else None
        sizes = [cols]
        if self.is_expert or self.name.endswith(("gate_proj.weight", "up_proj.weight")):
            sizes.append(rows)
        if self._dim is not None and shape != self.shape:
            sizes += [shape[self._dim] // pieces, self.shape[self._dim] // pieces]
        return FP8 if all(size % BLOCK == 0 for size in sizes) else None

    def stays_quantized(self, tensor_parallel_size: int, expert_parallel: bool = False) -> bool:
        """Return whether the ranks hold codes."""
        return self.held_format(tensor_parallel_size, expert_parallel) is not None

    def is_cut_apart(self, tensor_parallel_size: int, expert_parallel: bool = False) -> bool:
        """Return whether the ranks hold it dequantized because the cut runs through its blocks or groups."""
        return self.stays_quantized(1) and not self.stays_quantized(tensor_parallel_size, expert_parallel)

    def is_packed(self, tensor_parallel_size: int, expert_parallel: bool = False) -> bool:
        """Return whether the ranks hold codes of 4 bits."""
        held = self.held_format(tensor_parallel_size, expert_parallel)
        return held is not None and held.is_packed

    def shard_bytes(self, tensor_parallel_size: int, expert_parallel: bool = False) -> int:
        """Return the bytes of one parameter on the rank that has most of it, scales included."""
        layout = tensor_parallel_size, expert_parallel
        shape, held = self.shard_shape(*layout), self.held_format(*layout)
        return prod(shape) * self.itemsize if held is None else held.num_bytes(shape)

    @property
    def _dim(self) -> int | None:
        """The dim that is cut."""
        if self.style == "whole" or (self.style == "row" and len(self.shape) == 1):
            return None
        return -2 if self.style == "column" and len(self.shape) > 1 else -1

    def _pieces(self, expert_parallel: bool) -> int:
        return 1 if expert_parallel and not self.is_expert else self.num_pieces  # shared experts are an MLP then

    def _largest_cut(self, size: int, tensor_parallel_size: int) -> int:
        """Return the last rank's part, the largest; of a head whose rows do not divide, all of it."""
        if self.part == "head" and size % tensor_parallel_size:
            return size
        last = cut(size, tensor_parallel_size - 1, tensor_parallel_size, self.in_blocks)
        return max(self.least, last.stop - last.start)
