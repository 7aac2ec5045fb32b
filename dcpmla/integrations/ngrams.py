"""From a config with engram fields and a checkpoint to memories of n-grams: sizes, hash functions, tables."""

import math
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from tokenizers import Regex, normalizers
from torch import Tensor, nn

from dcpmla.fields import Size, check_fields, list_of, rules_of, whole
from dcpmla.integrations.parts import Parts
from dcpmla.integrations.tokenizer import load_tokenizer
from dcpmla.model.buckets import Buckets
from dcpmla.model.memory import NgramMemory
from dcpmla.model.ngrams import NgramHash
from dcpmla.model.stream_decoder import StreamBlock, StreamDecoder
from dcpmla.parallel.formats import Quantized, cut
from dcpmla.parallel.linear import read_linear
from dcpmla.parallel.mesh import DCPMesh
from dcpmla.parallel.quantized import unpack

_LARGEST_TABLE = (1 << 31) - 1  # rows, whose numbers are int32
_PART_ROWS = 1 << 20  # rows of a table that are read at a time
_SEED = 10007  # times a layer's number is the seed of the layer's multipliers
# A token that is one space has this private letter as its text until spaces are stripped.
_LONE_SPACE = "\ue000"
_SPELLINGS = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
    ]
)


class NgramSizes(NamedTuple):
    """The sizes of a model's memories: the fields of its config after engram_.

    Attributes:
        layer_ids: Numbers of the layers with a memory.
        num_embeddings: Rows of each layer's table.
        max_ngram_size: Tokens of the longest n-grams; the shortest have two.
        n_heads: Number of hashes of each n-gram.
        head_dim: Columns of a table.
        vocab_size: Lower bound of a bucket's rows.
        compressed_vocab_size: Number of compressed ids.
        pad_token_id: Token in place of tokens before a sequence's first.
    """

    layer_ids: Annotated[list[int], list_of(whole(0, 1023))]
    num_embeddings: Annotated[list[int], list_of(whole(1, _LARGEST_TABLE))]
    max_ngram_size: Annotated[int, whole(2, 16)]
    n_heads: Annotated[int, whole(1, 256)]
    head_dim: Size
    vocab_size: Annotated[int, whole(2, _LARGEST_TABLE)]
    compressed_vocab_size: Size
    pad_token_id: Annotated[int, whole(0)]

    @classmethod
    def of(cls, config: Any) -> "NgramSizes":
        """Return the sizes of a transformers config.

        Raises:
            ValueError: A field is out of its range, or fields do not belong together.
        """
        label = "engram_{}".format
        values: dict[str, Any] = {name: getattr(config, label(name), None) for name in cls._fields}
        if missing := [name for name, value in values.items() if value is None]:
            needed = ", ".join(map(label, cls._fields))
            raise ValueError(f"{label(missing[0])} is missing; layers in engram_layer_ids need {needed}")
        check_fields(rules_of(NgramSizes), values, label)
        sizes = cls(**values)
        layers, num_rows = sizes.layer_ids, sizes.num_embeddings
        if len(layers) != len(num_rows) or len(set(layers)) != len(layers):
            raise ValueError(
                f"engram_layer_ids is {layers} and engram_num_embeddings {num_rows}; each layer must have one table"
            )
        if max(layers, default=0) >= config.num_hidden_layers:
            raise ValueError(f"engram_layer_ids is {layers}; the model has layers 0 to {config.num_hidden_layers - 1}")
        if sizes.pad_token_id >= config.vocab_size:
            raise ValueError(
                f"engram_pad_token_id is {sizes.pad_token_id}; it must be one of the {config.vocab_size} tokens "
                "(vocab_size)"
            )
        for layer, rows, primes in zip(layers, num_rows, sizes.primes(), strict=True):
            if sum(primes) > rows:
                raise ValueError(
                    f"engram_num_embeddings has {rows} rows for layer {layer}; the buckets of at least "
                    f"engram_vocab_size {sizes.vocab_size} rows need {sum(primes)}"
                )
        return sizes

    @property
    def num_columns(self) -> int:
        """Return the number of hashes of a token in each layer."""
        return (self.max_ngram_size - 1) * self.n_heads

    def columns(self, mesh: DCPMesh) -> range:
        """Return the hashes whose buckets a rank holds.

        Raises:
            ValueError: There are more ranks than hashes.
        """
        if mesh.tp_size > self.num_columns:
            raise ValueError(
                f"tensor_parallel_size (-tp) is {mesh.tp_size}; the {self.num_columns} buckets of a memory's table "
                f"(engram_n_heads, engram_max_ngram_size) are spread over at most as many ranks"
            )
        part = cut(self.num_columns, mesh.tp_rank, mesh.tp_size)
        return range(part.start, part.stop)

    def primes(self) -> list[list[int]]:
        """Return the rows of each layer's buckets: primes, none twice in the model, ascending for each length."""
        used: set[int] = set()
        layers = []
        for _ in self.layer_ids:
            sizes: list[int] = []
            for _ in range(self.max_ngram_size - 1):
                following = _primes_from(self.vocab_size)
                fresh = (prime for prime in following if prime not in used)
                sizes += [next(fresh) for _ in range(self.n_heads)]
                used.update(sizes)
            layers.append(sizes)
        return layers

    def multipliers(self) -> np.ndarray:
        """Return the factors of ids, by layer and distance, int64: odd, and so small that products do not overflow."""
        bound = max(1, np.iinfo(np.int64).max // self.compressed_vocab_size // 2)
        drawn = [
            np.random.default_rng(_SEED * layer).integers(0, bound, self.max_ngram_size) for layer in self.layer_ids
        ]
        return 2 * np.stack(drawn) + 1


def add_memories(model: Any, sizes: NgramSizes) -> None:
    """Add the weights of memories to transformers' model, which is on the meta device."""
    config = model.config
    for layer, num_rows in zip(sizes.layer_ids, sizes.num_embeddings, strict=True):
        engram = model.model.layers[layer].engram = nn.Module()
        engram.embed = nn.Embedding(num_rows, sizes.head_dim)
        num_outputs = (config.hc_mult + 1) * config.hidden_size
        engram.kv_proj = nn.Linear(sizes.num_columns * sizes.head_dim, num_outputs, bias=False)
        for name in ("q_weight", "k_weight"):
            setattr(engram, name, nn.Parameter(torch.empty(config.hc_mult, config.hidden_size)))


def load_memories(parts: Parts, decoder: StreamDecoder) -> None:
    """Load the memories of a decoder's blocks, and their hashes."""
    sizes = NgramSizes.of(parts.model.config)
    decoder.ngrams = load_hash(parts, sizes)
    for number, layer in enumerate(sizes.layer_ids):
        block = decoder.blocks[layer]
        assert isinstance(block, StreamBlock)
        block.memory = load_memory(parts, f"model.layers.{layer}.engram", number, sizes)


def load_hash(parts: Parts, sizes: NgramSizes) -> NgramHash:
    """Return the hashes of a rank's columns. Tokens past the tokenizer's count as the pad token.

    Raises:
        ValueError: There is no tokenizer, or it does not make as many compressed ids as the config says.
    """
    directory, vocab_size, placement = parts.directory, parts.model.config.vocab_size, parts.placement
    ids = _compress_vocabulary(directory)
    if max(ids) + 1 != sizes.compressed_vocab_size:
        raise ValueError(
            f"engram_compressed_vocab_size is {sizes.compressed_vocab_size}; the tokenizer in {directory} makes "
            f"{max(ids) + 1}, and all hashes of n-grams depend on this number"
        )
    if sizes.pad_token_id >= len(ids):
        raise ValueError(
            f"engram_pad_token_id is {sizes.pad_token_id}; the tokenizer in {directory} has {len(ids)} tokens"
        )
    pad_id = ids[sizes.pad_token_id]
    token_map = torch.full((vocab_size,), pad_id, dtype=torch.int32)
    token_map[: len(ids)] = torch.tensor(ids[:vocab_size], dtype=torch.int32)
    columns = list(sizes.columns(placement.mesh))
    primes = torch.tensor(sizes.primes())[:, columns]
    buckets = Buckets(
        torch.from_numpy(sizes.multipliers()),
        torch.tensor(columns) // sizes.n_heads + 2,
        primes,
        primes.cumsum(1) - primes,
    )
    return NgramHash(token_map, pad_id, buckets).to(placement.device)


def _compress_vocabulary(directory: Path) -> list[int]:
    """Return the compressed id of each token of a tokenizer: ids in order of first use, one for all tokens whose texts
    are alike without case, accents and space around them.
    """
    tokenizer, reason = load_tokenizer(directory)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        reason = reason or f"{type(tokenizer).__name__} is not one of the tokenizers library"
        raise ValueError(f"model (--model): {directory} has no tokenizer for its hashes of n-grams: {reason}")
    ids: dict[str, int] = {}
    return [ids.setdefault(_spelling(backend, token), len(ids)) for token in range(len(tokenizer))]


def _spelling(backend: Any, token: int) -> str:
    """Return the text that tokens of one compressed id share; for a part of a character the token's own name."""
    text: str = backend.decode([token], skip_special_tokens=False)
    if "\ufffd" in text:
        return str(backend.id_to_token(token))
    alike = _SPELLINGS.normalize_str(text)
    alike = _LONE_SPACE if alike == " " else alike
    # Training took a letter for the lone space, too, so a text with this letter has a space instead.
    return normalizers.Strip().normalize_str(alike).replace(_LONE_SPACE, " ") or text


def load_memory(parts: Parts, name: str, number: int, sizes: NgramSizes) -> NgramMemory:
    """Load a rank's part of a layer's memory.

    Args:
        name: Prefix of the names of its tensors, without the last dot.
        number: Index of the layer among the layers with a memory.
    Raises:
        ValueError: A tensor is missing, or has another shape or dtype.
    """
    columns = sizes.columns(parts.placement.mesh)
    starts = list(accumulate(sizes.primes()[number], initial=0))
    rows = slice(starts[columns.start], starts[columns.stop])
    table = _load_table(parts, f"{name}.embed.weight", rows)
    part = slice(columns.start * sizes.head_dim, columns.stop * sizes.head_dim)
    projection = parts.linear(f"{name}.kv_proj.weight", cols=part)
    of_queries, of_keys = (parts.values(f"{name}.{which}_weight").float() for which in "qk")
    weight = (of_queries * of_keys).to(parts.placement.device)
    return NgramMemory(number, table, projection, weight, parts.eps, parts.reduce)


def _load_table(parts: Parts, name: str, rows: slice) -> Tensor | Quantized:
    """Read rows of a table, some at a time: a table may be larger than a host's memory."""
    num_rows, width = parts.shapes[name]
    whole_table: list[Tensor] = []
    kind: type = Tensor
    for first in range(rows.start, rows.stop, _PART_ROWS):
        end = min(first + _PART_ROWS, rows.stop)
        part = read_linear(parts.weights, name, (num_rows, width), slice(first, end))
        if isinstance(part, Tensor):
            part = part.to(parts.placement.dtype)
        tensors = [tensor for tensor in unpack(part) if tensor is not None]
        if not whole_table:
            kind, shapes = type(part), [(rows.stop - rows.start, tensor.shape[1]) for tensor in tensors]
            device = parts.placement.device
            whole_table = [
                tensor.new_empty(shape, device=device) for tensor, shape in zip(tensors, shapes, strict=True)
            ]
        for target, tensor in zip(whole_table, tensors, strict=True):
            target[first - rows.start : end - rows.start].copy_(tensor)
    return Quantized(*whole_table) if kind is Quantized else whole_table[0]


def _primes_from(low: int) -> Iterator[int]:
    """Yield the primes from a number on."""
    number = max(low, 2)
    while True:
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            yield number
        number += 1
