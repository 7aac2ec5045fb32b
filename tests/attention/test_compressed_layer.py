"""DeepSeek-V4's layer against transformers' attention: all three kinds, mixed batches, every cut of the caches."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Attention, DeepseekV4RotaryEmbedding

from dcpmla import DCPConfig, Placement, StepMetadata, init_mesh
from dcpmla.attention.layers.compressed import layer as layer_module
from dcpmla.attention.layers.compressed.cache import CompressedCache, plan_compressed
from dcpmla.attention.layers.compressed.fork import fork
from dcpmla.attention.layers.compressed.layer import CompressedAttention
from dcpmla.attention.layers.compressed.step import compressed_traits, with_angles
from dcpmla.attention.step.metadata import StepBuilder
from dcpmla.attention.step.table import StepRequests
from dcpmla.comm.select import select_exchange
from dcpmla.integrations.families.table import attention_of
from tests.support.layouts import dcp_config
from tests.support.ranks import on_ranks, run_ranks

HIDDEN, WINDOW, RATIOS, PADDING = 48, 8, (4, 16), 2
# By request, the tokens of each step, 0 for none: a request ends at multiples of either ratio, and before and after
# them; within a window, and within an entry. Decodes of one token, of two and of three.
MIXED = (
    (16, 3, 1, 0),
    (15, 1, 1, 5),
    (1, 0, 1, 60),
    (1, 1, 2, 1),
    (30, 10, 1, 0),
    (1, 1, 1, 1),
    (3, 2, 3, 11),
    (0, 13, 1, 2),
    (9, 1, 3, 1),
    (20, 33, 30, 17),
)
TOKEN_BY_TOKEN = ((1, 33), *[(1, 1)] * 64)
# Of eight ranks, most attend to no entries: 4 tokens of each request are one rank's first, or nobody's.
FEWER_ENTRIES_THAN_RANKS = ((4, 3, 16, 1), (1, 1, 1, 3))


def tiny(**changes: Any) -> DeepseekV4Config:
    """Return a config with a layer of each kind; its heads divide by 1, 2, 3, 4 and 8."""
    sizes: dict[str, Any] = {
        "vocab_size": 32,
        "hidden_size": HIDDEN,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 24,
        "head_dim": 16,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 24,
        "o_groups": 24,
        "o_lora_rank": 8,
        "index_n_heads": 32,  # with fewer, exact ties at 0
        "index_head_dim": 16,
        "index_topk": 6,
        "sliding_window": WINDOW,
        "num_hash_layers": 0,
        "max_position_embeddings": 4096,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": dict(
            zip(("compressed_sparse_attention", "heavily_compressed_attention"), RATIOS, strict=True)
        ),
        "rope_theta": 1e4,
        "compress_rope_theta": 1.6e5,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "attn_implementation": "eager",
    }
    return DeepseekV4Config(**{**sizes, **changes})


def modules_of(config: DeepseekV4Config) -> list[DeepseekV4Attention]:
    """Return transformers' layers, nothing left at a value that hides a bug."""
    torch.manual_seed(0)
    modules = [DeepseekV4Attention(config, layer).eval() for layer in range(3)]
    for module in modules:
        for name, parameter in module.named_parameters():
            if "norm" in name:
                parameter.data.uniform_(0.5, 1.5)
            else:
                parameter.data.normal_(0, 1 if "sinks" in name or "bias" in name else 0.2)
    return modules


def hidden_states(request: int, length: int) -> Tensor:
    return torch.randn(length, HIDDEN, generator=torch.Generator().manual_seed(request))


def angles(config: DeepseekV4Config, positions: Tensor, name: str) -> tuple[Tensor, Tensor]:
    return DeepseekV4RotaryEmbedding(config)(torch.empty(0), positions[None], layer_type=name)  # type: ignore[no-any-return]


def expected(config: DeepseekV4Config, module: DeepseekV4Attention, hidden: Tensor) -> Tensor:
    positions = torch.arange(len(hidden))
    both = {name: angles(config, positions, name) for name in ("main", "compress")}
    distance = positions[:, None] - positions
    mask = torch.where((distance >= 0) & (distance < WINDOW), 0.0, -torch.inf)
    return module(hidden[None], both, positions[None], mask[None, None])[0][0]  # type: ignore[no-any-return]


