"""A real vLLM engine with sparse MLA in each rank: MODEL OPTIONS. Rank 0 prints a report as a line
of JSON. OPTIONS are the engine's, `threshold` (the most new tokens of a decode), `route` ("absorbed" or "mha"), and
`longest`, the longest prompt's tokens. MODEL is a DeepSeek-V3.2, or a GLM-5-Next.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import DeepseekV32ForCausalLM
from vllm import LLM
from vllm.config import set_current_vllm_config

from dcpmla.attention.select.candidates import EMPTY
from dcpmla.attention.select.selector import TokenSelector
from dcpmla.comm.nccl import AllToAll
from dcpmla.integrations.vllm import choice, impl
from dcpmla.integrations.vllm.backend import DCPMLAMetadataBuilder
from dcpmla.integrations.vllm.sparse.backend import DCPMLASparseMetadataBuilder
from dcpmla.integrations.vllm.sparse.selection import IndexMetadataBuilder
from tests.engines.glm_next_model import GlmModule, PoolSelections, count_pools, glm_next, lose_tails, replace_kernels
from tests.engines.sparse_model import TOPK, Selections
from tests.engines.vllm_cases import CALLS, NEW_TOKENS, VOCABULARY, count, counts_of, end, run, start, without_merge
from tests.engines.vllm_drafts import DRAFTED, Module, compare_drafts, record_drafts
from tests.support.interpreter import convert_as_torch

IN_FLOAT32 = {"dtype": torch.float32, "attn_implementation": "eager"}
LENGTHS = (1, 33, 65, 20)


def prompts(longest: int) -> list[list[int]]:
    """Return prompts of 1 to `longest` tokens, the longest first. The last one begins as the first does."""
    generator = torch.Generator().manual_seed(1)
    draw = torch.randint(2, VOCABULARY, (len(LENGTHS) + 2, longest), generator=generator).tolist()
    lengths = longest, *LENGTHS
    shared = draw[0][: longest - 50] + draw[-1][:30]
    return [*(tokens[:length] for tokens, length in zip(draw, lengths, strict=False)), shared]


def of_this_rank(self: AllToAll, candidates: torch.Tensor) -> torch.Tensor:
    """Return this rank's candidates as if other ranks had none."""
    empty = torch.full_like(candidates, EMPTY)
    return torch.stack([candidates] + [empty] * (dist.get_world_size(self.group) - 1), 1)


def count_exchanges_of_builders() -> None:
    """Count the exchanges while builders of index caches are made: each rank makes builders in an order of its own."""
    make = IndexMetadataBuilder.__init__

    def made(self: IndexMetadataBuilder, *args: Any) -> None:
        before = CALLS["gather_candidates"]
        make(self, *args)
        CALLS["exchanges of builders"] += CALLS["gather_candidates"] - before

    IndexMetadataBuilder.__init__ = made


def backends_of_another_model(config: Any) -> list[str]:
    """Return the backends of a model with an indexer of another kind: of one that vLLM chose, and of CUSTOM."""
    text = config.model_config.hf_text_config
    kept, text.model_type = text.model_type, "another"
    with set_current_vllm_config(config):
        names = [getattr(choice, name).__name__ for name in ("TRITON_MLA", "CUSTOM")]
    text.model_type = kept
    return names


def share_of_best(selections: Selections, model: Any, requests: list[list[int]], llm: LLM) -> float:
    """Run requests; return the share of their tokens that have selected exactly the best keys."""
    before = selections.num_equal, selections.num_rows
    selections.largest_error(model, requests, run(llm, requests))
    return (selections.num_equal - before[0]) / (selections.num_rows - before[1])


def main(directory: str, options: dict[str, Any]) -> None:
    if not torch.cuda.is_available():
        convert_as_torch()
    DCPMLAMetadataBuilder.reorder_batch_threshold = options.pop("threshold")
    route, longest = options.pop("route"), options.pop("longest")
    is_pooled = json.loads((Path(directory) / "config.json").read_text())["model_type"] == "glm5_next_text"
    if is_pooled:
        replace_kernels()
    DCPMLASparseMetadataBuilder._absorbs = lambda *_: route == "absorbed"
    count(impl, "dcp_mla_decode")
    count(impl, "dcp_mla_prefill")
    count(TokenSelector, "select")
    if is_pooled:
        count_pools(CALLS)
    for name in ("gather_candidates", "combine"):
        count(AllToAll, name)
    count_exchanges_of_builders()
    has_module = "speculative_config" in options
    if has_module:
        record_drafts()
    sizes = {"max_model_len": longest + 106, "max_num_seqs": 8, "num_gpu_blocks_override": 128}
    llm = start(directory, **sizes | options)
    warm_up = dict(CALLS)
    CALLS.clear()
    selections = PoolSelections() if is_pooled else Selections()
    selections.record()
    model: Any = glm_next() if is_pooled else DeepseekV32ForCausalLM.from_pretrained(directory, **IN_FLOAT32)
    requests = prompts(longest)
    outputs = run(llm, requests)
    error = selections.largest_error(model, requests, outputs)
    report: dict[str, Any] = {"warm-up": warm_up, "error": error, "selections": dict(vars(selections))}
    for private in ("_found", "_shared", "_request"):
        del report["selections"][private]
    if has_module:
        # Tokens of short prompts attend to all, as in a dense model, which the module in plain torch is.
        short = {index for index, prompt in enumerate(requests) if len(prompt) + NEW_TOKENS < TOPK}
        DRAFTED[:] = [draft for draft in DRAFTED if int(draft[0].split("-")[1]) in short]
        report["drafts"] = compare_drafts(GlmModule(directory) if is_pooled else Module(directory), requests, outputs)
    again = run(llm, requests, aborted=1)
    report["again"] = {"error": selections.largest_error(model, requests, again)} | counts_of(again)
    report["calls"] = dict(CALLS)
    report["other models"] = backends_of_another_model(llm.llm_engine.vllm_config)
    if is_pooled:
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        report["layers"] = [type(getattr(layer, "impl", layer)).__name__ for layer in layers]
    few = requests[:1] + requests[3:4]
    if options.get("decode_context_parallel_size", 1) > 1 and not torch.cuda.is_available():
        kept, AllToAll.combine = AllToAll.combine, without_merge
        report["without merge"] = selections.largest_error(model, few, run(llm, few))
        AllToAll.combine, gather, AllToAll.gather_candidates = kept, AllToAll.gather_candidates, of_this_rank
        report["own candidates"] = share_of_best(selections, model, few, llm)
        AllToAll.gather_candidates = gather
    if is_pooled:
        lose_tails()
        selections.worst = 0.0
        unknown = [tokens[::-1] for tokens in few]  # no prefix of theirs is cached
        selections.largest_error(model, unknown, run(llm, unknown))
        report["without tails"] = selections.worst
    end(report)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
