"""Self-tests of `doctor`: attention and the exchange on small inputs of DeepSeek's widths, against float64."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dcpmla.attention.backends import reference
from dcpmla.attention.backends.calls import DecodeCall, PrefillCall, Segments, join_keys, split_queries
from dcpmla.attention.mla.decode import mla_decode
from dcpmla.attention.mla.prefill import mha_prefill
from dcpmla.bench.exchange_inputs import OPERATIONS, Combine, ExchangeCase, GatherHeads, find_errors
from dcpmla.bench.timing import Timing, calls_per_sample, time_operation
from dcpmla.comm.exchange import Exchange
from dcpmla.config import MLAConfig

# Limits allow many roundings of the result, but are below one key's weight in the tests.
_LIMITS = {torch.float32: 1e-4, torch.bfloat16: 0.02}
_BLOCK_SIZE = 64
_PREFILL_HEADS = 16
_CPU_HEADS = 16
_EXCHANGE_TOKENS = 5  # in groups of two or more, ranks hold different numbers of tokens, or none
_SECONDS = 0.5  # time for the samples of one latency
Errors = dict[str, float]


@dataclass(frozen=True)
class SelfTest:
    """The outcome of one test.

    Attributes:
        largest_error: Largest of all errors; None where one is not finite, or the test did not end.
        failure: Description of the differences, "" without any.
        passed: Description of a test without differences; "" for its largest error.
    """

    name: str
    largest_error: float | None
    failure: str
    passed: str = ""


def judge(name: str, errors: Mapping[str, float], dtype: torch.dtype) -> SelfTest:
    """Return a test's outcome from the errors of results in a dtype; NaN fails."""
    limit = _LIMITS[dtype]
    wrong = [f"{result} differs by {error:.3g}" for result, error in errors.items() if not error <= limit]
    largest = max(errors.values()) if all(map(math.isfinite, errors.values())) else None
    return SelfTest(name, largest, f"{', '.join(wrong)}; allowed is {limit:g}" if wrong else "")


# ---- attention


