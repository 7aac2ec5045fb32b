"""Time that pieces of prompts add to a step, by which the scheduler bounds the time that decodes wait for them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from dcpmla.attention.costs import Rates
from dcpmla.planning.deployment import Deployment
from dcpmla.planning.machine import H200X8, Machine

_MAX_LOSS = 1 / 12  # by a replay of loads (docs/planning.md): less lengthens steps more than it adds tokens a second
_MAX_STATE_SHARE = 1 / 16
_LARGE_STEP = 1 << 20  # tokens of a step in which every product takes longer than reading its weights
_APART = dict.fromkeys(("embed_tokens", "lm_head", "kv_b_proj"), 0)  # parameters that `token_us` leaves out
_SHORT_US = 1000.0  # a step that is too short for its prompt to be noticeably later


class PrefillCosts:
    """The modelled time of pieces of prompts in the whole model on one rank (`dcpmla.runtime.costs.PieceCosts`).

    A step reads its weights once, whatever it computes. A piece therefore adds the products, the all-reduces and the
    attention of its own tokens.

    Args:
        deployment: Model, and the machine that it runs on.
        max_num_batched_tokens: Limit of a step's tokens.
        max_prefill_ms: Limit in milliseconds for the pieces of a step in which requests decode; None for the time of
            max_num_batched_tokens tokens without a context, and more where reading the context and the piece again
            would take over a twelfth of it.

    Attributes:
        deployment: Model, and the machine that it runs on.
        tokens_per_request: Width of the pieces that absorbed attention cuts requests into.
        max_prefill_us: Limit for the pieces of a step in which requests decode, in microseconds.
        is_strict: Whether max_prefill_ms is set (`PieceCosts.is_strict`).
        max_loss: Share of a useful piece's time that reading its context and its tokens again may take.
    """

    def __init__(
        self, deployment: Deployment, max_num_batched_tokens: int, max_prefill_ms: float | None = None
    ) -> None:
        self.deployment, self._token_us = deployment, token_us(deployment)
        rates = kernel_rates(deployment.machine)
        self._attention = deployment.model.attention.costs(deployment.setting.dcp_config, rates)
        self.tokens_per_request = self._attention.tokens_per_request
        limit_us = self.piece_us(max_num_batched_tokens, 0) if max_prefill_ms is None else 1e3 * max_prefill_ms
        self.max_prefill_us = limit_us
        self.is_strict, self.max_loss = max_prefill_ms is not None, _MAX_LOSS

    def piece_us(self, new: int, context: int) -> float:
        """Return the microseconds that a piece of so many new tokens adds to a step, after so many tokens before it.

        More new tokens and longer contexts take no less.
        """
        return new * self._token_us + self.attention_us(new, context)

    @cached_property
    def least_state_tokens(self) -> int:
        """Return the least power of two tokens after which a piece of a prompt ends only to remember its state.

        The step that this adds reads the weights once more. Few prompts use the state, so its time must be at most a
        sixteenth of the prompt's time so far, or too short to notice.
        """

        def pays(num_tokens: int) -> bool:
            added_us = self.deployment.products_us(num_tokens, _APART) - num_tokens * self._token_us
            return added_us < max(_MAX_STATE_SHARE * self.piece_us(num_tokens, 0), _SHORT_US)

        sizes = [1 << exponent for exponent in range(_LARGE_STEP.bit_length())]
        return next((size for size in sizes if pays(size)), _LARGE_STEP)

    def attention_us(self, new: int, context: int) -> float:
        """Return the part of `piece_us` that attention takes."""
        return self._attention.piece_us(new, context)

    def choose_absorbed(self, pieces: Sequence[tuple[int, int]]) -> list[bool]:
        """Return which pieces (new tokens, tokens before them) attend with absorbed queries."""
        return self._attention.choose_absorbed(pieces)

    def absorbs_all(self, pieces: Sequence[tuple[int, int]]) -> bool:
        """Return whether a step is faster as one graph, in which all pieces attend with absorbed queries."""
        return self._attention.absorbs_all(pieces)


def token_us(deployment: Deployment) -> float:
    """Return the microseconds that one more token of a prompt adds to a large step, besides its attention.

    Embedding and head do not count: the one is a lookup, the other sees a prompt's last token only. kv_b_proj counts as
    attention, whose routes differ in it.
    """
    small_us, large_us = (deployment.products_us(size, _APART) for size in (_LARGE_STEP, 2 * _LARGE_STEP))
    return (large_us - small_us) / _LARGE_STEP


def kernel_rates(machine: Machine) -> Rates:
    """Return the speeds of attention's kernels, scaled by the machine's products, copies and links."""
    rates, assumed_link = Rates(), H200X8.direct or H200X8.all_gather
    products = machine.matmul_tflops / H200X8.matmul_tflops
    copies = machine.copy_gb_per_s / H200X8.copy_gb_per_s
    links = (machine.direct or machine.all_gather).gb_per_s / assumed_link.gb_per_s
    of_products = ("matmul_tflops", "mha_tflops", "masked_tflops", "absorbed_tflops", "selected_tflops")
    return replace(
        rates,
        **{name: products * getattr(rates, name) for name in of_products},
        decode_tflops=machine.attention_tflops,
        decode_gb_per_s=machine.attention_read_share * machine.hbm_gb_per_s,
        gb_per_s=copies * rates.gb_per_s,
        link_gb_per_s=links * rates.link_gb_per_s,
    )