class Layers:
    """The layers of a model on one rank, with their caches."""

    def __init__(
        self,
        config: DeepseekV4Config,
        dcp: DCPConfig,
        seq_lens: list[int],
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.hf_config, self.dcp = config, dcp
        self.mesh = init_mesh(dcp.tensor_parallel_size, dcp.decode_context_parallel_size)
        self.config = attention_of(config).config
        exchange = select_exchange(dcp, self.mesh.dcp_group, device).exchange
        self.modules = modules_of(config)
        self.layers, placement = [], Placement(dcp, self.mesh, exchange, dtype, device)
        for kind, module in zip(self.config.layer_kinds, self.modules, strict=True):
            layer = CompressedAttention(self.config, kind, placement)
            layer.load_weights(module.state_dict())
            self.layers.append(layer)
        self.plan = plan_compressed(self.config, dcp, seq_lens, dtype, num_states=len(seq_lens) + 1)
        self.cache = CompressedCache(self.plan, torch.device(device))
        for memory in self.cache.tensors:
            memory.view(torch.uint8).fill_(0xFF)  # a NaN, in every format
        blocks = iter(range(self.plan.num_blocks - 1, -1, -1))
        self.tables = [[next(blocks) for _ in range(-(-length // self.plan.block_tokens))] for length in seq_lens]

    def rotary(self, positions: Tensor, is_compressed: bool) -> Tensor:
        cos, sin = angles(self.hf_config, positions.cpu(), "compress" if is_compressed else "main")
        return torch.cat([cos[0], sin[0]], -1).to(positions.device)

    def step(self, requests: list[int], query_lens: list[int], seq_lens: list[int]) -> StepMetadata:
        tables, states = [self.tables[i] for i in requests], [i + 1 for i in requests]
        traits, device = compressed_traits(self.plan), self.cache.tensors[0].device
        steps = StepBuilder(self.plan.dcp, self.mesh.dcp_rank, device, traits)
        return with_angles(steps.build(StepRequests(query_lens, seq_lens, tables, states), 3), self.rotary)

    def run(self, schedule: tuple[tuple[int, ...], ...], hidden: list[Tensor]) -> list[list[Tensor]]:
        """Return by layer the outputs [length, hidden] of each request."""
        done = [0] * len(hidden)
        outputs: list[list[list[Tensor]]] = [[[] for _ in hidden] for _ in self.layers]
        for new in schedule:
            requests = sorted((i for i, count in enumerate(new) if count), key=lambda i: new[i] > 3)  # decodes first
            for i in requests:
                done[i] += new[i]
            lens = [new[i] for i in requests]
            step = self.step(requests, lens, [done[i] for i in requests])
            new_rows = [hidden[i][done[i] - new[i] : done[i]] for i in requests]
            rows = torch.cat([*new_rows, hidden[0].new_full((PADDING, HIDDEN), torch.nan)])
            for layer, cache, kept in zip(self.layers, self.cache, outputs, strict=True):
                out = layer(rows, cache, step)
                assert not out[len(out) - PADDING :].any()
                for i, part in zip(requests, out[: len(out) - PADDING].split(lens), strict=True):
                    kept[i].append(part)
        return [[torch.cat(parts) for parts in kept] for kept in outputs]


def check(
    dcp: DCPConfig,
    schedules: tuple[tuple[tuple[int, ...], ...], ...],
    tolerance: float = 1e-4,
    quantile: float = 1.0,
    changes: dict[str, Any] | None = None,
) -> None:
    """Compare a quantile of every layer's errors on every rank with a tolerance; unwritten memory holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    config = tiny(**(changes or {}))
    with torch.no_grad():
        for schedule in schedules:
            lengths = [sum(tokens) for tokens in zip(*schedule, strict=True)]
            hidden = [hidden_states(i, length) for i, length in enumerate(lengths)]
            layers = Layers(config, dcp, lengths)
            for module, outputs in zip(layers.modules, layers.run(schedule, hidden), strict=True):
                for x, out in zip(hidden, outputs, strict=True):
                    wanted = expected(config, module, x)
                    error = (out - wanted).norm(dim=-1) / wanted.norm(dim=-1)
                    assert error.quantile(quantile) < tolerance
                    assert out.isfinite().all()


def layout(tp: int, dcp: int, interleave: int, **options: Any) -> DCPConfig:
    defaults = {"block_size": RATIOS[1] // RATIOS[0] * interleave, "dcp_comm_backend": "ag_rs"}
    return dcp_config(tp, dcp, interleave, **{**defaults, **options})


@pytest.mark.parametrize(
    ("dcp", "schedules"),
    [
        (layout(1, 1, 1), (MIXED, TOKEN_BY_TOKEN)),
        (layout(2, 2, 1), (MIXED, TOKEN_BY_TOKEN)),
        (layout(3, 3, 1, dcp_comm_backend="a2a", dcp_q_replicate=True), (MIXED,)),
        (layout(4, 2, 2, dcp_comm_backend="a2a", block_size=16), (MIXED,)),
        (layout(8, 8, 1), (FEWER_ENTRIES_THAN_RANKS,)),
        pytest.param(layout(8, 8, 1, index_hadamard=True), (MIXED,), marks=pytest.mark.thorough),
    ],
    ids=lambda x: f"tp{x.tensor_parallel_size}-dcp{x.decode_context_parallel_size}" if isinstance(x, DCPConfig) else "",
)
def test_every_layout_is_transformers(dcp: DCPConfig, schedules: Any) -> None:
    run_ranks(dcp.tensor_parallel_size, check, dcp, schedules)


WIDE = {"head_dim": 128, "qk_rope_head_dim": 64, "index_head_dim": 64}  # what fp8_ds_mla takes


@pytest.mark.parametrize(
    ("options", "tolerance", "quantile"),
    [
        ({"index_cache_dtype": "fp8"}, 1e-4, 0.8),  # where rounding changes what is selected, much changes
        ({"kv_cache_dtype": "fp8_ds_mla"}, 0.06, 1.0),
        ({"kv_cache_dtype": "fp8_ds_mla", "index_cache_dtype": "fp8", "index_hadamard": True}, 0.06, 0.8),
    ],
)
def test_quantized_caches(options: dict[str, Any], tolerance: float, quantile: float) -> None:
    run_ranks(2, check, layout(2, 2, 1, **options), (MIXED,), tolerance, quantile, WIDE)


PREFILLS = ((20, 33), (9, 30), (5, 17), (11, 14))


def compile_layer(number: int, is_dynamic: bool | None, num_steps: int) -> int:
    """On one rank: compare a layer with itself compiled, in steps with two prefills; return the number of graphs."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    steps = PREFILLS[:num_steps]
    lengths = [sum(tokens) for tokens in zip(*steps, strict=True)]
    hidden, outputs = [hidden_states(i, length) for i, length in enumerate(lengths)], []
    for is_compiled in (False, True):
        layers = Layers(tiny(), layout(1, 1, 1), lengths)
        layer = layers.layers[number]
        compiled = torch.compile(layer, fullgraph=True, dynamic=is_dynamic, backend="aot_eager")
        layers.layers, layers.cache.per_layer = [compiled if is_compiled else layer], [layers.cache[number]]
        with torch.inference_mode():
            outputs.append(layers.run(steps, hidden)[0])
    for mine, theirs in zip(*outputs, strict=True):
        torch.testing.assert_close(mine, theirs)
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@on_ranks(1, timeout=600)
def test_prefills_of_all_lengths_share_graphs() -> None:
    """Compile a layer with an indexer, and one without for which all sizes vary.

    torch.compile may make one graph for the first sizes, one for others, and one for a size of 1.
    """
    assert compile_layer(1, None, len(PREFILLS)) <= 3
    assert compile_layer(2, True, 1) <= 1


@pytest.mark.parametrize(("changes", "asked"), [({}, 2), ({"_FEW_TOKENS": 7}, 1), ({"_FEW_SCORES": 13}, 1)])
@on_ranks(1)
def test_small_steps_run_on_two_streams(changes: dict[str, int], asked: int) -> None:
    """A prefill of 8 tokens, which see up to 2 entries, in layers of windows alone, with an indexer and without."""
    forks = []

    def choose(device: torch.device, is_asked: bool) -> Any:
        forks.append(is_asked)
        return fork(device, is_asked)

    hidden = [hidden_states(0, 9)]
    layers = Layers(tiny(), layout(1, 1, 1), [9], "cpu", torch.float32)
    with torch.no_grad(), patch.multiple(layer_module, fork=choose, **changes):
        layers.run(((8,),), hidden)
        assert sum(forks) == asked, "layers that run kernels concurrently"
        forks.clear()
        layers.run(((8,), (1,)), hidden)
        assert sum(forks[len(forks) // 2 :]) == 2, "decodes always do"


@pytest.mark.gpu
@on_ranks(1, device="cuda")
def test_a_side_stream_changes_nothing() -> None:
    """Compare bytes with those of kernels that run one after the other."""
    sizes = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "num_attention_heads": 64, "o_groups": 8}
    lengths = [sum(tokens) for tokens in zip(*TOKEN_BY_TOKEN, strict=True)]
    hidden = [hidden_states(i, length).cuda().bfloat16() for i, length in enumerate(lengths)]
    outputs, forks = [], []
    for is_forked in (True, False):

        def choose(device: torch.device, is_asked: bool, is_forked: bool = is_forked) -> Any:
            forks.append(is_asked and is_forked)
            return fork(device, is_asked and is_forked)

        layers = Layers(tiny(**sizes), layout(1, 1, 1, block_size=64), lengths, "cuda", torch.bfloat16)
        with torch.no_grad(), patch.object(layer_module, "fork", choose):
            outputs.append([out for kind in layers.run(TOKEN_BY_TOKEN, hidden) for out in kind])
    assert True in forks
    for mine, theirs in zip(*outputs, strict=True):
        assert torch.equal(mine, theirs)