def attention_self_tests(config: MLAConfig, device: torch.device, dtype: torch.dtype) -> list[SelfTest]:
    """Test decode and prefill, each on the backend that its table selects; an exception is a failure too."""
    tests = []
    for name, errors in (("decode", _decode_errors), ("prefill", _prefill_errors)):
        try:
            tests.append(judge(name, errors(config, device, dtype), dtype))
        except Exception as error:  # no compiler, a library of another version: the other tests still run
            tests.append(SelfTest(name, None, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"))
    return tests


def decode_call(config: MLAConfig, device: torch.device, dtype: torch.dtype) -> DecodeCall:
    """Return a call of requests around block borders, with two new tokens each, in shuffled blocks; unwritten slots
    hold NaN.
    """
    seq_lens = torch.tensor([[0, 0], [0, 1], [63, 64], [64, 65], [299, 300]], dtype=torch.int32)
    num_reqs, max_blocks = len(seq_lens), -(-int(seq_lens.max()) // _BLOCK_SIZE)
    generator = torch.Generator().manual_seed(0)
    table = torch.randperm(num_reqs * max_blocks, generator=generator).view(num_reqs, max_blocks)
    cache = torch.full((table.numel(), _BLOCK_SIZE, config.latent_dim), torch.nan)
    for blocks, length in zip(table, seq_lens[:, -1].tolist(), strict=True):
        position = torch.arange(length)
        cache[blocks[position // _BLOCK_SIZE], position % _BLOCK_SIZE] = torch.randn(
            length, config.latent_dim, generator=generator
        )
    q = torch.randn(seq_lens.numel(), config.num_heads, config.latent_dim, generator=generator)
    q, cache = q.to(device, dtype), cache.to(device, dtype)
    table, seq_lens = table.to(device, torch.int32), seq_lens.flatten().to(device)
    rank = config.kv_lora_rank
    return DecodeCall(*split_queries(q, rank), cache, table, seq_lens, config.softmax_scale, rank, max_query_len=2)


def prefill_calls(config: MLAConfig, device: torch.device, dtype: torch.dtype) -> dict[str, PrefillCall]:
    """Return calls of two requests' new tokens over themselves, then over contexts, the first one empty."""
    nope, rope, heads = config.qk_nope_head_dim, config.qk_rope_head_dim, _PREFILL_HEADS
    generator = torch.Generator().manual_seed(0)
    new, contexts = _segments((0, 3, 133), device), _segments((0, 0, 200), device)
    calls = {}
    for name, keys in (("causal", new), ("context", contexts)):
        q = torch.randn(new.start[-1], heads, nope + rope, generator=generator).to(device, dtype)
        kv = torch.randn(keys.start[-1], heads, nope + config.v_head_dim, generator=generator).to(device, dtype)
        k_nope, v = kv.tensor_split((nope,), -1)
        k_pe = torch.randn(keys.start[-1], rope, generator=generator).to(device, dtype)
        calls[name] = PrefillCall(q, k_nope, k_pe, v, *new, *keys, config.softmax_scale, name == "causal")
    return calls


def _decode_errors(config: MLAConfig, device: torch.device, dtype: torch.dtype) -> Errors:
    call = decode_call(config, device, dtype)
    assert call.q_pe is not None
    wide = call._replace(q=call.q.double(), q_pe=call.q_pe.double(), kv_cache=call.kv_cache.double())
    return _errors(mla_decode(call), reference.mla_decode(wide))


def _prefill_errors(config: MLAConfig, device: torch.device, dtype: torch.dtype) -> Errors:
    errors: Errors = {}
    for name, call in prefill_calls(config, device, dtype).items():
        wide = call.q.double(), join_keys(call.k_nope, call.k_pe).double(), call.v.double()
        answer = reference.mha_prefill(*wide, call.query_start, call.key_start, call.softmax_scale, call.causal)
        errors |= {f"{name} {result}": error for result, error in _errors(mha_prefill(call), answer).items()}
    return errors


def _segments(start: tuple[int, ...], device: torch.device) -> Segments:
    return Segments(start, torch.tensor(start, dtype=torch.int32, device=device))


def _errors(got: tuple[Tensor, Tensor], answer: tuple[Tensor, Tensor]) -> Errors:
    """Return the errors of out and lse."""
    return dict(zip(("out", "lse"), find_errors(got, answer), strict=True))


# ---- exchange


def exchange_heads(config: MLAConfig, size: int, device: torch.device) -> int:
    """Return the heads of a group: the model's (on CPUs 16, to save time), rounded to a multiple of `size`."""
    num_heads = config.num_heads if device.type == "cuda" else _CPU_HEADS
    return max(1, num_heads // size) * size


@dataclass(frozen=True)
class ExchangeTest:
    """An exchange of a group, for rows of a model's sizes."""

    exchange: Exchange
    group: dist.ProcessGroup
    config: MLAConfig
    device: torch.device
    dtype: torch.dtype

    def errors(self) -> Errors:
        """Return the errors of all three operations; shards of some tokens are empty (hold NaN) on the first, on the
        last or on all ranks. Collective.
        """
        case, errors = self._case(0, _EXCHANGE_TOKENS), Errors()
        for operation, make in OPERATIONS.items():
            inputs = make(case)
            results = find_errors(inputs.run(self.exchange, 0), inputs.answer(0))
            errors |= zip((operation, f"{operation}'s lse"), results, strict=False)
        return errors

    def timing(self, num_tokens: int) -> Timing:
        """Time `gather_heads` and then `combine` for all heads of the group. Collective over the job."""
        case = self._case(calls_per_sample(self.device), num_tokens)
        gather, combine = GatherHeads(case), Combine(case)

        def exchange_once(index: int) -> None:
            gather.run(self.exchange, index)
            combine.run(self.exchange, index)

        timing = time_operation(exchange_once, self.device, case.num_calls, seconds=_SECONDS)
        self.exchange.check()
        return timing

    def _case(self, num_calls: int, num_tokens: int) -> ExchangeCase:
        config, num_heads = self.config, exchange_heads(self.config, self.group.size(), self.device)
        sizes = num_tokens, num_heads, config.latent_dim, config.kv_lora_rank
        return ExchangeCase(self.group, num_calls, *sizes, self.device, self.dtype)
