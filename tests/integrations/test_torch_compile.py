"""`OutputQuantFusion`: the graphs it rewrites, those it leaves alone, what it says; results are the model's own, bit
for bit.
"""

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule

from dcpmla.attention.output.formats import OutputQuant
from dcpmla.attention.output.ops import quantize_output
from dcpmla.attention.projection_calls import ValueProjection
from dcpmla.attention.projections import project_values
from dcpmla.integrations.torch_compile import OutputQuantFusion
from tests.attention.test_compile import DECODES, MIXED, SMALL, Batch, make_layer, run_layer
from tests.support.ranks import run_ranks

FP8 = torch.float8_e4m3fn
HEADS, V, LATENT = 2, 128, 16
Quantize = Callable[[Tensor, Tensor], Sequence[Tensor]]  # of values, with a scale


def plain_fp8(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() * (1 / scale)).clamp(-448, 448).to(FP8)


def quantize_fp8(x: Tensor, scale: Tensor) -> Tensor:
    return quantize_output(x, OutputQuant("fp8", scale))[0]


OPERATORS: dict[str, Quantize] = {
    "fp8": lambda x, scale: [quantize_fp8(x, scale)],
    "groups of 128": lambda x, _: quantize_output(x, OutputQuant("fp8_groups", None, 128, "tma", True)),
    "groups of 64": lambda x, _: quantize_output(x, OutputQuant("fp8_groups", group_size=64)),
    "nvfp4": lambda x, scale: quantize_output(x, OutputQuant("nvfp4", scale)),
}
PLAIN: dict[str, Quantize] = {
    "plain": lambda x, scale: [plain_fp8(x, scale)],
    "reciprocal, read elsewhere": lambda x, scale: [
        (x * (inverse := scale.reciprocal())).clamp(-448.0, 448.0).to(FP8),
        inverse,
    ],
    "scale without dims, factors the other way": lambda x, scale: [
        ((1.0 / scale[0]) * x.float()).clamp(max=448).clamp(min=-448).to(FP8)
    ],
    "inverse read elsewhere": lambda x, scale: [(x.float() * (inverse := 1 / scale)).clamp(-448, 448).to(FP8), inverse],
    "scale of two dims": lambda x, scale: [plain_fp8(x, scale.view(1, 1))],
    "by head": lambda x, scale: [plain_fp8(x.view(-1, HEADS, V), scale).flatten(1)],
    "widened, then by head": lambda x, scale: [
        torch.clamp(x.float().view(-1, HEADS, V) * (1 / scale), -448, 448).to(FP8)
    ],
    "operator, by head": lambda x, scale: [quantize_fp8(x.view(-1, V), scale).view(x.shape)],
}
LEFT_ALONE: dict[str, Quantize] = {
    "another user": lambda x, scale: [plain_fp8(x, scale), x + 1],
    "quantized twice": lambda x, scale: [quantize_fp8(x, scale), *quantize_output(x, OutputQuant("fp8_groups"))],
    "joined with prefill's": lambda x, scale: [quantize_fp8(torch.cat([x, torch.ones_like(x)]), scale)],
    "a part of the rows": lambda x, scale: [quantize_fp8(x[1:], scale)],
    "scale divides": lambda x, scale: [(x / scale).clamp(-448, 448).to(FP8)],
    "scale of each column": lambda x, scale: [plain_fp8(x, scale.expand(HEADS * V))],
    "scale adds a dim": lambda x, scale: [plain_fp8(x, scale.view(1, 1, 1))],
    "scale in float64": lambda x, scale: [plain_fp8(x, scale[0].double())],
    "product in bfloat16": lambda x, scale: [(x * (1 / scale[0])).clamp_min(-448).clamp_max(448).to(FP8)],
    "other bounds": lambda x, scale: [(x.float() * (1 / scale)).clamp(-240, 240).to(FP8)],
    "other dtype": lambda x, scale: [(x.float() * (1 / scale)).clamp(-448, 448).to(torch.float8_e5m2)],
    "not clamped": lambda x, scale: [(x.float() * (1 / scale)).to(FP8)],
}


def whole_numbers(*shape: int) -> Tensor:
    """In bfloat16; sums of their products are exact, so their order is all one."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(shape[0])).bfloat16()


class Layers(nn.Module):
    """A projection for each quantization, and that after it."""

    def __init__(self, quantizations: Sequence[Quantize], value_dim: int = V) -> None:
        super().__init__()
        self.w_uv = nn.Parameter(whole_numbers(len(quantizations), HEADS, value_dim, LATENT), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor([0.7]), requires_grad=False)
        self.quantizations = quantizations

    def forward(self, out: Tensor) -> list[Tensor]:
        pairs = zip(self.quantizations, self.w_uv, strict=True)
        return [
            tensor
            for quantize, w_uv in pairs
            for tensor in quantize(project_values(ValueProjection(out, w_uv)), self.scale)
        ]


class Recorded(OutputQuantFusion):
    """A pass that counts the operators of this package in its graphs, those that write included."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()

    def __call__(self, graph: Graph) -> None:
        super().__call__(graph)
        graph.lint()
        writing = torch.ops.higher_order.auto_functionalized_v2
        targets = (node.args[0] if node.target is writing else node.target for node in graph.nodes)
        names = (str(target).split(".") for target in targets)
        self.operators.update(name[1] for name in names if name[0] == "dcpmla")

    def uuid(self) -> bytes:
        return uuid4().bytes  # a graph out of inductor's cache would not come by here


