"""Time decode steps of a whole model, with and without CUDA graphs in the same run: time per token and tokens/s per
batch.
"""

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

from dcpmla.bench.cache_formats import fill_slots
from dcpmla.bench.options import listed, single
from dcpmla.bench.results import Row, dtype_name
from dcpmla.bench.runner import Benchmark
from dcpmla.bench.sliding_selections import GENERATOR, sliding_step_times
from dcpmla.bench.step_times import decode_steps, is_quantized, mixed_times, modelled_times, size_of, step_times
from dcpmla.bench.timing import largest
from dcpmla.cache.formats import format_name
from dcpmla.cache.index_keys import SCALE_BYTES, write_index_keys
from dcpmla.cache.layers import Cache
from dcpmla.cli.field_options import list_reader
from dcpmla.cli.options import add_engine_arguments, build_engine, dcp_config, positive, positive_list, seed, share_list
from dcpmla.fields import number
from dcpmla.integrations.families.table import attention_of
from dcpmla.integrations.open_model import check_layout, open_model
from dcpmla.integrations.sharded_model import ShardedModel
from dcpmla.job.bootstrap import Ranks, agree
from dcpmla.job.join import Job
from dcpmla.runtime.acceptance import MAX_DRAFT_ROWS
from dcpmla.runtime.drafts import Drafter
from dcpmla.runtime.simulated import SimulatedDrafter, rates_of_length, rates_of_share
from dcpmla.runtime.speculation import Speculation

_lengths = list_reader(number(1), float)
_NUM_DECODES = 32  # decodes of a step with a piece of a prompt
_OPTIONS = (
    *("decode_query_dtype", "index_cache_dtype", "index_hadamard", "dcp_q_replicate", "dcp_project_before_merge"),
    *("enable_expert_parallel", "block_size", "input_len", "output_len", "seed"),
)
_STEP_TOKENS = "tokens of steps with a piece of a prompt, alone and with 32 decodes, timed as well"
_CONTEXT = "cached tokens of requests whose step is timed on the device alone, without a prefill before it"
_HIT_RATES = (
    "shares of the latents that steps over --context read which are hot, with --kv-hot-tokens; only these steps"
)
_ACCEPTANCE = "probability that random numbers accept a draft of --speculative-method, if those before it are"
_LENGTH = "tokens of a step with drafts on average, which random numbers accept (--synthetic-acceptance-length)"


class Batch(NamedTuple):
    """Requests that decode together.

    Attributes:
        mode: Either "graph" or "eager".
        acceptance: Rate of accepted drafts after accepted ones; None without.
        acceptance_length: Tokens of a step with drafts on average; None without.
        is_adaptive: Whether it drafts where that pays, not in every step.
        tokens: Number of tokens of a step with a piece of a prompt, the decodes' among them; 0 for decodes alone.
        context: Number of cached tokens of each request, without a prefill before the step; 0 for a prefill of
            --input-len tokens.
        hit_rate: Share of the selected latents that are hot (`SlidingSelections`); None for all latents on the GPU, or
            for selections of the indexers.
    """

    batch: int
    mode: str
    acceptance: float | None = None
    acceptance_length: float | None = None
    is_adaptive: bool = False
    tokens: int = 0
    context: int = 0
    hit_rate: float | None = None

    @property
    def has_drafts(self) -> bool:
        """Return whether its requests draft."""
        return self.acceptance is not None or self.acceptance_length is not None


