"""The bits of a real vLLM engine's answers, started by torchrun: MODEL OPTIONS. Rank 0 prints, as a line of JSON, a
digest of each request's logprobs for each way of serving it.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from vllm import LLM, SamplingParams

from dcpmla.integrations.vllm import impl
from dcpmla.parallel.by_rows import by_rows
from dcpmla.parallel.fixed import multiply_rows
from tests.engines.vllm_cases import CALLS, VOCABULARY, count, end

NEW_TOKENS = 3
LENGTHS = (1, 64, 66, 130)


class ByRows(TorchFunctionMode):
    """A mode that computes each row of a product, an activation or a mean by itself.

    vLLM does so on GPUs alone, or by kernels that take too long in Triton's interpreter.
    """

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            x, weight = args[:2]
            assert args[2:] in ((), (None,))
            return multiply_rows(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])
        if func is F.silu:
            return by_rows(F.silu, args[0])
        if func is Tensor.mean:
            return by_rows(lambda row: row.sum(-1, keepdim=True) / row.shape[-1], args[0])
        return func(*args, **kwargs)


def bmm_by_rows(x: Tensor, weights: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Multiply batches as `torch.bmm`, each row by itself.

    vLLM calls it inside an operator, where no mode is active; MKL's result depends on a row's place among six.
    """
    product = multiply_rows(x.transpose(0, 1), weights.transpose(1, 2)).transpose(0, 1)
    return product if out is None else out.copy_(product)


def serve(llm: LLM, requests: list[list[int]], at_once: int) -> list[Any]:
    """Serve requests in groups of at_once, one group after another; return all outputs."""
    params = SamplingParams(
        max_tokens=NEW_TOKENS, temperature=0, detokenize=False, ignore_eos=True, logprobs=VOCABULARY
    )
    prompts = [{"prompt_token_ids": tokens} for tokens in requests]
    parts = [prompts[first : first + at_once] for first in range(0, len(prompts), at_once)]
    return [output for part in parts for output in llm.generate(part, params, use_tqdm=False)]


def digests(outputs: list[Any]) -> list[str]:
    """Return a digest of all logprobs of each request."""

    def digest(output: Any) -> str:
        rows = [[row[token].logprob for token in range(VOCABULARY)] for row in output.outputs[0].logprobs]
        return hashlib.sha256(torch.tensor(rows).numpy().tobytes()).hexdigest()

    return [digest(output) for output in outputs]


def main(directory: str, options: dict[str, Any]) -> None:
    llm = LLM(
        model=directory,
        skip_tokenizer_init=True,
        tensor_parallel_size=int(os.environ["WORLD_SIZE"]),
        distributed_executor_backend="external_launcher",
        max_model_len=512,
        max_num_seqs=8,
        num_gpu_blocks_override=64,
        max_logprobs=VOCABULARY,
        seed=0,
        block_size=64,
        **options,
    )
    for name in ("dcp_mla_decode", "dcp_mla_prefill"):
        count(impl, name)
    generator = torch.Generator().manual_seed(2)
    first = [torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]
    outputs = serve(llm, first, len(first))
    second = [old + list(output.outputs[0].token_ids) + old[:30] for old, output in zip(first, outputs, strict=True)]
    report: dict[str, Any] = {"first turns": digests(outputs)}
    outputs = serve(llm, second, len(second))
    report["second turns"], report["cached"] = digests(outputs), [output.num_cached_tokens for output in outputs]
    llm.reset_prefix_cache()
    report["alone"] = digests(serve(llm, first + second, 1))
    report["calls"] = dict(CALLS)
    for layer in llm.llm_engine.vllm_config.compilation_config.static_forward_context.values():
        layer.impl.num_tile_lanes //= 4  # the first and the third tile are merged before the second
    llm.reset_prefix_cache()
    report["another order"] = digests(serve(llm, first[-1:], 1))
    end(report)


if __name__ == "__main__":
    is_on_cpu = not torch.cuda.is_available()
    if is_on_cpu:
        torch.bmm = bmm_by_rows
    with ByRows() if is_on_cpu else nullcontext():
        main(sys.argv[1], json.loads(sys.argv[2]))
