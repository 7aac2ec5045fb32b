"""A pass over the graphs of torch.compile that makes a quantization after attention part of writing its output.

    compiled = torch.compile(model, options={"post_grad_custom_post_pass": OutputQuantFusion()})

It runs among inductor's passes, where a graph is flat and functional and the spellings of a quantization are reduced to
few operators. A separate backend would have to repeat inductor's work before its passes (decompositions), around them
(caches) and after them (code).
"""

import logging
import operator
from functools import partial
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import PatternMatcherPass, register_graph_pattern
from torch.fx import Graph, Node

from dcpmla.attention.output import formats
from dcpmla.attention.projection_calls import ValueProjection
from dcpmla.integrations import quantization_patterns, quantizers
from dcpmla.integrations.quantizers import insert, names_of, value_of

_logger = logging.getLogger(__name__)
_aten, _ours = torch.ops.aten, torch.ops.dcpmla
_FUSED = {  # a quantization -> W_UV with it
    _ours.quantize_fp8.default: _ours.project_values_fp8.default,
    _ours.quantize_fp8_groups.default: _ours.project_values_fp8_groups.default,
    _ours.quantize_nvfp4.default: _ours.project_values_nvfp4.default,
}


class OutputQuantFusion(CustomGraphPass):
    """A pass that lets attention's output be written quantized, in every layer of a graph that quantizes it afterwards.

    In a step of decodes alone the output is `project_values`; it and the quantization become the custom op that does
    both. In a step with prefills or padding its parts write rows of one result; they then write quantized rows.

    It matches `quantize_fp8`, `quantize_fp8_groups` and `quantize_nvfp4` of `attention/output/ops.py`, vLLM's operators
    for the same by name (`integrations/quantizers.py`), and `quantize_fp8` in plain torch:
    `(values.float() * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn)`, also with a reshape in between.

    Results equal the model's without the pass, within the guarantees of `attention/output/ops.py`. The pass therefore
    skips other rounding (`values / scale`), values with other readers, and groups that would cross heads.

    For each graph with attention's output it logs the number of fused layers, as a warning if it is 0.
    """

    def __init__(self) -> None:
        self._patterns = _make_patterns()

    def __call__(self, graph: Graph) -> None:
        """Rewrite `graph`, after inductor's decompositions, in place.

        Raises:
            ValueError: `graph` is not a Graph, but for example the module around it.
        """
        if not isinstance(graph, Graph):
            raise ValueError(
                f"graph is a {type(graph).__name__}; OutputQuantFusion is for post_grad_custom_post_pass, which gives "
                f"a torch.fx.Graph"
            )
        num_outputs = len(graph.find_nodes(op="call_function", target=_ours.project_values.default))
        empties = graph.find_nodes(op="call_function", target=_aten.empty.memory_format)
        num_outputs += sum(_is_write(user) for node in empties for user in node.users)
        if not num_outputs:
            return
        quantizers.rewrite_quantizations(graph, _will_fuse)
        num_fused = self._patterns.apply(graph)
        if num_fused:
            _logger.info(
                "OutputQuantFusion: attention writes its output quantized in %d of %d layers", num_fused, num_outputs
            )
        else:
            _logger.warning(
                "OutputQuantFusion: nothing to fuse in a graph with %d layers of attention: what follows each output "
                "is not a quantization that the pass knows, or not that alone",
                num_outputs,
            )

    def uuid(self) -> bytes:
        """Return the pass's key in inductor's cache of compiled graphs: a hash of the files that define it."""
        return get_hash_for_files((__file__, quantization_patterns.__file__, quantizers.__file__))


def _make_patterns() -> PatternMatcherPass:
    patterns = PatternMatcherPass(pass_name="dcpmla_output_quant")
    for quantize, pattern in quantization_patterns.all_patterns():
        fused = _FUSED[quantize]
        register_graph_pattern(pattern, extra_check=partial(_fits, fused), pass_dict=patterns)(partial(_fuse, fused))
    return patterns


