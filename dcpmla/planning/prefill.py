"""Time that pieces of prompts add to a step, by which the scheduler bounds the time that decodes wait for them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import inf

from dcpmla.attention.compressed.config import CompressedConfig
from dcpmla.attention.routes import Rates, RouteCosts
from dcpmla.config import IndexerConfig, MLAConfig
from dcpmla.planning.machine import H200X8, Machine
from dcpmla.planning.predict import Setting, parameter_us
from dcpmla.planning.reads import kv_row_bytes
from dcpmla.planning.weights import ModelSize

_LARGE_STEP = 1 << 20  # tokens of a step in which every product takes longer than reading its weights
_GATHER_PASSES = 4  # two kernels read and write all gathered rows


class PrefillCosts:
    """The modelled time of pieces of prompts in the whole model on one rank (`dcpmla.runtime.costs.PieceCosts`).

    A step reads its weights once, whatever it computes. A piece therefore adds the products, the all-reduces and the
    attention of its own tokens.

    Args:
        machine: Speeds of the GPUs.
        model: Sizes of the model.
        setting: Cut and cache of the model.
        max_num_batched_tokens: Limit of a step's tokens.
        max_prefill_ms: Limit in milliseconds for the pieces of a step in which requests decode; None for the time of
            max_num_batched_tokens tokens without a context.

    Attributes:
        tokens_per_request: Width of the pieces that absorbed attention cuts requests into.
        max_prefill_us: Limit for the pieces of a step in which requests decode, in microseconds.
    """

    def __init__(
        self,
        machine: Machine,
        model: ModelSize,
        setting: Setting,
        max_num_batched_tokens: int,
        max_prefill_ms: float | None = None,
    ) -> None:
        attention = model.attention
        self._token_us = token_us(machine, model, setting)
        self._attention: _LatentLayers | _CompressedLayers
        if isinstance(attention, CompressedConfig):
            self._attention = _CompressedLayers(machine, attention, setting)
        else:
            self._attention = _LatentLayers(machine, attention, model, setting)
        self.tokens_per_request = self._attention.tokens_per_request
        limit_us = self.piece_us(max_num_batched_tokens, 0) if max_prefill_ms is None else 1e3 * max_prefill_ms
        self.max_prefill_us = limit_us

    def piece_us(self, new: int, context: int) -> float:
        """Return the microseconds that a piece of so many new tokens adds to a step, after so many tokens before it.

        More new tokens and longer contexts take no less.
        """
        return new * self._token_us + self._attention.piece_us(new, context)

    def choose_absorbed(self, pieces: Sequence[tuple[int, int]]) -> list[bool]:
        """Return which pieces (new tokens, tokens before them) attend with absorbed queries."""
        return self._attention.choose_absorbed(pieces)


def token_us(machine: Machine, model: ModelSize, setting: Setting) -> float:
    """Return the microseconds that one more token of a prompt adds to a large step, besides its attention.

    Embedding and head do not count: the one is a lookup, the other sees a prompt's last token only. kv_b_proj counts as
    attention, whose routes differ in it.
    """
    counted = [
        parameter
        for parameter in model.parameters
        if not any(name in parameter.name for name in ("embed_tokens", "lm_head", "kv_b_proj"))
    ]

    def step_us(num_tokens: int) -> float:
        parts = (
            (parameter.count, parameter_us(machine, model, parameter, setting, num_tokens)) for parameter in counted
        )
        return sum(count * sum(times.values()) for count, times in parts)

    return (step_us(2 * _LARGE_STEP) - step_us(_LARGE_STEP)) / _LARGE_STEP


def kernel_rates(machine: Machine) -> Rates:
    """Return the speeds of attention's kernels, scaled by the machine's products, copies and links."""
    rates, assumed_link = Rates(), H200X8.direct or H200X8.all_gather
    products = machine.matmul_tflops / H200X8.matmul_tflops
    copies = machine.copy_gb_per_s / H200X8.copy_gb_per_s
    links = (machine.direct or machine.all_gather).gb_per_s / assumed_link.gb_per_s
    return replace(
        rates,
        matmul_tflops=products * rates.matmul_tflops,
        mha_tflops=products * rates.mha_tflops,
        masked_tflops=products * rates.masked_tflops,
        absorbed_tflops=products * rates.absorbed_tflops,
        selected_tflops=products * rates.selected_tflops,
        gb_per_s=copies * rates.gb_per_s,
        link_gb_per_s=links * rates.link_gb_per_s,
    )


class _LatentLayers:
    """Attention of all layers of MLA, each by the cheaper route."""

    def __init__(self, machine: Machine, attention: MLAConfig, model: ModelSize, setting: Setting) -> None:
        self._routes = RouteCosts(attention, setting.dcp_config, kernel_rates(machine))
        self._num_layers, self.tokens_per_request = model.num_attention_layers, self._routes.tokens_per_request
        self._topk, self._score_us = inf, 0.0  # time of a key's scores in all layers with an indexer
        if attention.indexer is not None:
            self._topk = attention.indexer.topk
            self._score_us = model.num_index_layers * _score_us(machine, attention.indexer, setting)

    def piece_us(self, new: int, context: int) -> float:
        """Return the microseconds of all layers."""
        routes = self._routes
        mha_us = routes.mha_us(new, context, routes.num_tiles(new))
        time = self._num_layers * min(mha_us, routes.absorbed_us(new, context))
        if context + new > self._topk:
            time += self._score_us * _num_pairs(new, context, inf)
        return time

    def choose_absorbed(self, pieces: Sequence[tuple[int, int]]) -> list[bool]:
        return self._routes.choose_absorbed(pieces)


class _CompressedLayers:
    """Attention of all layers of DeepSeek-V4: a window and entries, which each piece gathers from all ranks."""

    tokens_per_request = 1

    def __init__(self, machine: Machine, attention: CompressedConfig, setting: Setting) -> None:
        row_bytes, num_heads = kv_row_bytes(attention, setting.kv_cache_dtype), attention.heads_per_rank(setting.tp)
        rates = kernel_rates(machine)
        # Each token lists the rows that it reads, so it shares none with its neighbours.
        read_us = row_bytes / (machine.attention_read_share * machine.hbm_gb_per_s) / 1e3
        multiply_us = 4 * num_heads * attention.head_dim / machine.attention_tflops / 1e6
        row_us = max(read_us, multiply_us)
        link_us = (1 - 1 / setting.dcp) * row_bytes / rates.link_gb_per_s / 1e3
        gather_us = _GATHER_PASSES * row_bytes / rates.gb_per_s / 1e3 + link_us
        self._window, self._window_us = attention.sliding_window, len(attention.layer_kinds) * row_us
        # Of each kind with entries: tokens before its selection starts, then times of a token's share of an entry.
        self._kinds = [
            (
                kind.ratio * attention.indexer.topk if kind.has_indexer else inf,
                number * gather_us / kind.ratio,
                number * row_us / kind.ratio,
                number * _score_us(machine, attention.indexer, setting) / kind.ratio,
            )
            for kind, number in Counter(attention.layer_kinds).items()
            if kind.ratio
        ]

    def piece_us(self, new: int, context: int) -> float:
        """Return the microseconds of all layers."""
        end = context + new
        time = self._window_us * _num_pairs(new, context, self._window)
        for limit, gather_us, row_us, score_us in self._kinds:
            time += gather_us * end + row_us * _num_pairs(new, context, limit)
            if end > limit:
                time += score_us * _num_pairs(new, context, inf)
        return time

    def choose_absorbed(self, pieces: Sequence[tuple[int, int]]) -> list[bool]:
        return [False] * len(pieces)


def _score_us(machine: Machine, indexer: IndexerConfig, setting: Setting) -> float:
    """Return the microseconds that an indexer takes for one token's scores of one key, which one rank has."""
    return 2 * indexer.num_heads * indexer.head_dim / setting.dcp / machine.attention_tflops / 1e6


def _num_pairs(new: int, context: int, limit: float) -> float:
    """Return how many pairs of a new token and one it attends to: itself or an earlier one, at most `limit`."""
    return _pairs_up_to(context + new, limit) - _pairs_up_to(context, limit)


def _pairs_up_to(end: int, limit: float) -> float:
    if end <= limit:
        return end * (end + 1) / 2
    return limit * (limit + 1) / 2 + (end - limit) * limit
