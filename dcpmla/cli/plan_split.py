"""GPUs divided between prefill and decode servers under a load of requests: predictions, and the division to take."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any

from dcpmla.cli.output import align
from dcpmla.cli.plan_prompts import PromptPlan
from dcpmla.planning.machine import Machine
from dcpmla.planning.predict import predict_step
from dcpmla.planning.recommend import make_plan
from dcpmla.planning.servers import Piece, Traffic
from dcpmla.planning.setting import Setting
from dcpmla.planning.split import Split
from dcpmla.planning.split_choice import all_splits, recommend_split
from dcpmla.planning.tiers import block_of_plan
from dcpmla.planning.weights import ModelSize

_NUM_ROWS = 12  # splits that are printed, the best first, besides the best servers that do both


class PlannedServer:
    """Predicted sizes and times of one server for requests of one length (`dcpmla.planning.servers.Server`).

    Args:
        machine: Speeds of the GPUs.
        model: Sizes of the model.
        setting: Cut and cache of the model; the server is one TP group.
        traffic: Lengths of the requests.
        max_num_batched_tokens: Limit of a step's tokens.
    """

    def __init__(
        self, machine: Machine, model: ModelSize, setting: Setting, traffic: Traffic, max_num_batched_tokens: int
    ) -> None:
        self.setting = replace(setting, num_gpus=None)
        self._args, self._limit = (machine, model, self.setting), max_num_batched_tokens
        self._input_len, self._context = traffic.input_len, traffic.input_len + traffic.output_len // 2
        plan = make_plan(*self._args, 1, traffic.input_len + traffic.output_len)
        block_tokens = block_of_plan(model, plan).block_tokens
        self.num_prompts = plan.kv_tokens_total // block_tokens // -(-traffic.input_len // block_tokens)
        self.num_requests = min(plan.max_num_seqs, (max_num_batched_tokens - 1) // setting.query_len)
        self.bytes_per_token, self.bytes_per_state = plan.kv_bytes_per_token, plan.bytes_per_state
        self._pieces = lru_cache(maxsize=None)(self._predict_pieces)
        self._decode_us = lru_cache(maxsize=None)(self._predict_decode)

    def pieces(self, num_decodes: int) -> list[Piece]:
        """Return the steps of a prompt while so many requests decode."""
        return self._pieces(num_decodes)

    def decode_us(self, num_decodes: int) -> float:
        """Return the microseconds of a step in which so many requests decode, without a prompt."""
        return self._decode_us(num_decodes)

    def _predict_pieces(self, num_decodes: int) -> list[Piece]:
        prompts = PromptPlan(*self._args, num_decodes, self._context, self._limit)
        pieces = prompts.pieces(self._input_len, num_decodes)
        return [Piece(new, prompts.step(new, done, num_decodes).step_us["total"]) for new, done in pieces]

    def _predict_decode(self, num_decodes: int) -> float:
        return predict_step(*self._args, num_decodes, self._context)["total"]


class SplitPlan:
    """All divisions of GPUs between servers under a load.

    Args:
        machine: Speeds of the GPUs.
        model: Sizes of the model.
        settings: Settings that a server may have.
        traffic: Load of all servers.
        num_gpus: Number of GPUs.
        max_num_batched_tokens: Limit of a step's tokens.
    """

    def __init__(
        self,
        machine: Machine,
        model: ModelSize,
        settings: Sequence[Setting],
        traffic: Traffic,
        num_gpus: int,
        max_num_batched_tokens: int,
    ) -> None:
        self._traffic, self._num_gpus = traffic, num_gpus
        servers = [PlannedServer(machine, model, setting, traffic, max_num_batched_tokens) for setting in settings]
        self.splits = all_splits(machine, traffic, servers, num_gpus)
        self.best, self.reason = recommend_split(self.splits)

    def as_json(self) -> dict[str, Any]:
        """Return all predictions."""
        return {
            **asdict(self._traffic),
            "num_gpus": self._num_gpus,
            "splits": [_as_json(split) for split in self.splits],
            "recommended": self.best and _as_json(self.best),
            "reason": self.reason,
        }

    def report(self) -> list[str]:
        """Return the lines to print."""
        traffic = self._traffic
        load = f"{traffic.request_rate:g} requests a second of {traffic.input_len:,} + {traffic.output_len:,} tokens"
        ordered = sorted(self.splits, key=_order)
        shown = [split for split in ordered if split.num_prefill][:_NUM_ROWS]
        shown += [split for split in ordered if not split.num_prefill][:_NUM_ROWS]
        verdict = "none" if self.best is None else str(self.best)
        return [
            f"{self._num_gpus:,} GPUs as prefill and decode servers, and as servers that do both, under {load}",
            *align([_cells(split) for split in shown]),
            f"recommended: {verdict}. {self.reason}",
        ]


def _as_json(split: Split) -> dict[str, Any]:
    return {**asdict(split), "keeps_up": split.keeps_up}


def _order(split: Split) -> tuple[bool, float, float]:
    late, first = split.time_per_token_p99_us, split.time_to_first_token_us
    return not split.keeps_up, late or float("inf"), first or float("inf")


def _cells(split: Split) -> dict[str, str]:
    return {
        "servers": str(split),
        "busy": f"{split.busy:.0%}",
        "link": f"{split.link_busy:.1%}" if split.num_prefill else "-",
        "first token ms": _ms(split.time_to_first_token_us),
        "transfer ms": _ms(split.transfer_us) if split.num_prefill else "-",
        "running": "-" if split.num_running is None else f"{split.num_running:,}",
        "token ms": _ms(split.time_per_token_us),
        "99 % ms": _ms(split.time_per_token_p99_us),
        "keeps up": "yes" if split.keeps_up else "no",
    }


def _ms(time_us: float | None) -> str:
    return "-" if time_us is None else f"{time_us / 1e3:,.2f}"