def _will_fuse(quantize: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a call of a quantization would be fused, were it in the graph."""
    parameters = dict(zip(names_of(quantize), args, strict=True))
    parameters["values"] = values = parameters.pop("x")
    if quantize is _ours.quantize_fp8.default and values.target in (_aten.reshape.default, _aten.view.default):
        parameters["values"] = values.args[0]
    try:
        value_of(quantize, *args)
    except ValueError:  # values may have three dims, for example
        return False
    return len(values.users) == 1 and _can_fuse(_FUSED[quantize], parameters)


def _fits(fused: Any, match: Any) -> bool:
    """Return whether the match quantizes attention's output, and quantized rows can be written with equal results."""
    products = [node.meta["val"] for node in match.nodes if node.target is _aten.mul.Tensor]
    if products:  # plain torch multiplies in any dtype, by a scale of any shape and from anywhere
        scale = match.kwargs["scale"].meta["val"]
        if (
            scale.ndim > len(match.kwargs.get("shape", match.kwargs["values"].meta["val"].shape))
            or scale.device != products[0].device
            or any(product.dtype != torch.float32 for product in products)
        ):
            return False
    return _can_fuse(fused, match.kwargs)


def _can_fuse(fused: Any, parameters: dict[str, Any]) -> bool:
    values = parameters["values"]
    if len(values.users) != 1:
        return False
    try:
        if values.target is _ours.project_values.default:
            value_of(fused, *_arguments(fused, parameters))
            return True
        writes = _writes(values)
        for write in writes:
            _check_write(write, parameters)
    except ValueError:  # groups may cross heads, for example
        return False
    return bool(writes)


def _fuse(fused: Any, match: Any, **_: object) -> None:
    node, graph = match.output_node(), match.graph
    if match.kwargs["values"].target is _ours.project_values.default:
        new = insert(graph, fused, *_arguments(fused, match.kwargs))
        leftovers = [match.kwargs["values"]]
    else:
        results = _write_quantized(match)
        new, leftovers = results[0], _chain(match.kwargs["values"])
        for user in list(node.users) if "scale" not in match.kwargs else []:  # one of two results
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
    if "shape" in match.kwargs:
        new = insert(graph, _aten.reshape.default, new, match.kwargs["shape"])
    node.replace_all_uses_with(new)
    match.erase_nodes()
    for leftover in leftovers:
        graph.erase_node(leftover)


def _arguments(fused: Any, parameters: dict[str, Any]) -> list[Any]:
    """Return the fused op's arguments, from `project_values` and from the quantization after it."""
    names = names_of(_ours.project_values.default)
    found = {**parameters, **dict(zip(names, parameters["values"].args, strict=False))}
    return [found.get(name) for name in names_of(fused)]


def _is_write(node: Any) -> bool:
    """Return whether a node writes some rows of a result, in the form that functionalization gives it."""
    writers = _ours.project_rows_.default, _ours.write_rows_.default
    return node.target is torch.ops.higher_order.auto_functionalized_v2 and node.args[0] in writers


def _chain(values: Any) -> list[Any]:
    """Return the nodes of a result, from the last to the first: (result, write), (result, write), .., new memory; an
    empty list for values of another origin, or with other readers in between.
    """
    nodes = []
    while values.target is operator.getitem and _is_write(write := values.args[0]):
        nodes += [values, write]
        values = write.kwargs["_all_bases"][0]
    nodes.append(values)
    is_result = values.target is _aten.empty.memory_format and all(len(node.users) == 1 for node in nodes)
    return nodes if is_result else []


def _writes(values: Any) -> list[Any]:
    """Return the writes of a result in their order."""
    return _chain(values)[-2::-2]


def _quantization(parameters: dict[str, Any]) -> tuple[int, str, Any, bool]:
    """Return the group, the layout of scales, the scale given and whether scales are powers of two."""
    if "group_size" in parameters:
        return parameters["group_size"], parameters["scale_layout"], None, parameters["ue8m0"]
    if "global_scale" in parameters:
        return formats.NVFP4_GROUP, "", parameters["global_scale"], False
    return 1, "", parameters["scale"], False


def _check_write(write: Any, parameters: dict[str, Any]) -> None:
    """Raise ValueError for a write that cannot be one of quantized rows."""
    group, _, scale, _ = _quantization(parameters)
    fakes = {name: arg.meta["val"] if isinstance(arg, Node) else arg for name, arg in write.kwargs.items()}
    if write.args[0] is _ours.project_rows_.default:
        formats.check_projection(ValueProjection(fakes["out"], fakes["w_uv"], fakes["w_scales"]), group)
    else:
        formats.check_rows(fakes["x"], group)
    if scale is not None:
        formats.check_scale("scale", scale.meta["val"], parameters["values"].meta["val"].device)


def _write_quantized(match: Any) -> tuple[Any, Any]:
    """Insert writes of quantized rows in place of plain ones; return the values and the scales."""
    graph, values = match.graph, match.kwargs["values"]
    group, scale_layout, scale, ue8m0 = _quantization(match.kwargs)
    empty = _chain(values)[-1]
    rows = insert(graph, _ours.empty_rows.default, *empty.args[0], group, scale_layout, values.meta["val"].device)
    results = insert(graph, operator.getitem, rows, 0), insert(graph, operator.getitem, rows, 1)
    for write in _writes(values):
        bases = list(results[:1] if group == 1 else results)
        added = {"scale": scale, "ue8m0": ue8m0, "_scales_base_index": None if group == 1 else 1, "_all_bases": bases}
        new = graph.call_function(write.target, write.args, {**write.kwargs, **added})
        new.meta["val"] = None, *(base.meta["val"] for base in bases)
        written = tuple(insert(graph, operator.getitem, new, index + 1) for index in range(len(bases)))
        results = written[0], written[-1]
    return results
