"""Drafts of an MTP module: SGLang's factory of their backends, and the size of their cache."""

from typing import Any

from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.runtime_context import attention_backends
from sglang.srt.speculative.draft_utils import DraftBackendFactory

from dcpmla.integrations.sglang.names import NAME


class DraftSteps:
    """The backends of a draft's steps after the first, which an extension of the module's cache makes: each lays out
    its own lengths, before the steps or in their graph.

    Args:
        backend: Backend of the module.
        num_steps: Tokens of a draft.
    """

    needs_cpu_seq_lens = False

    def __init__(self, backend: Any, num_steps: int) -> None:
        self.attn_backends = [backend.ahead(number) for number in range(1, num_steps)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Lay out all steps."""
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Do nothing: all metadata is made on the device."""

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Lay out all steps by operations that a graph records."""
        for backend in self.attn_backends:
            backend.init_forward_metadata_in_graph(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Do nothing: a graph's metadata is in its own memory."""


def install() -> None:
    """Have SGLang draft with this package's backend where it attends with it, over a cache that is sharded as the
    model's.

    SGLang's factory knows its own backends by name. And it allocates a module's cache for all tokens on each rank,
    though dense MLA under DCP writes and reads this rank's share alone.
    """
    new_steps, new_extension = (
        DraftBackendFactory.create_decode_backend,
        DraftBackendFactory.create_draft_extend_backend,
    )
    scale = KVCacheConfigurator.loc_space_scale.fget

    def steps(factory: Any) -> Any:
        if not _is_ours():
            return new_steps(factory)
        num_steps = factory.speculative_num_steps
        return DraftSteps(factory.draft_model_runner.attn_backend, num_steps) if num_steps > 1 else None

    def extension(factory: Any) -> Any:
        return factory.draft_model_runner.attn_backend if _is_ours() else new_extension(factory)

    DraftBackendFactory.create_decode_backend = steps
    DraftBackendFactory.create_draft_extend_backend = extension
    KVCacheConfigurator.loc_space_scale = property(lambda sizes: 1 if _is_ours() else scale(sizes))


def _is_ours() -> bool:
    """Return whether the process attends with this package's backend; others for drafts are refused (`checks`)."""
    return NAME in attention_backends()
