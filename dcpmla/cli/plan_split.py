"""GPUs divided between prefill and decode servers under a load of requests: predictions, and the division to take."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from dcpmla.cli.output import Section, align
from dcpmla.cli.plan_prompts import PromptPlan
from dcpmla.planning.deployment import Deployment
from dcpmla.planning.recommend import make_plan
from dcpmla.planning.servers import Piece, Server, Traffic
from dcpmla.planning.split import Split, link_gb_per_s
from dcpmla.planning.split_choice import all_splits, recommend_split
from dcpmla.planning.words import ms
from dcpmla.transfer.staging import NUM_SLOTS, slot_size

_NUM_ROWS = 12  # splits that are printed, the best first, besides the best servers that do both


def plan_server(deployment: Deployment, traffic: Traffic, max_num_batched_tokens: int, num_gpus: int) -> Server:
    """Predict one server of one TP group.

    Args:
        traffic: Lengths of the requests.
        max_num_batched_tokens: Limit of a step's tokens.
        num_gpus: Number of GPUs of all servers.
    """
    deployment = replace(deployment, setting=replace(deployment.setting, num_gpus=None))
    input_len, context = traffic.input_len, traffic.input_len + traffic.output_len // 2
    machine, block_tokens = deployment.machine, deployment.block().block_tokens
    staging_bytes = NUM_SLOTS * slot_size(link_gb_per_s(machine, num_gpus), machine.memory_bytes)
    both, apart = (make_plan(deployment, 1, input_len + traffic.output_len, size) for size in (0, staging_bytes))
    most = (max_num_batched_tokens - 1) // deployment.setting.query_len

    @cache
    def pieces(num_decodes: int) -> list[Piece]:
        prompts = PromptPlan(deployment, num_decodes, context, max_num_batched_tokens)
        steps = [prompts.step(*piece, num_decodes) for piece in prompts.pieces(input_len, num_decodes)]
        return [Piece(step.new, step.step_us["total"]) for step in steps]

    @cache
    def decode_us(num_decodes: int) -> float:
        return deployment.step_us(num_decodes, context)["total"]

    return Server(
        setting=deployment.setting,
        num_prompts=apart.kv_tokens_total // block_tokens // -(-input_len // block_tokens),
        num_requests=min(both.max_num_seqs, most),
        num_decodes=min(apart.max_num_seqs, most),
        bytes_per_token=both.kv_bytes_per_token,
        bytes_per_state=both.bytes_per_state,
        pieces=pieces,
        decode_us=decode_us,
    )


def split_section(
    deployments: Sequence[Deployment], traffic: Traffic, num_gpus: int, max_num_batched_tokens: int
) -> Section:
    """Return all divisions of GPUs between servers under a load.

    Args:
        deployments: Model in the settings that a server may have, on one machine.
        traffic: Load of all servers.
        num_gpus: Number of GPUs.
        max_num_batched_tokens: Limit of a step's tokens.
    """
    servers = [plan_server(deployment, traffic, max_num_batched_tokens, num_gpus) for deployment in deployments]
    splits = all_splits(deployments[0].machine, traffic, servers, num_gpus)
    best, reason = recommend_split(splits)
    load = f"{traffic.request_rate:g} requests a second of {traffic.input_len:,} + {traffic.output_len:,} tokens"
    ordered = sorted(splits, key=_order)
    shown = [split for split in ordered if split.num_prefill][:_NUM_ROWS]
    shown += [split for split in ordered if not split.num_prefill][:_NUM_ROWS]
    content = {
        **asdict(traffic),
        "num_gpus": num_gpus,
        "splits": [_as_json(split) for split in splits],
        "recommended": best and _as_json(best),
        "reason": reason,
    }
    lines = [
        f"{num_gpus:,} GPUs as prefill and decode servers, and as servers that do both, under {load}",
        *align([_cells(split) for split in shown]),
        f"recommended: {best or 'none'}. {reason}",
    ]
    return Section(content, lines)


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
        "first token ms": ms(split.time_to_first_token_us),
        "transfer ms": ms(split.transfer_us) if split.num_prefill else "-",
        "running": "-" if split.num_running is None else f"{split.num_running:,}",
        "token ms": ms(split.time_per_token_us),
        "99 % ms": ms(split.time_per_token_p99_us),
        "keeps up": "yes" if split.keeps_up else "no",
    }
