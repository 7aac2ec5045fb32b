"""The plug-in for vLLM, found by the entry point `vllm.general_plugins`. Nothing else imports this package.

It has the attention of dense MLA models (`backend`), of sparse MLA (`sparse`) and of DeepSeek-V4 (`compressed`), their
exchange included, or the exchange alone, under vLLM's own kernels (`exchange`). `names` lists the internals of vLLM
that it uses.
"""

import logging
import os

from dcpmla.integrations.vllm.invariance import is_batch_invariant

FIRST_VERSION, END_VERSION = (0, 32), (0, 34)  # vLLM's versions that tests/engines runs with
FIRST_WITH_V4 = (0, 33)  # `compressed` runs from this version on
MODES = ("custom", "default", "exchange", "off")
# vLLM's choices on Hopper, for dense MLA on CPUs, too.
CHOSEN_BY_VLLM = (
    "FLASH_ATTN_MLA",
    "CPU_MLA",
    "AMX_MLA",
    "FLASHINFER_MLA_SPARSE_SM90",
    "FLASH_ATTN_MLA_SPARSE",
    "FLASHMLA_SPARSE",
)
BACKENDS = "dcpmla.integrations.vllm.choice"  # module with a backend for each name

logger = logging.getLogger(__name__)


def register() -> None:
    """Register what `DCPMLA_VLLM` asks for. vLLM calls this in each of its processes, maybe more than once.

    - custom (the default): `--attention-backend CUSTOM` is this package's.
    - default: so are the backends that vLLM chooses by itself on Hopper and on CPUs, and DeepSeek-V4's attention.
    - exchange: vLLM's attention, with the queries gathered and the partial outputs merged by this package's exchange.
    - off: nothing.

    With VLLM_BATCH_INVARIANT the attention of dense MLA is in a fixed order; vLLM itself refuses the other backends.

    Raises:
        ValueError: The variable has another value, or is exchange with VLLM_BATCH_INVARIANT.
    """
    mode = os.environ.get("DCPMLA_VLLM", "custom")
    if mode not in MODES:
        raise ValueError(f"DCPMLA_VLLM is {mode!r}; choose one of {', '.join(MODES)}")
    if mode == "exchange" and is_batch_invariant():
        raise ValueError("DCPMLA_VLLM is 'exchange', whose sums vary with the batch; leave VLLM_BATCH_INVARIANT out")
    if mode == "off" or not _knows_version():
        return
    if mode == "exchange":
        from dcpmla.integrations.vllm.exchange import install

        install()
        return
    # Not from `names`, which imports layers: vLLM calls this before it has read its options.
    import vllm
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name in ("CUSTOM", *(CHOSEN_BY_VLLM if mode == "default" else ())):
        register_backend(AttentionBackendEnum[name], f"{BACKENDS}.{name}")
    if vllm.__version_tuple__[:2] >= FIRST_WITH_V4:
        from dcpmla.integrations.vllm.compressed.register import register_model

        register_model()


def _knows_version() -> bool:
    """Return whether this is a version that the plug-in is tested with; warn where it is not."""
    import vllm

    known = FIRST_VERSION <= vllm.__version_tuple__[:2] < END_VERSION
    if not known:
        first, end = (".".join(map(str, version)) for version in (FIRST_VERSION, END_VERSION))
        logger.warning(
            "dcpmla is tested with vLLM >=%s,<%s; this is %s, which goes on without it", first, end, vllm.__version__
        )
    return known
