"""Roles of servers: options that do not go together, and what two servers must have in common."""

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from dcpmla.cli import serve
from dcpmla.config import DCPConfig
from dcpmla.integrations.transfers import cache_facts


def parse(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(["--model", "x", *options])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--role", "decode"], ["--role", "--prefill-servers"]),
        (["--prefill-servers", "http://p:1"], ["--role", "--prefill-servers"]),
        (["--role", "prefill", "--prefill-servers", "http://p:1"], ["--role", "--prefill-servers"]),
        (
            ["--role", "prefill", "--kv-cache-dtype", "fp8", "--calculate-kv-scales"],
            ["--role", "--calculate-kv-scales", "--kv-cache-scale"],
        ),
    ],
)
def test_options_that_do_not_go_together(options: list[str], words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"\(--role\)") as error:
        serve.run(parse(*options))
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_roles_without_a_key(role: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Servers of both roles need a key, and a start without one says so."""
    options = ["--role", role, *(["--prefill-servers", "http://p:1"] if role == "decode" else [])]
    monkeypatch.setattr(serve, "listen", lambda *_: pytest.skip.Exception)

    def start(key: str | None) -> str:
        caplog.clear()
        with pytest.raises(TypeError, match="context manager"):
            serve._start_frontend(parse(*options), key)
        return caplog.text

    without = start(None)
    assert ("--api-key" in without and f"is {role} without a key" in without) is (role != "both")
    assert not start("sesame")


@pytest.mark.parametrize("url", ["p:1", "ftp://p", "http://", "http://p/v1", "http://p?x"])
def test_wrong_urls(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--role", "decode", "--prefill-servers", url)
    assert "not a server's URL" in capsys.readouterr().err


def test_a_slash_at_the_end_is_no_part_of_a_url() -> None:
    servers = parse("--role", "decode", "--prefill-servers", "http://p:1/", "https://q").prefill_servers
    assert servers == ["http://p:1", "https://q"]


def facts(dcp: DCPConfig | None = None, dtype: str = "bf16", norm: float = 1.0, **config: Any) -> dict[str, str]:
    files: Any = SimpleNamespace(config=SimpleNamespace(to_dict=lambda: {"layers": 2, **config}), directory=Path())
    sizes: Any = SimpleNamespace(dtype=dtype, index_dtype="uint8")
    layer = nn.RMSNorm(4)
    nn.init.constant_(layer.weight, norm)
    model: Any = SimpleNamespace(dtype="bf16", modules=lambda: [nn.ModuleDict({"norm": layer})])
    return dict(cache_facts(files, dcp or DCPConfig(), model, sizes))


def test_facts_name_what_differs() -> None:
    def differing(other: dict[str, str]) -> list[str]:
        return [name for name, value in facts().items() if other[name] != value]

    assert differing(facts(_name_or_path="elsewhere", transformers_version="9")) == []
    assert "--model" in differing(facts(layers=3))[0]
    assert differing(facts(norm=2.0)) == ["the digest of the norms of the model's weights (--model)"]
    assert "--kv-cache-dtype" in differing(facts(dtype="uint8"))[0]
    assert "--kv-cache-scale" in differing(facts(DCPConfig(kv_cache_dtype="fp8", kv_cache_scale=2.0)))[0]
