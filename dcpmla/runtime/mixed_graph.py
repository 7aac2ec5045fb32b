"""Steps with pieces of prompts as CUDA graphs, padded to numbers of tokens (`MixedGraph`)."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dcpmla.attention.build import GraphRows, PieceColumns, StepBuilder
from dcpmla.attention.calls import Segments, decode_workspace
from dcpmla.attention.step import Cut, DecodeMetadata, StepMetadata, StepRequests
from dcpmla.cache.plan import Cache
from dcpmla.fields import check_fields, whole
from dcpmla.parallel.mesh import DCPMesh
from dcpmla.runtime.capture import GraphSet, Track
from dcpmla.upload import upload

MAX_ABSORBED_TOKENS = 512  # tokens of the largest step that is one graph; a longer one gains nothing from it
_MAX_TOKENS = 8192  # tokens of the largest step in graphs; the GPU takes longer for a larger one than the host


class MixedSize(NamedTuple):
    """A size that steps are padded to.

    Attributes:
        num_tokens: Number of tokens.
        is_absorbed: Whether all pieces attend with absorbed queries, so that the step is one graph.
    """

    num_tokens: int
    is_absorbed: bool

    def __str__(self) -> str:
        return f"{self.num_tokens} tokens{', all absorbed' if self.is_absorbed else ''}"


class MixedModel(Protocol):
    """A model whose steps are captured; `dcpmla.integrations.sharded_model.ShardedModel` is one."""

    device: torch.device

    def hidden(self, token_ids: Tensor, metadata: StepMetadata, cache: Cache) -> Tensor: ...

    def prepare(self, metadata: StepMetadata) -> StepMetadata: ...


class MixedGraph:
    """Steps with pieces of prompts, up to the last hidden states, as CUDA graphs in one memory pool.

    A step whose pieces all attend with absorbed queries is one graph: its kernels read all lengths on the GPU. In other
    steps, attention is left out: graphs compute the rest of each layer for all tokens, and between two graphs attention
    is launched with the step's own numbers. Tokens of padding write nothing to the cache and attend to nothing.

    Args:
        model: Model of the steps.
        cache: Cache that steps read and write; its tensors must keep their addresses.
        steps: Builder of steps over the cache.
        mesh: Groups of this rank.
        max_num_tokens: Limit of a step's tokens.
        max_num_seqs: Limit of a step's requests.
        max_model_len: Longest sequence, which bounds the block table.
        tokens_per_request: Width of the pieces that absorbed attention cuts requests into.
    Raises:
        ValueError: A limit is below 1.

    Attributes:
        sizes: Sizes of graphs, ascending.
        max_absorbed_tokens: Tokens of the largest step that is one graph; 0 if there is none.
    """

    def __init__(
        self,
        model: MixedModel,
        cache: Cache,
        steps: StepBuilder,
        mesh: DCPMesh,
        max_num_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        tokens_per_request: int,
    ) -> None:
        limits = {"max_num_tokens": max_num_tokens, "max_num_seqs": max_num_seqs, "max_model_len": max_model_len}
        check_fields(dict.fromkeys(limits, whole(1)), limits)
        self._model, self._cache, self._steps, self._width = model, cache, steps, tokens_per_request
        self._max_num_seqs, self._max_model_len = max_num_seqs, max_model_len
        absorbed = absorbed_sizes(max_num_tokens) if steps.absorbs_pieces else []
        self.max_absorbed_tokens = max(absorbed, default=0)
        self._tokens = {True: absorbed, False: token_sizes(max_num_tokens)}
        self.sizes = sorted(MixedSize(size, kind) for kind, sizes in self._tokens.items() for size in sizes)
        self._graphs = GraphSet(self._compute, "graph", mesh, model.device)
        largest = max(size.num_tokens for size in self.sizes)
        self._token_ids = torch.zeros(largest, dtype=torch.int64, device=model.device)
        self._workspace = decode_workspace(model.device)
        self._columns = self._empty_columns(largest)
        self._out: Tensor | None = None

    @property
    def is_captured(self) -> bool:
        """Return whether `run` replays."""
        return self._graphs.is_captured

    @property
    def num_sizes(self) -> int:
        """Return the number of sizes."""
        return len(self.sizes)

    def size(self, num_tokens: int, num_reqs: int, is_absorbed: bool) -> MixedSize | None:
        """Return the size that a step is padded to; None if it is too large."""
        return find_size(self._tokens, num_tokens, is_absorbed) if num_reqs <= self._max_num_seqs else None

    @torch.inference_mode()
    def run_absorbed(self, size: MixedSize, token_ids: Tensor, requests: StepRequests) -> tuple[Tensor, StepMetadata]:
        """Run a step whose pieces all attend with absorbed queries. Collective over the TP group.

        Args:
            token_ids: Tokens of the step [n], int64, on the device or the CPU.
        Returns:
            The hidden states [n, width] and the padded step's metadata, in static memory: valid until the next run.
        Raises:
            ValueError: The requests are invalid, or have more tokens than the size.
        """
        columns = self._steps.piece_columns(requests, self._width, size.num_tokens, self._num_pieces(size.num_tokens))
        arrays = [*columns] if token_ids.is_cuda else [*columns, token_ids.numpy()]
        uploaded = upload(arrays, self._model.device)
        for static, column in zip(self._columns, uploaded, strict=False):
            static[tuple(map(slice, column.shape))].copy_(column)
        self._set_tokens(size, token_ids if token_ids.is_cuda else uploaded[-1])
        self._graphs.run(size)
        assert self._out is not None
        return self._out[: len(token_ids)], self._metadata(size)

    @torch.inference_mode()
    def run(self, size: MixedSize, token_ids: Tensor, step: StepMetadata) -> Tensor:
        """Run a step whose attention is launched between graphs. Collective over the TP group.

        Args:
            token_ids: Tokens of the step [n], int64 on the device.
            step: Metadata of the step, without what its layers share.
        Returns:
            The hidden states [n, width] in static memory, valid until the next run.
        """
        num_tokens = step.num_tokens
        for static, column, fill in ((0, step.positions, 0), (1, step.slot_mapping, -1)):
            memory = self._columns[static]
            memory[:num_tokens].copy_(column)
            memory[num_tokens : size.num_tokens].fill_(fill)
        self._set_tokens(size, token_ids)
        self._graphs.run(size, self._model.prepare(step))
        assert self._out is not None
        return self._out[:num_tokens]

    def capture(self, num_sizes: int | None = None, track: Track = iter) -> None:
        """Capture the graphs, the largest first. Collective over the TP group.

        Args:
            num_sizes: Number of sizes to capture, the largest ones; None for all.
            track: Function that yields the sizes and shows the progress (`GraphSet.capture`).
        Raises:
            CannotCapture: A step cannot be captured on some rank.
            RuntimeError: A step fails, or breaks a capture off (`GraphSet.capture`).
        """
        for column, fill in zip(self._columns, PieceColumns(0, -1, 0, 0, 0, 0, 0, 0), strict=True):
            column.fill_(fill)
        self._graphs.capture(self.sizes[::-1][:num_sizes], track)

    def release(self) -> None:
        """Free the graphs (`GraphSet.release`)."""
        self._graphs.release()

    def _num_pieces(self, num_tokens: int) -> int:
        """Return the most cut pieces of a step, one of each request and of padding among them."""
        return min(num_tokens, self._max_num_seqs) + num_tokens // self._width + 1

    def _empty_columns(self, num_tokens: int) -> PieceColumns:
        """Return static memory for steps of all sizes."""
        plan, absorbed = self._cache.sizes, max(self._tokens[True], default=0)
        max_blocks = -(-self._max_model_len // plan.block_tokens)
        shapes = PieceColumns(
            (num_tokens,),
            (num_tokens,),
            (absorbed,),
            (absorbed,),
            (absorbed,),
            (self._num_pieces(absorbed) + 1,),
            (self._num_pieces(absorbed),),
            (min(absorbed, self._max_num_seqs), max_blocks),
        )
        dtypes = PieceColumns(torch.int64, torch.int64, *[torch.int32] * 6)
        return PieceColumns(
            *(
                torch.zeros(shape, dtype=dtype, device=self._model.device)
                for shape, dtype in zip(shapes, dtypes, strict=True)
            )
        )

    def _set_tokens(self, size: MixedSize, token_ids: Tensor) -> None:
        self._token_ids[: len(token_ids)].copy_(token_ids)
        self._token_ids[len(token_ids) : size.num_tokens].zero_()

    def _metadata(self, size: MixedSize, cut: Cut | None = None) -> StepMetadata:
        """Return the metadata of a size in static memory."""
        num_tokens, columns = size.num_tokens, self._columns
        positions, slot_mapping = columns.positions[:num_tokens], columns.slot_mapping[:num_tokens]
        if not size.is_absorbed:
            return StepMetadata(num_tokens, 0, 0, positions, slot_mapping, None, cut=cut)
        local_seq_lens, num_pieces = columns.local_seq_lens[:num_tokens], self._num_pieces(num_tokens)
        decode = DecodeMetadata(
            block_table=columns.block_table[: min(num_tokens, self._max_num_seqs)],
            local_seq_lens=local_seq_lens,
            queries=Segments((0, num_tokens), columns.start_loc[: num_pieces + 1]),
            max_query_len=self._width,
            workspace=self._workspace,
            request_index=columns.request_index[:num_pieces],
        )
        step = StepMetadata(num_tokens, num_tokens, 0, positions, slot_mapping, decode)
        rows = GraphRows(
            query_len=0,
            max_seq_len=self._max_model_len,
            block_table=columns.block_table,
            states=columns.request[:0],
            request=columns.request[:num_tokens],
            positions=positions,
            seq_lens=columns.seq_lens[:num_tokens],
            local_seq_lens=local_seq_lens,
        )
        return self._steps.share_graph(step, rows)

    @torch.inference_mode()
    def _compute(self, size: MixedSize, cut: Cut | None) -> None:
        num_tokens = size.num_tokens
        out = self._model.hidden(self._token_ids[:num_tokens], self._metadata(size, cut), self._cache)
        if self._out is None:
            most = len(self._token_ids)
            with torch.inference_mode(False):  # the caller may use it outside of inference mode
                self._out = torch.empty(most, *out.shape[1:], dtype=out.dtype, device=out.device)
        self._out[:num_tokens].copy_(out)


def find_size(sizes: Mapping[bool, Sequence[int]], num_tokens: int, is_absorbed: bool) -> MixedSize | None:
    """Return the size that a step is padded to; None if it is too large.

    Args:
        sizes: Numbers of tokens, ascending: of steps whose pieces are all absorbed (True), and of others.
    """
    tokens = sizes[is_absorbed]
    index = bisect_left(tokens, num_tokens)
    return MixedSize(tokens[index], is_absorbed) if index < len(tokens) else None


def absorbed_sizes(max_num_tokens: int) -> list[int]:
    """Return the numbers of tokens of steps that are one graph: multiples of 32 to 256, of 64 to 512."""
    return _up_to(min(max_num_tokens, MAX_ABSORBED_TOKENS), [16, *range(32, 256, 32), *range(256, 512, 64)])


def token_sizes(max_num_tokens: int) -> list[int]:
    """Return the numbers of tokens of other steps, with at most a third of padding from 128 tokens on."""
    sizes = [64, *range(128, 512, 128), *range(512, 2048, 256), *range(2048, 4096, 512), *range(4096, 8192, 1024)]
    return _up_to(min(max_num_tokens, _MAX_TOKENS), sizes)


def _up_to(largest: int, sizes: Sequence[int]) -> list[int]:
    return [*(size for size in sizes if size < largest), largest]
