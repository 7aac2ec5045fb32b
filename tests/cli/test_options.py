"""Options that are fields of dataclasses, and what the commands that run a model print of its CUDA graphs."""

import argparse
import re
from dataclasses import fields

import pytest

from dcpmla.__main__ import Parser, build_parser
from dcpmla.cli.field_options import texts_of
from dcpmla.cli.options import add_engine_arguments, positive_list, share_list, token_ids
from dcpmla.cli.start_report import graph_lines
from dcpmla.config import DCPConfig
from dcpmla.integrations.engine_options import EngineOptions
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.serving.settings import ServeOptions
from tests.support.hash_model import HashDrafter, make_engine


@pytest.mark.parametrize(
    ("with_drafts", "mixed", "lines"),
    [
        (False, False, ["decode graphs: 4, the largest of 8 requests"]),
        (True, False, ["decode graphs: 4, the largest of 8 requests; with drafts 4, the largest of 8"]),
        (
            False,
            True,
            [
                "decode graphs: 4, the largest of 8 requests",
                "graphs of steps with prompts: 2, the largest of 100 tokens; of one graph each 5, the largest of 100",
            ],
        ),
    ],
)
def test_lines_of_graphs(with_drafts: bool, mixed: bool, lines: list[str]) -> None:
    drafter = HashDrafter(3, 0.5) if with_drafts else None
    engine = make_engine(20, 100, 8, 64, with_graph=True, drafter=drafter, mixed=mixed)
    assert graph_lines(engine.graph, engine.mixed_graph) == lines
    assert graph_lines(None, None) == []


def test_options_are_the_fields_of_layouts_and_engines() -> None:
    """Each with its default, and in the help with its text."""
    parser = Parser()
    add_engine_arguments(parser)
    args = vars(parser.parse_args(["--model", "m"]))
    actions = {action.dest: action for action in parser._actions}
    apart = {"tensor_parallel_size", "decode_context_parallel_size", "context_workspace_tokens"}
    for kind in (DCPConfig, EngineOptions):
        for field in fields(kind):
            if field.name not in apart:
                default = None if field.name == "cp_kv_cache_interleave_size" else field.default
                assert args[field.name] == default
                assert len(actions[field.name].help or "") > 20
    assert actions["kv_cache_dtype"].choices == ("auto", "bf16", "fp8", "fp8_ds_mla", "bfloat16", "fp8_e4m3")
    given = parser.parse_args(["--model", "m", "--no-enable-prefix-caching", "--dcp-check-exchange"])
    assert (given.enable_prefix_caching, given.check_exchange) == (False, True)


@pytest.mark.parametrize("command", ["generate", "serve", "plan", "doctor"])
def test_the_help_shows_every_default(command: str) -> None:
    (commands,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    parser = commands.choices[command].filled()
    text = " ".join(parser.format_help().split())
    for action in parser._actions:
        if action.default is not False and action.default not in (None, (), [], argparse.SUPPRESS):
            assert f"efault: {action.default}" in text, action.option_strings
    if command in ("generate", "serve"):
        assert "Limit of one step's tokens. Default: 8192." in text
        assert {group.title for group in parser._action_groups} >= {"layout of the cache", "engine"}


def test_texts_of_fields_are_read_from_docstrings() -> None:
    texts = texts_of(DCPConfig)
    assert texts["exchange_timeout"] == "Seconds that `direct` waits on the device for rows of another rank."
    assert texts["attention_backend"] == texts["prefill_backend"]
    assert {field.name for field in fields(SamplingParams)} == texts_of(SamplingParams).keys()
    assert {field.name for field in fields(EngineOptions)} == texts_of(EngineOptions).keys()
    assert {field.name for field in fields(ServeOptions)} == texts_of(ServeOptions).keys()


def test_lists_are_read_item_by_item() -> None:
    assert token_ids("5, -1,7") == [5, -1, 7]
    assert share_list("0,0.5, 1") == [0.0, 0.5, 1.0]
    for read, text, message in (
        (positive_list, "1,0", "'0' is not a whole number of at least 1"),
        (positive_list, "1,1.5", "'1.5' is not a whole number of at least 1"),
        (share_list, "0,x", "'x' is not a number in [0, 1]"),
        (share_list, "nan", "'nan' is not a number in [0, 1]"),
        (token_ids, "", "'' is not a token id"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=re.escape(message)):
            read(text)
