"""Regimes of the same computation: steps of few and of many tokens, in graphs and eager, against a float32 model.

Which kernels run depends on the number of tokens of a step: products, experts and attention have others for one token,
for hundreds and for thousands, prompts come whole or in pieces after a context, and graphs pad. Whatever runs, the
logits must be the model's (`tests.support.conditioned`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from dcpmla.comm.select import select_exchange
from dcpmla.config import DCPConfig
from dcpmla.integrations.engine_options import EngineOptions
from dcpmla.integrations.loading import load_engine
from dcpmla.integrations.model_files import load_config
from dcpmla.integrations.model_size import read_model
from dcpmla.integrations.open_model import open_model
from dcpmla.parallel.mesh import init_mesh
from dcpmla.planning.deployment import Deployment
from dcpmla.planning.machine import H200X8
from dcpmla.planning.prefill import PrefillCosts
from dcpmla.planning.setting import Setting
from dcpmla.runtime.costs import PieceCosts
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.graph import StepGraph
from dcpmla.runtime.sampling import SamplingParams
from tests.support.conditioned import WEIGHTS
from tests.support.costs import DrawnCosts
from tests.support.engines import new_engine
from tests.support.recording import capture
from tests.support.row_errors import largest_error

DENSE_FAMILIES = ("deepseek_v2_no_q_lora", "deepseek_v3")
FAMILIES = (*DENSE_FAMILIES, "deepseek_v32")  # tiny widths leave the last one no gap
KINDS = {  # mode -> the kinds of its steps
    "graphs": {"decode graph", "absorbed graph", "graph around attention"},
    "eager": {"eager decode", "eager prefill"},
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of a comparison.

    Attributes:
        config: Fields of the model's config.
        budgets: Values of max_num_batched_tokens.
        prompt_lens: Tokens of the prompts; all come at once.
        turn_len: Tokens that the first and the longest prompt get in a second round, after their cached ones.
        max_num_seqs: Limit of requests that run at the same time, below the number of prompts: later prompts meet
            decodes.
    """

    config: Mapping[str, int]
    budgets: tuple[int, ...]
    prompt_lens: tuple[int, ...]
    turn_len: int
    max_num_seqs: int

    @property
    def max_model_len(self) -> int:
        """Return the longest sequence."""
        return self.config["max_position_embeddings"]


@dataclass
class Regime:
    """Steps of one kind of weights, in graphs or eager, of at most so many tokens.

    Attributes:
        smallest_loss: Smallest error of a prompt that lost the first eighth of its context.
        error: Largest error of a row of logits: the norm of the difference / the norm of the row.
        kinds: Kinds of the steps that ran.
    """

    weights: str
    mode: str
    budget: int
    smallest_loss: float
    error: float = math.nan
    kinds: set[str] = field(default_factory=set)

    def note(self, line: str) -> None:
        """Note the kind of a step from the engine's line about it."""
        if "; graph of" not in line:
            self.kinds.add(f"eager {line.split()[0]}")
        elif ", whole" in line:
            self.kinds.add("absorbed graph")
        else:
            self.kinds.add("decode graph" if line.endswith("requests)") else "graph around attention")


def compare(directory: Path, dcp: DCPConfig, sizes: Sizes, device_type: str) -> list[Regime]:
    """Serve the same requests in all regimes, on each rank of a job; compare their logits with a float32 model's."""
    regimes = []
    for weights, (file, twin, _) in WEIGHTS.items():
        regimes += compare_weights(weights, directory / file, directory / twin, dcp, sizes, device_type)
    return regimes


def compare_weights(
    weights: str, directory: Path, twin: Path, dcp: DCPConfig, sizes: Sizes, device_type: str
) -> list[Regime]:
    """Compare a checkpoint in all regimes with a twin of the same values that transformers loads."""
    device = torch.device(device_type, dist.get_rank()) if device_type == "cuda" else torch.device("cpu")
    prompts = draw_prompts(sizes)
    expected, lost = reference_logits(twin, prompts, device)
    smallest_loss = min(map(largest_error, lost, expected))
    mesh = init_mesh(dcp.tensor_parallel_size, dcp.decode_context_parallel_size)
    limits = {"max_num_batched_tokens": max(sizes.budgets), "max_num_seqs": sizes.max_num_seqs}
    options = EngineOptions(dtype=torch.bfloat16, kv_cache_memory_bytes=1 << 27, **limits)
    chosen = select_exchange(dcp, mesh.dcp_group, device)
    loaded = load_engine(open_model(str(directory)), dcp, mesh, chosen, device, options)
    graphs = (loaded.graph, loaded.mixed_graph) if device_type == "cuda" else graphs_on_cpu(loaded, sizes)
    regimes = []
    for budget in sizes.budgets:
        for mode, (graph, mixed) in {"graphs": graphs, "eager": (None, None)}.items():
            for memory in loaded.cache.tensors:
                memory.view(torch.uint8).fill_(0xFF)  # NaN: a row of another regime must not be read
            regime = Regime(weights, mode, budget, smallest_loss)
            engine = new_engine(
                *(loaded.model, loaded.cache, loaded.dcp, mesh, sizes.max_model_len, budget, sizes.max_num_seqs),
                costs=costs_of(loaded, directory, budget),
                graph=graph,
                mixed_graph=mixed,
                on_step=regime.note,
            )
            logits = serve(engine, prompts, len(sizes.prompt_lens))
            regime.error = max(map(largest_error, logits, expected))
            regimes.append(regime)
    for each in graphs:
        if each is not None:
            each.release()
    loaded.close()
    return regimes


