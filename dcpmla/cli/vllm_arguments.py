"""Arguments as `vllm serve` takes them: names with `_`, fields of an object one by one, one object for drafts."""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from dcpmla.integrations.engine_options import SPECULATIVE_METHODS

_METHODS = SPECULATIVE_METHODS[1:]
_OPTIONS = {  # by vLLM's fields
    "model": "speculative_model",
    **{name: name for name in ("num_speculative_tokens", "synthetic_acceptance_length", "synthetic_acceptance_rates")},
}
_IGNORED_FIELDS = ("prompt_lookup_max", "prompt_lookup_min")  # the lookup takes the longest match


def add_speculative_config(parser: argparse.ArgumentParser) -> None:
    """Add `--speculative-config`, which sets the two options of drafts."""
    text = "vLLM's object in place of the options of drafts: method, model (of eagle3) and num_speculative_tokens"
    parser.add_argument("--speculative-config", "-sc", action=_Speculate, metavar="JSON", help=text)


def plain_arguments(arguments: Sequence[str]) -> list[str]:
    """Return arguments as argparse reads them.

    vLLM takes `_` in names for `-`, and the fields of an object one by one: `--x.a 1 --x.b.c=2` for
    `--x '{"a": 1, "b": {"c": 2}}'`.
    """
    plain, objects, rest = list[str](), dict[str, dict[str, Any]](), iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        first, *path = name.split(".")
        if not name.startswith("--") or len(name) == 2:
            plain.append(argument)
            continue
        first = first.replace("_", "-")
        if not path:
            plain.append(first + equals + value)
            continue
        fields = objects.setdefault(first, {})
        for part in path[:-1]:
            fields = fields.setdefault(part, {})
        fields[path[-1]] = _read_value(value if equals else next(rest, ""))
    return [*plain, *(text for name, fields in objects.items() for text in (name, json.dumps(fields)))]


class _Speculate(argparse.Action):
    """The action of `--speculative-config`: an object of vLLM in place of the options of drafts."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        """Set the method and the options that the object has."""
        for name, value in _read_speculation(values).items():
            setattr(namespace, name, value)


def _read_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _read_speculation(text: str) -> dict[str, Any]:
    """Return the options that `--speculative-config` stands for, by their names.

    Raises:
        ValueError: It is no object with these fields, or the method is not served.
    """
    label, fields = "--speculative-config", _read_value(text)
    if not isinstance(fields, dict):
        raise ValueError(
            f"{label} is {text!r}; give an object such as " + '{"method": "mtp", "num_speculative_tokens": 3}'
        )
    method, sampling = str(fields.pop("method", None)), fields.pop("rejection_sample_method", None)
    options = {option: fields.pop(name, None) for name, option in _OPTIONS.items()}
    served = "mtp" if method == "mtp" or method.endswith("_mtp") else method
    if served not in _METHODS:
        raise ValueError(f"method of {label} is {method!r}; it must be {' or '.join(_METHODS)}")
    model = options["speculative_model"]
    if (model is not None) != (served == "eagle3"):
        raise ValueError(f"model of {label} is {model!r} with method {method!r}; eagle3 needs one, and no other method")
    is_synthetic = any(options[name] is not None for name in _OPTIONS.values() if name.startswith("synthetic"))
    if sampling not in (None, "synthetic" if is_synthetic else "standard"):
        raise ValueError(
            f"rejection_sample_method of {label} is {sampling!r}; it must be standard, or synthetic with "
            "synthetic_acceptance_length or synthetic_acceptance_rates"
        )
    unknown = [name for name, value in fields.items() if value is not None and name not in _IGNORED_FIELDS]
    if unknown:
        raise ValueError(f"{label} has {', '.join(unknown)}; give method, {' and '.join(_OPTIONS)} alone")
    return {"speculative_method": served, **{name: value for name, value in options.items() if value is not None}}