class Generate(Benchmark[Batch, None]):
    """Every batch in each mode, one after the other, over the same weights and cache."""

    ranks_of = "tp"
    has_engine = True
    series = ("mode", "acceptance", "acceptance_length", "is_adaptive", "hit_rate")
    options = {
        "batch": "1,2,4,8,16,32,64,128",
        "input_len": single(positive, 512, "N", "tokens of a prompt"),
        "output_len": single(positive, 64, "N", "new tokens of a request"),
        "seed": {"type": seed, "default": 0, "help": "of the prompts' tokens"},
        "step_tokens": listed(positive_list, _STEP_TOKENS) | {"default": []},
        "context": listed(positive_list, _CONTEXT) | {"default": []},
        "hit_rates": listed(share_list, _HIT_RATES) | {"default": []},
        "acceptance": listed(share_list, _ACCEPTANCE) | {"default": "0,0.5,0.8,1"},
        "acceptance_length": listed(_lengths, _LENGTH) | {"default": []},
    }

    def __init__(self, args: argparse.Namespace, job: Job) -> None:
        super().__init__(args, job)
        files = open_model(args.model, args.max_model_len, args.revision)
        dcp = dcp_config(args, args.decode_context_parallel_size)
        # A block more for each request: the scheduler keeps one free for each that runs.
        block_tokens = dcp.virtual_block_size * attention_of(files.config).config.row_tokens
        seq_len = max(args.input_len + args.output_len - 1, *args.context, 0) + block_tokens
        num_reqs = max(args.batch)
        if args.step_tokens:  # all of a step are within the limits of graphs
            num_reqs = max(num_reqs, min(_NUM_DECODES + 1, args.max_num_seqs))
        self.engine, chosen = build_engine(args, job, dcp, files, [seq_len] * num_reqs)
        self.modes = ("graph", "eager") if self.engine.graph else ("eager",)
        self.graph, self.mixed_graph, self.exchange = self.engine.graph, self.engine.mixed_graph, chosen.exchange.name
        self.speculation, model = self.engine.speculation, self.engine.model
        assert isinstance(model, ShardedModel)
        self.model = model
        self.size = size_of(files.config, self.model.dtype, args.expert_dtype)
        needed, room = max(args.batch) * -(-seq_len // block_tokens), self.engine.cache.sizes.num_blocks
        if needed > room:  # requests that wait for blocks would make a smaller batch of it
            self.close()
            memory = "--kv-cache-memory-bytes" if args.kv_hot_tokens is None else "--kv-offloading-size"
            hint = f"lower --batch, --input-len, --output-len or --context, or raise {memory}"
            sizes = f"cache: {max(args.batch)} requests need {needed:,} blocks, but there is room for {room:,}"
            raise ValueError(f"{sizes}; {hint}")
        # The same model attends to all latents on the GPU, as the baseline of forced hits.
        self.plain_dcp = replace(self.engine.dcp, kv_hot_tokens=None)
        caches = [self.engine.cache]
        if args.hit_rates:
            plan = model.attention.plan_cache(self.plain_dcp, [max(args.context)] * max(args.batch), model.dtype)
            with agree():
                caches.append(plan.allocate(model.device))
        if args.context:
            for cache in caches:
                _fill(cache, model.dtype)
        self.plain_cache = caches[-1]

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add_engine_arguments(parser)
        super().add_arguments(parser)

    @staticmethod
    def check(args: argparse.Namespace, ranks: Ranks) -> None:
        files = open_model(args.model, args.max_model_len, args.revision)
        check_layout(files, dcp_config(args, args.decode_context_parallel_size))
        if args.output_len < 2:
            reason = "the first token comes with the prompt"
            raise ValueError(f"--output-len is {args.output_len}; it must be at least 2: {reason}")
        if (total := args.input_len + args.output_len) > files.max_model_len:
            lengths = f"--input-len {args.input_len} and --output-len {args.output_len}, together {total} tokens"
            raise ValueError(f"{lengths}; with --max-model-len {files.max_model_len} at most that many are served")
        if (context := max(args.context, default=0)) > files.max_model_len:
            raise ValueError(
                f"--context has {context}; --max-model-len, by default the model's, allows {files.max_model_len}"
            )
        _check_hit_rates(args, attention_of(files.config).layers[0].num_selected)
        if args.synthetic_acceptance_length is not None or args.synthetic_acceptance_rates:
            raise ValueError("--synthetic-acceptance-* are a server's; give --acceptance or --acceptance-length")
        if (length := max(args.acceptance_length, default=1)) > 1 + args.num_speculative_tokens:
            most = 1 + args.num_speculative_tokens
            raise ValueError(f"--acceptance-length has {length:g}; --num-speculative-tokens allows at most {most}")
        limit = min(args.max_num_seqs, args.max_num_batched_tokens)
        if max(args.batch) > limit:
            options = "--max-num-seqs and --max-num-batched-tokens"
            raise ValueError(f"--batch has {max(args.batch)}; raise {options}, which allow {limit}")
        if (num_tokens := max(args.step_tokens, default=0)) > args.max_num_batched_tokens:
            limits = f"--max-num-batched-tokens, which allows {args.max_num_batched_tokens}"
            raise ValueError(f"--step-tokens has {num_tokens}; raise {limits}")

    def cases(self) -> Iterator[Batch]:
        args, drafter, modes = self.args, self.speculation.drafter, self.modes
        if args.hit_rates:
            for context, size, hit_rate in product(args.context, args.batch, (None, *args.hit_rates)):
                yield Batch(size, modes[0], context=context, hit_rate=hit_rate)
            return
        for size in args.batch:
            yield from (Batch(size, mode) for mode in modes)
            if drafter.num_speculative_tokens and size * (1 + drafter.num_speculative_tokens) <= MAX_DRAFT_ROWS:
                for acceptance, is_adaptive in product(args.acceptance, (False, True)):
                    yield Batch(size, modes[0], acceptance, None, is_adaptive)
                for length, is_adaptive in product(args.acceptance_length, (False, True)):
                    yield Batch(size, modes[0], None, length, is_adaptive)
        for tokens in args.step_tokens:
            sizes = (0, _NUM_DECODES) if tokens > _NUM_DECODES < args.max_num_seqs else (0,)
            yield from (Batch(size, mode, tokens=tokens) for size, mode in product(sizes, modes))
        for context, size in product(args.context, args.batch):
            yield Batch(size, modes[0], context=context)

    def measure(self, case: Batch, inputs: None) -> list[Row]:
        args, engine = self.args, self.engine
        if case.tokens:
            return [self._mixed_row(case)]
        if args.hit_rates:
            return [self._forced_row(case)]
        if case.context:
            labels = self._labels(case) | {"batch": case.batch, "input_len": case.context}
            return [labels | self._device_times(case.batch, case.context)]
        engine.graph, engine.mixed_graph = (self.graph, self.mixed_graph) if case.mode == "graph" else (None, None)
        engine.speculation = Speculation(self._drafter(case))
        self.job.watchdog.enter("queueing requests")
        steps = decode_steps(engine, case.batch, args.input_len, args.output_len, args.seed)
        # Steps of a kind are alike; where some have drafts and others none, the mean counts all.
        average = statistics.mean if case.is_adaptive else statistics.median
        seconds = largest(average([seconds for seconds, _ in steps]), self.model.device)
        tokens_a_step = statistics.mean(num_tokens for _, num_tokens in steps)
        row = self._labels(case) | {
            "batch": case.batch,
            "step_us": round(seconds * 1e6, 1),
            "tokens_per_second": round(tokens_a_step / seconds, 1),
        }
        if case.has_drafts:
            drafts = {name: getattr(args, name) for name in ("speculative_method", "num_speculative_tokens")}
            row |= drafts | {name: value for name in self.series[1:] if (value := getattr(case, name)) is not None}
            row["tokens_a_step"] = round(tokens_a_step, 2)
            row |= self.speedup_over("no_drafts", case.batch, seconds / tokens_a_step, is_baseline=False)
        else:
            if case.mode == self.modes[0]:
                self.speedup_over("no_drafts", case.batch, seconds / tokens_a_step, is_baseline=True)
            row |= self.speedup_over("graph", ("graph", case.batch), seconds, is_baseline=case.mode == "graph")
        if not case.has_drafts and case.mode == "graph":
            row |= self._device_times(case.batch, args.input_len)
            if case.batch == max(args.batch):
                row |= self._prefill_times()
        return [row]

    def _labels(self, case: Batch) -> Row:
        """Return the fields of all rows."""
        engine, dtype = self.engine, self.engine.model.dtype
        return {
            "model": Path(self.args.model).name,  # a path of this machine is left out
            "weights": "fp8" if is_quantized(self.model) else format_name(dtype),
            "num_parameters": self.size.num_parameters,
            "tp": engine.mesh.tp_size,
            "dcp": engine.mesh.dcp_size,
            "exchange": self.exchange,
            **{name: (vars(self.args) | vars(engine.dcp))[name] for name in _OPTIONS},
            "dtype": dtype_name(dtype),
            "kv_cache_dtype": format_name(engine.cache.sizes.dtype),
            "mode": case.mode,
        }

    def _mixed_row(self, case: Batch) -> Row:
        self.job.watchdog.enter("timing steps with prompts")
        self.engine.mixed_graph = self.mixed_graph
        times = mixed_times(self.engine, case.tokens, case.batch, self.args.input_len, case.mode == "graph")
        return self._labels(case) | {"tokens": case.tokens, "decodes": case.batch} | times

    def _device_times(self, batch: int, context: int) -> Row:
        """Return the times of a step on the device alone, and on H200s the modelled ones."""
        engine = self.engine
        self.job.watchdog.enter("timing steps on the device")
        times = step_times(self.model, engine.cache, engine.dcp, engine.mesh, batch, context)
        load = batch, context, times["device_us"]
        return times | modelled_times(self.args, engine, self.size, self.exchange, *load)

    def _prefill_times(self) -> Row:
        """Return the times of the prefill of one prompt on the device alone."""
        engine, num_tokens = self.engine, min(self.args.input_len, self.args.max_num_batched_tokens)
        times = step_times(self.model, engine.cache, engine.dcp, engine.mesh, 1, num_tokens, num_tokens)
        return {f"prefill_{name}": value for name, value in times.items()}

    def _forced_row(self, case: Batch) -> Row:
        """Return the row of a step with a rate of hits; without one, of the step with all latents on the GPU."""
        args, engine, is_plain = self.args, self.engine, case.hit_rate is None
        self.job.watchdog.enter("timing steps with forced hits")
        cache, dcp = (self.plain_cache, self.plain_dcp) if is_plain else (engine.cache, engine.dcp)
        load = case.batch, case.context, 1.0 if case.hit_rate is None else case.hit_rate
        times = sliding_step_times(self.model, cache, dcp, engine.mesh, *load)
        row = self._labels(case) | {"batch": case.batch, "input_len": case.context, "selections": GENERATOR}
        if not is_plain:
            row |= {"kv_hot_tokens": args.kv_hot_tokens, "hit_rate": case.hit_rate}
        time_us = times["us_per_moe_layer"] or times["device_us"]  # The head of a few layers takes more than its share.
        return row | times | self.speedup_over("gpu_latents", load[:2], time_us, is_baseline=is_plain)

    def _drafter(self, case: Batch) -> Drafter:
        """Return the drafter of a case, with its simulated acceptance."""
        drafter, model = self.speculation.drafter, self.model
        if not case.has_drafts:
            return Drafter()
        num_drafts = drafter.num_speculative_tokens
        if case.acceptance is None:
            rates = rates_of_length(case.acceptance_length or 1.0, num_drafts)
        else:
            rates = rates_of_share(case.acceptance, num_drafts)
        return SimulatedDrafter(drafter, rates, model.vocab_size, model.device, not case.is_adaptive)

    def close(self) -> None:
        engine = self.engine
        engine.graph, engine.mixed_graph, engine.speculation = self.graph, self.mixed_graph, self.speculation
        engine.close()


def _check_hit_rates(args: argparse.Namespace, topk: int | None) -> None:
    """Raise ValueError for --hit-rates without hot tokens and contexts, or with sizes that cannot have such rates.

    Args:
        topk: Tokens that one token selects; None in a model that does not select.
    """
    if not args.hit_rates:
        return
    given = f"--hit-rates is {','.join(map(str, args.hit_rates))}"
    if args.kv_hot_tokens is None or topk is None or not args.context:
        raise ValueError(f"{given}; give the number of hot tokens, --kv-hot-tokens, and cached ones, --context")
    if (shortest := min(args.context)) <= topk:
        raise ValueError(f"{given} and --context has {shortest}; it must be more than {topk}, which a token selects")
    if (most := max(args.batch) * topk) > args.kv_hot_tokens:
        hot = f"--kv-hot-tokens is {args.kv_hot_tokens}"
        raise ValueError(f"{given}, --batch has {max(args.batch)} and {hot}; a step selects {most}, which must fit")
    if min(args.hit_rates) < 1 and min(args.batch) * (shortest - 1) <= args.kv_hot_tokens:
        sizes = f"--batch has {min(args.batch)} and --context {shortest}"
        raise ValueError(
            f"{given} and {sizes}; these tokens fit in --kv-hot-tokens, {args.kv_hot_tokens}, so that none would be "
            "missed: lower it, or raise --context"
        )


def _fill(cache: Cache, dtype: torch.dtype) -> None:
    """Fill a cache with random numbers where it has the model's dtype, and its index keys, since equal ones would have
    the same score.
    """
    for memory in cache.tensors:
        if memory.dtype == dtype:
            memory.normal_()
    for layer in cache:
        if layer.index_keys is not None and layer.index_keys.dtype == torch.uint8:
            fill_slots(layer.index_keys, layer.index_keys.shape[-1] - SCALE_BYTES, dtype, write_index_keys)