def check(regimes: Sequence[Regime]) -> None:
    """Check that all errors are within their bounds, that a lost context is not, and that all kinds of steps ran."""
    lines = "\n".join(map(str, regimes))
    for regime in regimes:
        bound = WEIGHTS[regime.weights].bound
        assert regime.error < bound < regime.smallest_loss, (
            f"not {regime.error} < {bound} < {regime.smallest_loss}:\n{lines}"
        )
    for mode, kinds in KINDS.items():
        assert set().union(*(regime.kinds for regime in regimes if regime.mode == mode)) == kinds, lines


def draw_prompts(sizes: Sizes) -> list[list[int]]:
    """Return the prompts of both rounds. The second round's continue the first and the longest prompt's answers."""
    generator = torch.Generator().manual_seed(3)

    def draw(num_tokens: int) -> list[int]:
        return torch.randint(1, sizes.config["vocab_size"] - 1, (num_tokens,), generator=generator).tolist()

    prompts = [draw(length) for length in sizes.prompt_lens]
    longest = sizes.prompt_lens.index(max(sizes.prompt_lens))
    turns = [prompts[index] + answer(index, prompts[index]) + draw(sizes.turn_len) for index in (0, longest)]
    return prompts + turns


def answer(index: int, prompt: Sequence[int]) -> list[int]:
    """Return the new tokens of a prompt, the same in all regimes: its first token again and again."""
    return [prompt[0]] * (3 + index % 6)


def serve(engine: Engine, prompts: Sequence[Sequence[int]], num_first: int) -> list[Tensor]:
    """Serve the first prompts at once, then the others; return the logits of each prompt's new tokens [n, vocab]."""
    requests = []
    for start, end in ((0, num_first), (num_first, len(prompts))):
        for index in range(start, end):
            tokens = answer(index, prompts[index])
            params = SamplingParams(max_new_tokens=len(tokens), ignore_eos=True, logit_bias={tokens[0]: 100.0})
            requests.append(engine.add(prompts[index], params, keep_logits=True))
        list(engine.run())
    for index, request in enumerate(requests):
        assert request.token_ids == answer(index, prompts[index]), request.error
    assert all(request.num_cached_tokens for request in requests[num_first:])
    return [torch.stack(request.logits) for request in requests]


@torch.inference_mode()
def reference_logits(
    directory: Path, prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the logits of each prompt's new tokens by transformers in float32; and by a loss of the first context."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).to(device)

    def logits(index: int, start: int) -> Tensor:
        prompt, tokens = prompts[index], answer(index, prompts[index])
        ids = torch.tensor([[*prompt[start:], *tokens[:-1]]], device=device)
        return model(ids, use_cache=False, logits_to_keep=len(tokens)).logits[0].cpu()

    indices = range(len(prompts))
    return [logits(index, 0) for index in indices], [logits(index, len(prompts[index]) // 8) for index in indices]


def graphs_on_cpu(loaded: Engine, sizes: Sizes) -> tuple[StepGraph, StepGraph]:
    """Return recordings of steps instead of CUDA graphs; padded steps on several ranks, for none holds collectives."""
    model, cache, dcp, mesh = loaded.model, loaded.cache, loaded.dcp, loaded.mesh
    steps = model.attention.step_builder(cache.sizes, dcp, mesh.dcp_rank, model.device)
    limits = sizes.max_num_seqs, sizes.max_model_len
    decode = StepGraph.decodes(model.decode, torch.tensor(0), cache, steps, mesh, *limits)
    width = costs_on_cpu(loaded).tokens_per_request
    mixed = StepGraph.prompts(model, cache, steps, mesh, max(sizes.budgets), *limits, width)
    if mesh.tp_size == 1:
        capture(decode)
        capture(mixed)
    return decode, mixed


def costs_of(loaded: Engine, directory: Path, budget: int) -> PieceCosts:
    """Return the costs that choose a piece's route: an engine's own on GPUs, costs that take both routes on CPUs."""
    if loaded.model.device.type == "cpu":
        return costs_on_cpu(loaded)
    setting = Setting(tp=loaded.mesh.tp_size, dcp=loaded.mesh.dcp_size, kv_cache_dtype="bf16")
    return PrefillCosts(Deployment(H200X8, read_model(load_config(directory)), setting), budget)


def costs_on_cpu(loaded: Engine) -> DrawnCosts:
    """Return costs that give every step and route to tiny prompts, with pieces of 4 tokens for absorbed attention."""
    steps = loaded.model.attention.step_builder(
        loaded.cache.sizes, loaded.dcp, loaded.mesh.dcp_rank, torch.device("cpu")
    )
    return DrawnCosts(3, absorbs=steps.layout.traits.absorbs_pieces)
