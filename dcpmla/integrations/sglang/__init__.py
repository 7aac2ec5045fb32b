"""The plug-in for SGLang: `--attention-backend dcpmla` runs DeepSeek's MLA models over our attention and exchange.

SGLang finds `register` by the entry point `sglang.srt.plugins`, in each of its processes; nothing else imports this.
SGLang's internals that it needs beyond `AttentionBackend` are named here, in `backend.take_over` and `drafts.install`.
"""

import logging
from importlib.metadata import version
from typing import Any

from dcpmla.integrations.sglang.names import NAME

SUPPORTED = ("0.5.22", "0.5.23")  # releases that tests ran with; SGLang moves the names below between releases

logger = logging.getLogger(__name__)


def register() -> None:
    """Add the backend to SGLang's tables, or warn in one line that this release of SGLang is not known."""
    found = version("sglang")
    if found.split(".post")[0] not in SUPPORTED:
        logger.warning(
            "dcpmla: sglang %s is not among the tested releases (%s); --attention-backend %s is not added",
            found,
            ", ".join(SUPPORTED),
            NAME,
        )
        return
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry

    from dcpmla.integrations.sglang.drafts import install

    if NAME not in ATTENTION_BACKENDS:  # plug-ins may be loaded twice
        add_attention_backend_choices([NAME])
        register_attention_backend(NAME)(_new_backend)
        AttentionBackendRegistry.register(NAME, _forward_method)
        install()


def _new_backend(runner: Any) -> Any:
    from dcpmla.integrations.sglang.backend import Backend

    return Backend(runner)


def _forward_method(attention: Any, forward_batch: Any) -> Any:
    """Return how a layer prepares a batch: absorbed queries, or keys and values of heads for prefill."""
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    from dcpmla.integrations.sglang.metadata import is_prefill

    return AttnForwardMethod.MHA if is_prefill(forward_batch) else AttnForwardMethod.MLA