def as_in_inductor(fusion: OutputQuantFusion) -> Any:
    """Make a backend that runs the pass where inductor does, after its decompositions, then runs the graph."""

    def run_pass(module: GraphModule, _: object) -> GraphModule:
        fusion(module.graph)
        module.recompile()
        return module

    return aot_autograd(fw_compiler=run_pass, decompositions=select_decomp_table())


def run_layers(layers: Layers, in_inductor: bool = False) -> Counter[str]:
    """Compile them and compare for two numbers of tokens, which share a graph. Returns the operators in it."""
    torch._dynamo.reset()
    fusion = Recorded()
    how: dict[str, Any] = (
        {"options": {"post_grad_custom_post_pass": fusion}} if in_inductor else {"backend": as_in_inductor(fusion)}
    )
    compiled = torch.compile(layers, fullgraph=True, dynamic=True, **how)
    for num_tokens in (5, 3):
        out = whole_numbers(num_tokens, HEADS, LATENT).to(layers.scale.device)
        with torch.inference_mode():
            assert_same(compiled(out), layers(out))
    return fusion.operators


def assert_same(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Bit for bit, and in memory alike."""
    for pair in zip(got, wanted, strict=True):
        (dtype, shape, strides, values), expected = (
            (x.dtype, x.shape, x.stride(), x.flatten().clone().view(torch.uint8)) for x in pair
        )
        assert (dtype, shape, strides) == expected[:3]
        assert torch.equal(values, expected[3])


def assert_said(caplog: pytest.LogCaptureFixture, level: int, part: str) -> None:
    """Once: two numbers of tokens share a graph."""
    (record,) = (record for record in caplog.records if record.name.startswith("dcpmla"))
    assert record.levelno == level
    assert part in record.message


def test_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    assert run_layers(Layers([*LEFT_ALONE.values()]))["project_values"] == len(LEFT_ALONE)
    assert_said(caplog, logging.WARNING, f"nothing to fuse in a graph with {len(LEFT_ALONE)} layers")


@pytest.mark.parametrize(("kind", "value_dim"), [("groups of 128", 64), ("nvfp4", 8)])
def test_groups_that_would_cross_heads(kind: str, value_dim: int, caplog: pytest.LogCaptureFixture) -> None:
    assert run_layers(Layers([OPERATORS[kind]], value_dim))["project_values"] == 1
    assert_said(caplog, logging.WARNING, "nothing to fuse")


def test_other_graphs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "dcpmla"):
        OutputQuantFusion()(Graph())
    assert not [record for record in caplog.records if record.name.startswith("dcpmla")]
    with pytest.raises(ValueError, match=r"graph is a GraphModule; .* post_grad_custom_post_pass, .* torch.fx.Graph"):
        OutputQuantFusion()(GraphModule({}, Graph()))  # type: ignore[arg-type]
    assert OutputQuantFusion().uuid() == OutputQuantFusion().uuid() != b""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_in_inductor(device: str, caplog: pytest.LogCaptureFixture) -> None:
    """All kinds in a graph, beside a layer that has none."""
    quantizations = [*OPERATORS.values(), *PLAIN.values()]
    with caplog.at_level(logging.INFO, "dcpmla"):
        operators = run_layers(Layers([*quantizations, lambda x, _: [x]]).to(device), in_inductor=True)
    assert operators == {"project_quantized": 12, "project_values": 1}
    assert_said(caplog, logging.INFO, "in 12 of 13 layers")


class Attention(nn.Module):
    """Layers over one cache, each with a quantization of another kind and a linear after it."""

    def __init__(self) -> None:
        super().__init__()
        config = dataclasses.replace(SMALL, num_heads=HEADS, v_head_dim=V, attention_bias=False)
        self.quantizations = OPERATORS["groups of 128"], PLAIN["plain"]
        self.layers = [make_layer(config, 1, "auto", torch.float32, "cpu") for _ in self.quantizations]
        self.scale = torch.tensor([0.013])

    def forward(self, hidden_states: Tensor, *step: Any) -> Tensor:
        for layer, quantize in zip(self.layers, self.quantizations, strict=True):
            values = layer.heads_output(hidden_states, *step)
            assert isinstance(values, Tensor)
            hidden_states = hidden_states + layer.o_proj(quantize(values, self.scale)[0].to(values.dtype))
        return hidden_states


def check_attention(batch: Batch, padding: int = 0) -> dict[str, int]:
    """Return the operators that make and quantize outputs in a compiled step."""
    model, fusion = Attention(), Recorded()
    compiled = torch.compile(model, fullgraph=True, backend=as_in_inductor(fusion))
    end = padding - 2  # run_layer's rows of padding. The cache is compared too
    got, wanted = (
        run_layer(model.layers[0], batch, lambda x, *step, f=f: f(x[: len(x) + end], *step)) for f in (compiled, model)
    )
    assert_same(got, wanted)
    outputs = ("project_", "write_rows_", "empty_rows", "quantize_")
    return {name: count for name, count in fusion.operators.items() if name.startswith(outputs)}


def check_steps() -> None:
    assert check_attention(DECODES[0]) == {"project_quantized": 2}
    assert check_attention(MIXED) == {"empty_rows": 2, "project_rows_": 2, "write_rows_": 2}  # a prefill's rows
    assert check_attention(DECODES[0], 2) == {"empty_rows": 2, "project_rows_": 2, "write_rows_": 2}  # padding


def test_layers_of_attention() -> None:
    """All are fused: in a decode step with W_UV's product, in one with prefills or padding with each write of rows."""
    run_ranks(1, check_steps)
