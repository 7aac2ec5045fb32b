"""The attention of vLLM's layers, timed with the caches and metadata of vLLM's last step (`vllm_engine.py`)."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from dcpmla.bench.timing import Timing, time_operation

_KINDS = {0: "window", 1: "window", 4: "csa", 128: "hca"}  # The keys count the tokens in an entry of V4's cache.
Timed = Iterator[tuple[dict[str, Any], Timing]]


class Parts:
    """The attention of dense layers, from queries to outputs."""

    def __init__(self, engine: Any, recorder: Any) -> None:
        forward_context = engine.vllm_config.compilation_config.static_forward_context
        self.layers = [layer for layer in forward_context.values() if hasattr(layer, "impl")]
        self.recorder, self.device = recorder, self.layers[0].kv_cache.device

    @property
    def exchange(self) -> str:
        """Return the name of this package's exchange."""
        return self.layers[0].impl.exchange.name

    def decode(self, batch: int) -> Timed:
        """Time a layer between absorbed queries and merged rows, in the last step. Collective over the job.

        Raises:
            RuntimeError: That step was another one.
        """
        metadata = self.recorder.metadata
        if metadata.num_decode_tokens != batch or metadata.num_prefills:
            raise RuntimeError(f"vLLM's last step was not one of {batch} decodes")
        yield {}, time_decode(self.layers, metadata, self.device)

    def prefill(self, num_new: int) -> Timed:
        """Time a layer between queries and outputs, in the last step. Collective over the job.

        Raises:
            RuntimeError: That step was another one.
        """
        metadata = self.recorder.metadata
        if (metadata.num_reqs, metadata.num_actual_tokens) != (1, num_new):
            raise RuntimeError(f"vLLM's last step was not a prefill of {num_new} tokens")
        route = "absorbed" if metadata.prefill is None else "mha"
        yield {"route": route}, time_prefill(self.layers, metadata, num_new, self.device)


class Modules:
    """Sparse and compressed layers as modules, from hidden states to hidden states: backends divide the work between
    index, selection and attention in different ways.
    """

    def __init__(self, engine: Any, recorder: Any) -> None:
        (runner,) = engine.collective_rpc(lambda worker: worker.model_runner)
        recorder.watch(runner)
        layers = runner.model.model.layers
        modules = [layer.self_attn if hasattr(layer, "self_attn") else layer.attn for layer in layers]
        self.recorder, self.config, self.device = recorder, engine.vllm_config, runner.device
        self.hidden_size = self.config.model_config.hf_config.hidden_size
        self.kinds: dict[str | None, list[Any]] = {}
        for module in modules:
            ratio = getattr(module, "compress_ratio", None)
            self.kinds.setdefault(None if ratio is None else _KINDS[ratio], []).append(module)

    @property
    def exchange(self) -> str:
        """Return the name of this package's exchange."""
        if self.config.parallel_config.decode_context_parallel_size == 1:
            return "none"
        from vllm.distributed.parallel_state import get_dcp_group

        from dcpmla.integrations.vllm.exchange import exchange_of

        return exchange_of(get_dcp_group().device_group, self.device).name

    def decode(self, batch: int) -> Timed:
        """Time each kind of layers in the last step, one of decodes. Collective over the job.

        Raises:
            RuntimeError: That step was another one.
        """
        return self._time(batch, batch)

    def prefill(self, num_new: int) -> Timed:
        """Time each kind of layers in the last step, one request's prefill. Collective over the job.

        Raises:
            RuntimeError: That step was another one.
        """
        with choices_of_eager_steps():
            yield from self._time(1, num_new)

    def _time(self, num_reqs: int, num_tokens: int) -> Timed:
        from vllm.forward_context import set_forward_context

        step = self.recorder.step
        if (step.num_reqs, step.num_tokens) != (num_reqs, num_tokens):
            raise RuntimeError(f"vLLM's last step was not one of {num_reqs} requests and {num_tokens} tokens")
        hidden = torch.randn(num_tokens, self.hidden_size, dtype=torch.bfloat16, device=self.device)
        positions = step.positions[:num_tokens].clone()
        context = partial(set_forward_context, step.metadata, self.config, num_tokens, slot_mapping=step.slots)
        for kind, modules in self.kinds.items():

            def attend(index: int, modules: list[Any] = modules) -> Any:
                return modules[index](positions=positions, hidden_states=hidden)

            with torch.inference_mode(), context():
                timing = time_operation(attend, self.device, len(modules), seconds=1.0)
            yield {} if kind is None else {"layer_kind": kind}, timing


@contextmanager
def choices_of_eager_steps() -> Iterator[None]:
    """Make vLLM's modules choose in a capture as in a step without a graph: prefills have none. A graph of vLLM's own
    replays with other requests, so no selection and no entry may be left out of it.
    """
    is_capturing = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: False
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = is_capturing


def time_prefill(layers: list[Any], metadata: Any, num_tokens: int, device: torch.device) -> Timing:
    """Time vLLM's layer in a prefill, from queries to outputs: one layer's share of all layers' calls."""
    first = layers[0]
    new = partial(torch.randn, dtype=torch.bfloat16, device=device)
    query = new(num_tokens, first.num_heads, first.qk_nope_head_dim + first.qk_rope_head_dim)
    latents, rope = new(num_tokens, first.kv_lora_rank), new(num_tokens, 1, first.qk_rope_head_dim)
    output = new(num_tokens, first.num_heads * first.v_head_dim)

    def attend(index: int) -> None:
        layer = layers[index]
        layer.forward_impl(query, latents, rope, layer.kv_cache, metadata, output)

    with torch.inference_mode():
        return time_operation(attend, device, len(layers), seconds=1.0)


def time_decode(layers: list[Any], metadata: Any, device: torch.device) -> Timing:
    """Time what vLLM's layer calls between absorbed queries and merged rows: one layer's share of all layers' calls."""
    layer, num_tokens = layers[0], metadata.num_decode_tokens
    widths = layer.kv_lora_rank, layer.qk_rope_head_dim
    parts = [torch.randn(num_tokens, layer.num_heads, width, dtype=torch.bfloat16, device=device) for width in widths]

    def attend(index: int) -> Any:
        layer = layers[index]
        manager, impl = layer.dcp_manager, layer.impl
        if manager is None:
            return impl.forward_mqa(tuple(parts), layer.kv_cache, metadata, layer)
        out, lse = impl.forward_mqa(manager.query_gather(query), layer.kv_cache, metadata, layer)
        query_start_loc = metadata.query_start_loc[: metadata.num_decodes + 1]
        return manager.combine(out, lse, seq_lens=metadata.decode.seq_lens, query_start_loc=query_start_loc)

    query = torch.cat(parts, -1)
    with torch.inference_mode():
        return time_operation(attend, device, len(layers), seconds=1.0)
