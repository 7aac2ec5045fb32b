"""Public names: objects of the package and options of commands, each documented."""

import argparse
import inspect
from dataclasses import fields

import pytest

import dcpmla
from dcpmla.__main__ import build_parser
from dcpmla.integrations.engine_options import EngineOptions


def test_public_names() -> None:
    assert set(dcpmla.__all__) <= set(dir(dcpmla))
    with pytest.raises(AttributeError, match="module 'dcpmla' has no attribute 'LMM'"):
        dcpmla.LMM  # noqa: B018


@pytest.mark.parametrize("name", dcpmla.__all__)
def test_public_names_are_documented(name: str) -> None:
    thing = getattr(dcpmla, name)
    assert (thing.__doc__ or "").strip(), f"{name} has no docstring"
    assert not thing.__doc__.startswith(f"{name}("), f"{name} has only the signature that dataclass wrote"
    public = (
        [member for key, member in vars(thing).items() if not key.startswith("_")] if inspect.isclass(thing) else []
    )
    for member in public:
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if inspect.isfunction(function):
            assert function.__doc__, f"{function.__qualname__} has no docstring"


def subcommand(name: str) -> argparse.ArgumentParser:
    (commands,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    return commands.choices[name].filled()


def test_every_field_has_an_option() -> None:
    options = {action.dest for action in subcommand("generate")._actions}
    missing = {field.name for field in (*fields(dcpmla.DCPConfig), *fields(EngineOptions))} - options
    assert missing == {"context_workspace_tokens"}
