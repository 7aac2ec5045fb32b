"""Predict memory and decode steps of a model under each (tp, dcp, cache format), from its config alone, and recommend
one.
"""

import argparse
import os
from dataclasses import asdict
from itertools import product
from pathlib import Path

from dcpmla.bench.plots import check_outputs
from dcpmla.cli.field_options import add_fields, reader, values_of
from dcpmla.cli.options import add_model, format_list, positive, positive_list
from dcpmla.cli.output import Section, write_json
from dcpmla.cli.plan_hot import hot_section
from dcpmla.cli.plan_prompts import PromptPlan
from dcpmla.cli.plan_report import measured_report, plot, report
from dcpmla.cli.plan_split import split_section
from dcpmla.cli.plan_tiers import check_sizes, tier_section
from dcpmla.config import DCPConfig
from dcpmla.fields import divisors, whole
from dcpmla.integrations.eagle3 import open_eagle3
from dcpmla.integrations.engine_options import OWN_MODULES, EngineOptions
from dcpmla.integrations.model_files import load_config
from dcpmla.integrations.model_size import read_model
from dcpmla.integrations.speculation import check_speculation
from dcpmla.planning.capacity import FORMATS
from dcpmla.planning.deployment import Deployment
from dcpmla.planning.hot import check_tiers
from dcpmla.planning.machine import H200X8, Machine, change_machine, read_json
from dcpmla.planning.measured import calibrate, predict_row, read_rows
from dcpmla.planning.presets import PRESETS
from dcpmla.planning.recommend import make_plan, recommend
from dcpmla.planning.servers import Traffic
from dcpmla.planning.setting import Setting
from dcpmla.planning.weights import ModelSize

