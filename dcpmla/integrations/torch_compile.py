"""A pass over the graphs of torch.compile that makes a quantization after attention part of W_UV's product.

    compiled = torch.compile(model, options={"post_grad_custom_post_pass": OutputQuantFusion()})

It runs among inductor's passes, where a graph is flat and functional and the spellings of a quantization have come down
to few operators. A backend of our own would have to repeat what inductor does before its passes (decompositions),
around them (caches) and after them (code).
"""

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import (
    MULTIPLE,
    CallFunction,
    KeywordArg,
    Match,
    PatternExpr,
    PatternMatcherPass,
    register_graph_pattern,
)
from torch.fx import Graph, Node, map_arg

from dcpmla.attention.output import ops  # noqa: F401  (registers the operators)
from dcpmla.cache.formats import FP8, FP8_MAX

_logger = logging.getLogger(__name__)
_aten, _prims, _ours = torch.ops.aten, torch.ops.prims, torch.ops.dcpmla


class OutputQuantFusion(CustomGraphPass):
    """A pass that replaces `project_values` and the quantization after it by the custom op that does both, in every
    layer of a graph.

    It knows `quantize_fp8`, `quantize_fp8_groups` and `quantize_nvfp4` of `attention/output/ops.py`, and the first of
    them in plain torch: `(values.float() * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn)`, also with a reshape
    in between.

    Results are those of the model without the pass, as far as `attention/output/ops.py` promises. So it leaves alone
    what rounds in another way (`values / scale`), values that something else reads too, and groups that would cross
    heads. A step with prefills or padding has no `project_values`: its parts write rows of one result.

    For each graph with `project_values` it logs in how many layers it did so; where in none, as a warning.
    """

    def __init__(self) -> None:
        self._patterns = _make_patterns()

    def __call__(self, graph: Graph) -> None:
        """Rewrite `graph`, after inductor's decompositions, in place.

        Raises:
            ValueError: another thing than a graph, such as the module around it.
        """
        if not isinstance(graph, Graph):
            raise ValueError(
                f"graph is a {type(graph).__name__}; OutputQuantFusion is for post_grad_custom_post_pass, which gives "
                f"a torch.fx.Graph"
            )
        num_projections = len(graph.find_nodes(op="call_function", target=_ours.project_values.default))
        if not num_projections:
            return
        num_fused = self._patterns.apply(graph)
        if num_fused:
            _logger.info(
                "OutputQuantFusion: W_UV's product quantizes its result in %d of %d layers", num_fused, num_projections
            )
        else:
            _logger.warning(
                "OutputQuantFusion: nothing to fuse in a graph with %d layers of attention: what follows each "
                "project_values is not a quantization that the pass knows, or not that alone",
                num_projections,
            )

    def uuid(self) -> bytes:
        """Return a key for inductor's cache of compiled graphs: another text of this file makes other graphs."""
        return get_hash_for_files((__file__,))


def _make_patterns() -> PatternMatcherPass:
    """Return the patterns, their arguments named as the fused op's; `shape` is that of a reshape in between."""
    patterns = PatternMatcherPass(pass_name="dcpmla_output_quant")
    values = CallFunction(_ours.project_values.default, KeywordArg("out"), KeywordArg("w_uv"))
    shaped = _reshape(values)
    scale = KeywordArg("scale")
    groups = map(KeywordArg, ("group_size", "scale_layout", "ue8m0"))
    for fused, pattern in [
        (_ours.project_values_fp8, CallFunction(_ours.quantize_fp8.default, values, scale)),
        (_ours.project_values_fp8, CallFunction(_ours.quantize_fp8.default, shaped, scale)),
        (_ours.project_values_fp8_groups, CallFunction(_ours.quantize_fp8_groups.default, values, *groups)),
        (_ours.project_values_nvfp4, CallFunction(_ours.quantize_nvfp4.default, values, KeywordArg("global_scale"))),
        *((_ours.project_values_fp8, pattern) for pattern in _plain_fp8(values, shaped, scale)),
    ]:
        register_graph_pattern(pattern, extra_check=partial(_fits, fused.default), pass_dict=patterns)(
            partial(_fuse, fused.default)
        )
    return patterns


def _plain_fp8(values: PatternExpr, shaped: PatternExpr, scale: PatternExpr) -> Iterator[PatternExpr]:
    """Yield all spellings of `(values.float() * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn)`, decomposed."""
    inverse = CallFunction(_aten.reciprocal.default, scale, _users=MULTIPLE)
    for one in (inverse, CallFunction(_aten.mul.Tensor, inverse, 1, _users=MULTIPLE)):  # scale.reciprocal(), 1 / scale
        for x in (
            values,
            shaped,
            _convert(values, torch.float32),
            _convert(shaped, torch.float32),
            _reshape(_convert(values, torch.float32)),
        ):
            for factors in ((x, one), (one, x)):
                product = CallFunction(_aten.mul.Tensor, *factors)
                below = CallFunction(_aten.clamp_max.default, product, FP8_MAX)
                above = CallFunction(_aten.clamp_min.default, product, -FP8_MAX)
                yield _convert(CallFunction(_aten.clamp_min.default, below, -FP8_MAX), FP8)
                yield _convert(CallFunction(_aten.clamp_max.default, above, FP8_MAX), FP8)


def _reshape(x: PatternExpr) -> PatternExpr:
    return CallFunction([_aten.reshape.default, _aten.view.default], x, KeywordArg("shape"))


def _convert(x: PatternExpr, dtype: torch.dtype) -> PatternExpr:
    return CallFunction(_prims.convert_element_type.default, x, dtype)


def _fits(fused: Any, match: Match) -> bool:
    """Return whether the fused op takes these arguments, and so gives what the matched nodes give."""
    products = [node.meta["val"] for node in match.nodes if node.target is _aten.mul.Tensor]
    if products:  # plain torch multiplies in any dtype, by a scale of any shape and from anywhere
        scale = match.kwargs["scale"].meta["val"]
        if (
            scale.ndim > 1
            or scale.device != products[0].device
            or any(product.dtype != torch.float32 for product in products)
        ):
            return False
    try:
        _value(fused, *_arguments(fused, match))
    except ValueError:  # such as groups that would cross heads
        return False
    return True


def _fuse(fused: Any, match: Match, **_: object) -> None:
    node = match.output_node()
    new = _insert(match.graph, fused, *_arguments(fused, match))
    if "shape" in match.kwargs:
        new = _insert(match.graph, _aten.reshape.default, new, match.kwargs["shape"])
    node.replace_all_uses_with(new)
    match.erase_nodes()


def _arguments(fused: Any, match: Match) -> list[Any]:
    return [match.kwargs[argument.name] for argument in fused._schema.arguments]


def _insert(graph: Graph, target: Any, *args: Any) -> Node:
    node = graph.call_function(target, args)
    node.meta["val"] = _value(target, *args)
    return node


def _value(target: Any, *args: Any) -> Any:
    """Return what a node would hold, as fake tensors."""
    return target(*map_arg(args, lambda node: node.meta["val"]))
