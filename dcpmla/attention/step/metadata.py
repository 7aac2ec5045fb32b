"""Attention metadata of a step, one pass of a batch. It is built once from numbers on the host
(`attention/step/build.py`), then passed to every layer as an argument.

A batch is flat: first tokens that attend with absorbed queries (decodes), then tokens that attend by MHA (prefills).
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from dcpmla.attention.backends.calls import Segments
from dcpmla.attention.step.chunks import PrefillMetadata
from dcpmla.attention.step.table import StepLayout, StepRequests, StepTable, StepTokens
from dcpmla.config import DCPConfig, MLAConfig

PART_ROWS = 1 << 16  # Maximum query rows of a part. With DeepSeek's widths they take 75 MB.


def part_tokens(num_heads: int, dcp: DCPConfig) -> int:
    """Return the maximum tokens of a part, with num_heads heads in a DCP group, each with rows for each own class."""
    return max(1, PART_ROWS // (num_heads * (dcp.num_own_classes or 1)))


@dataclass(frozen=True)
class DecodeMetadata:
    """Decodes, the requests that attend with absorbed queries: generated tokens, drafts, and pieces of prompts for
    which `attention/costs.py` chose absorbed queries.

    A request with more than max_query_len new tokens is cut into segments of at most max_query_len. Kernels treat a
    segment as a request, and so spread a long request over the GPU; all segments of a request use the same row of the
    block table. A request that is not cut is one segment.

    Attributes:
        block_table: Block ids of each request [num_decodes, max_blocks], int32.
        local_seq_lens: Number of this rank's tokens that each new token sees [num_decode_tokens], int32: of the tokens
            of its request up to and including the new token (`Owner.local_seq_lens`).
        queries: Rows of each segment among the new tokens; None when all segments have max_query_len tokens.
        max_query_len: Maximum tokens of a segment.
        workspace: Memory of kernels that split a segment over programs (`decode_workspace`); None if no kernel does.
        request_index: Row of block_table of each segment [num_segments], int32; None when no request is cut.
    """

    block_table: Tensor
    local_seq_lens: Tensor
    queries: Segments | None
    max_query_len: int
    workspace: Tensor | None
    request_index: Tensor | None = None

    @property
    def query_start_loc(self) -> Tensor | None:
        """Return the first row of each segment, and the end [num_segments + 1] int32; None if `queries` is None."""
        return None if self.queries is None else self.queries.start_loc

    def parts(self, max_tokens: int) -> Iterator[tuple[slice, "DecodeMetadata"]]:
        """Yield the rows and metadata of parts. A part has at most max_tokens tokens, or one longer segment.

        Each part gathers and combines on its own. All ranks yield the same parts: local lengths have no influence.
        Raises:
            ValueError: There are several parts, but `queries` has no start of each segment for the host.
        """
        num_tokens = len(self.local_seq_lens)
        if num_tokens <= max_tokens:
            yield slice(0, num_tokens), self
            return
        starts = range(0, num_tokens + 1, self.max_query_len) if self.queries is None else self.queries.start
        if self.queries is not None and len(starts) != len(self.queries.start_loc):
            raise ValueError(f"max_tokens is {max_tokens}; a CUDA graph's step of {num_tokens} tokens must be one part")
        first = 0
        while first < len(starts) - 1:
            last = max(first + 1, bisect_right(starts, starts[first] + max_tokens) - 1)
            yield slice(starts[first], starts[last]), self._part(first, last, slice(starts[first], starts[last]))
            first = last

    def _part(self, first: int, last: int, tokens: slice) -> "DecodeMetadata":
        """Return the part of segments [first, last), which have these tokens."""
        table, index, queries, lens = self.block_table, self.request_index, self.queries, self.local_seq_lens[tokens]
        if queries is not None:
            start = tuple(at - tokens.start for at in queries.start[first : last + 1])
            queries = Segments(start, queries.start_loc[first : last + 1] - tokens.start)
        # Slices are copied, because they may begin between multiples of 16 bytes: Triton would compile another kernel.
        if index is None:
            table = table[first:last].clone()
        else:
            index = index[first:last].clone()
        return replace(self, block_table=table, local_seq_lens=lens.clone(), queries=queries, request_index=index)


# Function that interrupts a capture: defer(work, arguments) keeps both, and each replay calls work(*arguments, step).
Defer = Callable[[Callable[..., None], tuple[Any, ...]], None]
Shared = TypeVar("Shared")


@dataclass(frozen=True)
class StepMetadata:
    """One pass over a batch, as all layers see it. Rows past num_tokens in a layer's input are padding.

    Attributes:
        layout: Where the tokens are in the caches of this rank.
        table, tokens: Numbers of the step's requests and tokens, on the device.
        num_tokens, num_decode_tokens: Number of real tokens, and of decode tokens, which come first.
        num_decodes: Number of requests that attend with absorbed queries, the first ones.
        num_blocks: Largest block id of the step, plus 1: the cache must have at least as many blocks.
        max_seq_len: Upper bound of tokens.seq_lens, the same on all ranks.
        decode: Metadata of decodes; None without any, or if a graph has already computed their attention.
        prefill: Metadata of prefills; None without any, or where layers have no latent cache.
        requests: Requests on the host; None in a graph.
        cos_sin: Cosines and sines of RoPE (`apply_rope`) [num_tokens, R], float32, which the model adds
            (`Stack.prepare`); None for a model without positions (NoPE).
        query_factor: Factor of queries [num_tokens] in the model's dtype (`projections.query_factor`), or ln(p + 1)
            where each head has a factor of its own; None without either.
        shared: What layers of one kind share in this step, by its class (`get`).
        derived: Numbers that were derived from the step once (`derive`), by their class.
        defer: Function that interrupts the capture of a graph for work of a layer (`run_outside_graph`); None outside
            of captures.
    """

    layout: StepLayout
    table: StepTable
    tokens: StepTokens
    num_tokens: int
    num_decode_tokens: int
    num_decodes: int
    num_blocks: int
    max_seq_len: int
    decode: DecodeMetadata | None = None
    prefill: PrefillMetadata | None = None
    requests: StepRequests | None = None
    cos_sin: Tensor | None = None
    query_factor: Tensor | None = None
    shared: Mapping[type, Any] = field(default_factory=dict)
    derived: dict[type, Any] = field(default_factory=dict)
    defer: Defer | None = None

    def run_outside_graph(self, work: Callable[..., None], *arguments: Any) -> None:
        """Run the work of a layer that depends on the step's requests: work(*arguments, step).

        While a graph that serves many steps is captured, the work is kept instead (`defer`). Each replay runs it with
        the replay's step, between two graphs.
        """
        if self.defer is None:
            work(*arguments, self)
        else:
            self.defer(work, arguments)

    def compute_ahead(self, work: Callable[..., Shared], *arguments: Any) -> Shared | None:
        """Return work(*arguments, step) while a graph is captured: the graph then contains what has the same shapes in
        each replay, for the work that runs outside of it. None elsewhere.
        """
        return None if self.defer is None else work(*arguments, self)

    @property
    def shares_rows(self) -> bool:
        """Return whether only the device knows which tokens are decodes and which are prefills."""
        return self.prefill is not None and len(self.prefill.queries.start) == 0

    def get(self, kind: type[Shared]) -> Shared | None:
        """Return what layers share under a class; None if the step has none."""
        return self.shared.get(kind)

    def sharing(self, value: object) -> "StepMetadata":
        """Return the step with what layers share under the value's class added or replaced."""
        return replace(self, shared={**self.shared, type(value): value})

    def derive(self, kind: type, make: Callable[["StepMetadata"], Shared]) -> Shared:
        """Return make(step). The result is kept, so an MTP module's pass over the same step reuses it."""
        if kind not in self.derived:
            self.derived[kind] = make(self)
        value: Shared = self.derived[kind]
        return value

    def with_cos_sin(self, cos_sin: Tensor | None, query_factor: Tensor | None = None) -> "StepMetadata":
        """Return the step with the cosines and sines of its tokens, and their query factor if the model has one."""
        return replace(self, cos_sin=cos_sin, query_factor=query_factor)

    def nth_token(self, index: int) -> "StepMetadata":
        """Return a step of token number `index` of each request, for drafts. All requests are equally long decodes."""
        decode = self.decode
        assert decode is not None
        assert decode.queries is None is decode.request_index
        # `contiguous` would return a view of one element as it is, but kernels require the stride 1.
        tokens = self.tokens.map(
            lambda column: column[index :: decode.max_query_len].clone(memory_format=torch.contiguous_format)
        )
        num_reqs = len(tokens.positions)
        return StepMetadata(
            layout=self.layout,
            table=self.table.nth_token(index),
            tokens=tokens,
            num_tokens=num_reqs,
            num_decode_tokens=num_reqs,
            num_decodes=num_reqs,
            num_blocks=self.num_blocks,
            max_seq_len=self.max_seq_len,
            decode=DecodeMetadata(decode.block_table, tokens.local_seq_lens, None, 1, decode.workspace),
        )

    def check(self, config: MLAConfig, hidden_states: Tensor) -> None:
        """Raise ValueError for inputs that do not match the step, or a cos_sin or query_factor not as in the model."""
        shape, device = tuple(hidden_states.shape), hidden_states.device
        if len(shape) != 2 or shape[1] != config.hidden_size or shape[0] < self.num_tokens:
            raise ValueError(
                f"hidden_states has shape {shape}; expected [at least {self.num_tokens}, {config.hidden_size}]"
            )
        expected = torch.float32, (self.num_tokens, config.qk_rope_head_dim), device
        if _described(self.cos_sin) != (expected if config.use_rope else None):
            added = f"{expected} (dtype, shape, device), which StepMetadata.with_cos_sin adds"
            needed = added if config.use_rope else "None, because the model has no positions"
            raise ValueError(f"step.cos_sin is {_described(self.cos_sin)}; expected {needed}")
        is_scaled = config.llama_4_scaling is not None or config.has_query_factors
        scaled = (hidden_states.dtype, (self.num_tokens,), device) if is_scaled else None
        if _described(self.query_factor) != scaled:
            raise ValueError(
                f"step.query_factor is {_described(self.query_factor)}; expected {scaled}, because "
                f"config.llama_4_scaling is {config.llama_4_scaling} and has_query_factors {config.has_query_factors}"
            )

    def check_blocks(self, num_blocks: int) -> None:
        """Raise ValueError if block ids exceed a cache of num_blocks blocks."""
        if self.num_blocks > num_blocks:
            raise ValueError(
                f"block_tables has block {self.num_blocks - 1}; the cache has {num_blocks} blocks, numbered from 0"
            )


def begin_attention(loads: list[torch.cuda.Event] | None, starts: list[torch.cuda.Event] | None) -> None:
    """Wait for copies into a layer's cache, and record that its attention begins: the layers before it have written
    theirs (`cache.latent.LayerCache`).
    """
    while loads:
        loads.pop().wait()
    while starts:
        starts.pop().record()


def _described(tensor: Tensor | None) -> tuple[torch.dtype, tuple[int, ...], torch.device] | None:
    return None if tensor is None else (tensor.dtype, tuple(tensor.shape), tensor.device)