# Fields of `Setting`.
_LAYOUT = ("num_gpus", "index_cache_dtype", "num_speculative_tokens", "acceptance_rate", "kv_hot_tokens")
_ENGINE = (
    "max_num_batched_tokens",
    "kv_offloading_size",
    "kv_offloading_disk_size",
    "enable_expert_parallel",
    "expert_dtype",
    "speculative_method",
    "speculative_model",
)
_MOST_TOKENS = {"max_num_batched_tokens": {"type": reader(whole(1, 1 << 24))}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.set_defaults(run=run)
    add = parser.add_argument
    add_model(parser, "a model's directory or its config.json; no weights needed", type=Path)
    machines = (
        f"a preset ({', '.join(PRESETS)}), a JSON file with a machine's numbers or with rows of bench layer or "
        "exchange, to which it is fitted; or a list, of which each item changes what comes before it"
    )
    add("--machine", default="h200x8", metavar="NAME_OR_JSON,...", help=machines)
    tp = "ranks that cut the heads; default: all GPUs of the machine"
    add("-tp", "--tensor-parallel-size", type=positive_list, metavar="N,...", help=tp)
    dcp = "ranks that share one cache; default: all that divide tp"
    add("-dcp", "--decode-context-parallel-size", type=positive_list, metavar="D,...", help=dcp)
    add("--kv-cache-dtype", type=format_list, default="bf16", metavar="F,...", help=f"of {', '.join(FORMATS)}")
    add("--batch", type=positive, default=32, metavar="B", help="requests that decode at once, on the whole job")
    add("--context", type=positive, default=131072, metavar="S", help="tokens of each of them")
    add("--measured", type=Path, metavar="BENCH.json", help="print the rows of this file with their predictions")
    add("--json", type=Path, metavar="OUT.json", help="write the plan")
    add("--plot", type=Path, metavar="OUT.png", help="draw step times and capacities; needs the extra plot")
    add_fields(parser, Setting, "layout and drafts", _LAYOUT)
    add_fields(parser, EngineOptions, "engine", _ENGINE, changes=_MOST_TOKENS)
    add_fields(parser, Traffic, "requests that arrive")


def run(args: argparse.Namespace) -> None:
    """Predict, print, write."""
    measured = [args.measured] if args.measured else []
    inputs = [args.model, args.model / "config.json", *map(Path, args.machine.split(",")), *measured]
    check_outputs(args.json, args.plot, inputs)
    check_sizes(args.kv_offloading_size, args.kv_offloading_disk_size)
    check_tiers(args.kv_hot_tokens, args.kv_offloading_size, kv_offloading_disk_size=args.kv_offloading_disk_size)
    model = load_model_size(args.model).with_expert_dtype(args.expert_dtype)
    machine = load_machine(args.machine, model)
    args.tensor_parallel_size = args.tensor_parallel_size or [machine.num_gpus]
    rows = read_rows(args.measured, "--measured", model) if args.measured else []
    predicted = [(row, predict_row(machine, model, row)) for row in rows]
    drafts = EngineOptions(
        speculative_method=args.speculative_method,
        speculative_model=args.speculative_model,
        num_speculative_tokens=max(1, args.num_speculative_tokens),
    )
    if drafts.speculative_method in (*OWN_MODULES, "eagle3"):
        model = load_model_size(args.model, drafts).with_expert_dtype(args.expert_dtype)
    deployments = [Deployment(machine, model, setting) for setting in _settings(args, model)]
    plans = [make_plan(deployment, args.batch, args.context) for deployment in deployments]
    best, reason = recommend(machine, plans, args.batch, args.context)
    sections: dict[str, Section] = {}
    if best is not None:
        deployment = deployments[plans.index(best)]
        prompts = PromptPlan(deployment, args.batch, args.context, args.max_num_batched_tokens)
        sections["prompts"] = prompts.section(args.input_len)
        if args.kv_hot_tokens is not None:
            sections["hot"] = hot_section(best, deployment, args.batch, args.context, args.kv_offloading_size)
        elif args.kv_offloading_size is not None:
            sizes = args.kv_offloading_size, args.kv_offloading_disk_size
            sections["tiers"] = tier_section(best, prompts, args.context, *sizes)
    if args.request_rate is not None:
        traffic, num_gpus = Traffic(**values_of(Traffic, args)), args.num_gpus or max(args.tensor_parallel_size)
        sections["split"] = split_section(deployments, traffic, num_gpus, args.max_num_batched_tokens)
    if args.json:
        content = {
            "model": str(args.model),
            "machine": asdict(machine),
            **{name: getattr(args, name) for name in ("batch", "context", "num_gpus", "expert_dtype")},
            "settings": [plan.as_json() for plan in plans],
            "recommended": best and {**best.as_json(), "reason": reason},
            "measured": [{**row, "predicted_us": round(time, 2)} for row, time in predicted if time is not None],
            **dict.fromkeys(("prompts", "tiers", "hot", "split")),
            **{name: section.content for name, section in sections.items()},
        }
        write_json(args.json, content)
    if args.plot:
        load = f"{args.model.name} on {machine.name}, {args.batch:,} x {args.context:,} tokens"
        plot(args.plot, plans, f"{load}: {best or 'nothing'} is recommended")
    print("\n".join(report(args, machine, model, plans, best, reason)))
    for section in sections.values():
        print("\n".join(["", *section.lines]))
    if args.measured:
        print("\n".join(measured_report(args.measured, predicted)))


def load_model_size(path: Path, drafts: EngineOptions | None = None) -> ModelSize:
    """Return a model's sizes from its directory or config file.

    Args:
        drafts: Options whose module or EAGLE3 head counts, too.
    Raises:
        ValueError: The path does not exist, or is no config of an MLA model, or of one without such a module, or which
            the head does not fit.
    """
    if not os.path.exists(path):  # False, too, for a name that no file can have
        hint = "give a config.json or the directory that holds it"
        raise ValueError(f"model (--model) is {path}: no such file or directory; {hint}")
    import transformers

    transformers.utils.logging.set_verbosity_error()
    config = load_config(path)
    if drafts is None:
        return read_model(config)
    eagle3 = None if drafts.speculative_model is None else open_eagle3(drafts.speculative_model)
    check_speculation(config, DCPConfig(), drafts.speculative_method, eagle3, drafts.num_speculative_tokens)
    return read_model(config, drafts.speculative_method in OWN_MODULES, eagle3)


def load_machine(layers: str, model: ModelSize) -> Machine:
    """Return a machine from a list separated by commas: presets and JSON files, each overriding those before it.

    A file holds a machine's numbers (over the preset h200x8 if it comes first), or a benchmark's rows, to which the
    machine is fitted.

    Raises:
        ValueError: A name is neither preset nor file, or a file holds neither numbers nor rows.
    """
    machine = H200X8
    for layer in layers.split(","):
        if layer in PRESETS:
            machine = PRESETS[layer]
        elif not os.path.isfile(layer):  # False, too, for a name that no file can have
            raise ValueError(f"machine (--machine) is {layer!r}; choose a preset ({', '.join(PRESETS)}) or a JSON file")
        elif "rows" in (content := read_json(Path(layer), "machine (--machine)")):
            machine = calibrate(machine, model, read_rows(Path(layer), "machine (--machine)", model))
        else:
            machine = change_machine(machine, content, Path(layer).stem)
    return machine


def _settings(args: argparse.Namespace, model: ModelSize) -> list[Setting]:
    """Return all combinations in which dcp divides tp; a dcp that divides no tp is a mistake."""
    tp_sizes, dcp_sizes = args.tensor_parallel_size, args.decode_context_parallel_size
    for tp in tp_sizes:
        model.attention.config.heads_per_rank(tp)  # raises, with the sizes that divide
    model.attention.check_index(DCPConfig(index_cache_dtype=args.index_cache_dtype))
    model.attention.check_hot_tokens(DCPConfig(kv_hot_tokens=args.kv_hot_tokens))
    for dcp in dcp_sizes or []:
        if not any(tp % dcp == 0 for tp in tp_sizes):
            Setting(tp=tp_sizes[-1], dcp=dcp, kv_cache_dtype=args.kv_cache_dtype[0])  # raises likewise
    shared = values_of(Setting, args)
    return [
        Setting(**{**shared, "tp": tp, "dcp": dcp, "kv_cache_dtype": name})
        for tp, name in product(dict.fromkeys(tp_sizes), args.kv_cache_dtype)
        for dcp in dict.fromkeys(dcp_sizes or divisors(tp))
        if tp % dcp == 0
    ]
