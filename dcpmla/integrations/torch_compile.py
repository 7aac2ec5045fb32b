"""A pass over the graphs of torch.compile that makes a quantization after attention part of writing its output.

    compiled = torch.compile(model, options={"post_grad_custom_post_pass": OutputQuantFusion()})

It runs among inductor's passes, where a graph is flat and functional and the spellings of a quantization are reduced to
few operators. A separate backend would have to repeat inductor's work before its passes (decompositions), around them
(caches) and after them (code).
"""

import logging
import operator
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import PatternMatcherPass, register_graph_pattern
from torch.fx import Graph, Node, map_arg

from dcpmla.attention.output import formats
from dcpmla.attention.output.formats import OutputQuant
from dcpmla.attention.projection_calls import ValueProjection
from dcpmla.integrations import quantization_patterns, quantizers
from dcpmla.integrations.quantizers import insert, value_of

_logger = logging.getLogger(__name__)
_aten, _ours = torch.ops.aten, torch.ops.dcpmla
_quantize, _project = _ours.quantize_output.default, _ours.project_quantized.default


class OutputQuantFusion(CustomGraphPass):
    """A pass that lets attention's output be written quantized, in every layer of a graph that quantizes it afterwards.

    In a step of decodes alone the output is `project_values`; it and the quantization become the custom op that does
    both. In a step with prefills or padding its parts write rows of one result; they then write quantized rows.

    It matches `quantize_output` of `attention/output/ops.py`, vLLM's operators for the same by name
    (`integrations/quantizers.py`), and fp8 in plain torch:
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
    for pattern in quantization_patterns.all_patterns():
        register_graph_pattern(pattern, extra_check=_fits, pass_dict=patterns)(_fuse)
    return patterns


def _will_fuse(values: Node, quant: OutputQuant) -> bool:
    """Return whether a call of `quantize_output` would be fused, were it in the graph."""
    parameters = {**quant._asdict(), "values": values}
    if quant.format == "fp8" and values.target in (_aten.reshape.default, _aten.view.default):
        parameters["values"] = values.args[0]
    try:
        value_of(_quantize, values, *quant)
    except ValueError:  # values may have three dims, for example
        return False
    return len(values.users) == 1 and _can_fuse(parameters)


def _fits(match: Any) -> bool:
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
    return _can_fuse(match.kwargs)


def _can_fuse(parameters: dict[str, Any]) -> bool:
    values = parameters["values"]
    if len(values.users) != 1:
        return False
    try:
        if values.target is _ours.project_values.default:
            value_of(_project, *_arguments(parameters))
            return True
        writes = _writes(values)
        for write in writes:
            _check_write(write, parameters)
    except ValueError:  # groups may cross heads, for example
        return False
    return bool(writes)


def _fuse(match: Any, **_: object) -> None:
    node, graph, values = match.output_node(), match.graph, match.kwargs["values"]
    if values.target is _ours.project_values.default:
        new = insert(graph, _project, *_arguments(match.kwargs))
        results, leftovers = [insert(graph, operator.getitem, new, index) for index in range(2)], [values]
    else:
        results, leftovers = list(_write_quantized(match)), _chain(values)
    if "shape" in match.kwargs:
        results[0] = insert(graph, _aten.reshape.default, results[0], match.kwargs["shape"])
    for user in list(node.users) if node.target is _quantize else []:
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    node.replace_all_uses_with(results[0])
    match.erase_nodes()
    for leftover in leftovers:
        graph.erase_node(leftover)


def _quant_of(parameters: dict[str, Any]) -> OutputQuant:
    """Return a match's quantization; fp8 in plain torch has a scale alone."""
    options = {name: parameters[name] for name in OutputQuant._fields if name in parameters}
    return OutputQuant(**{"format": "fp8"} | options)


def _arguments(parameters: dict[str, Any]) -> list[Any]:
    """Return the arguments of `project_quantized`, from `project_values` and from the quantization after it."""
    return [*parameters["values"].args, *_quant_of(parameters)]


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


def _check_write(write: Any, parameters: dict[str, Any]) -> None:
    """Raise ValueError for a write that cannot be one of quantized rows."""
    quant: OutputQuant = map_arg(_quant_of(parameters), lambda node: node.meta["val"])
    group = quant.checked(parameters["values"].meta["val"].device).group
    fakes = {name: arg.meta["val"] if isinstance(arg, Node) else arg for name, arg in write.kwargs.items()}
    if write.args[0] is _ours.project_rows_.default:
        formats.check_projection(ValueProjection(fakes["out"], fakes["w_uv"], fakes["w_scales"]), group)
    else:
        formats.check_rows(fakes["x"], group)


def _write_quantized(match: Any) -> tuple[Any, Any]:
    """Insert writes of quantized rows in place of plain ones; return the values and the scales."""
    graph, values = match.graph, match.kwargs["values"]
    quant = _quant_of(match.kwargs)
    has_scales = quant.format != "fp8"
    empty = _chain(values)[-1]
    rows = insert(graph, _ours.empty_rows.default, *empty.args[0], *quant, values.meta["val"].device)
    results = insert(graph, operator.getitem, rows, 0), insert(graph, operator.getitem, rows, 1)
    for write in _writes(values):
        bases = list(results if has_scales else results[:1])
        options = {"scale": quant.scale, "ue8m0": quant.ue8m0}
        added = {**options, "_scales_base_index": 1 if has_scales else None, "_all_bases": bases}
        new = graph.call_function(write.target, write.args, {**write.kwargs, **added})
        new.meta["val"] = None, *(base.meta["val"] for base in bases)
        written = tuple(insert(graph, operator.getitem, new, index + 1) for index in range(len(bases)))
        results = written[0], written[-1]
    return results
