"""Speculative decoding of a loaded model: its methods and their drafters."""

from collections.abc import Sequence
from typing import Any

from dcpmla.cache.layers import Cache
from dcpmla.config import DCPConfig
from dcpmla.integrations.decode_graphs import GraphMaker
from dcpmla.integrations.eagle3 import Eagle3Files
from dcpmla.integrations.engine_options import EngineOptions
from dcpmla.integrations.families.table import family_of
from dcpmla.integrations.sharded_model import ShardedModel
from dcpmla.runtime.acceptance import MAX_DRAFT_ROWS
from dcpmla.runtime.drafts import Drafter
from dcpmla.runtime.graph import StepGraph
from dcpmla.runtime.ngram import NgramDrafter
from dcpmla.runtime.simulated import SimulatedDrafter, rates_of_length


def check_speculation(
    config: Any, dcp: DCPConfig, method: str, eagle3: Eagle3Files | None = None, num_drafts: int = 1
) -> None:
    """Raise ValueError, before any weight is read, for a method or a number of drafts that a model does not have.

    Args:
        eagle3: Head of the method eagle3.
        num_drafts: Limit of a request's drafts.
    """
    if method == "mtp":
        family_of(config).check_mtp(config)
    if method == "dspark":
        family_of(config).check_dspark(config, num_drafts)
    if eagle3 is not None:
        eagle3.check(config, dcp)
    if method in ("mtp", "eagle3") and dcp.calculate_kv_scales:
        raise ValueError(
            f"speculative_method (--speculative-method) is {method!r}, whose layer takes no scales from the first "
            "prompts; leave --calculate-kv-scales out, or take ngram"
        )


def make_drafter(options: EngineOptions, model: ShardedModel, cache: Cache, graphs: Sequence[StepGraph]) -> Drafter:
    """Return the drafter of a method, its drafts accepted by random numbers if the options ask for that.

    Args:
        graphs: Graphs from `draft_graphs`, made or captured over the cache.
    """
    method, num_drafts = options.speculative_method, options.num_speculative_tokens
    if method == "none":
        return Drafter()
    drafter: Drafter
    if model.drafts is None:
        drafter = NgramDrafter(num_drafts, model.device)
    else:
        drafter = model.drafts.new_drafter(num_drafts, cache, model.placement.mesh, graphs)
    length, rates = options.synthetic_acceptance_length, options.synthetic_acceptance_rates
    rates = rates if length is None else rates_of_length(length, num_drafts)
    return SimulatedDrafter(drafter, rates, model.vocab_size, model.device) if rates else drafter


def draft_graphs(num_speculative_tokens: int, model: ShardedModel, max_num_seqs: int, longest: int) -> list[GraphMaker]:
    """Return the makers of a trained module's graphs.

    Args:
        longest: Tokens of the longest sequence.
    """
    assert model.drafts is not None
    makers = []
    for each in model.drafts.graph_steps(num_speculative_tokens):
        num_reqs = min(max_num_seqs, MAX_DRAFT_ROWS // max(1 + num_speculative_tokens, each.query_len))
        sizes = longest, num_reqs, each.query_len, each.is_block
        makers.append(GraphMaker.decodes("drafts", model, each.step, each.input_like, *sizes))
    return makers
