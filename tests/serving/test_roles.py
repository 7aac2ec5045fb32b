"""Roles of servers: options that do not go together, and what two servers must have in common."""

import argparse
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from dcpmla.__main__ import build_parser
from dcpmla.cli import serve
from dcpmla.config import DCPConfig
from dcpmla.integrations.transfers import cache_facts
from dcpmla.serving.prefills import Prefills


def parse(*options: str) -> argparse.Namespace:
    args: argparse.Namespace = build_parser().parse_args(["serve", "x", *options])
    return args


APART = {  # options -> those that the error names beside --role
    "--role decode": ["--prefill-servers"],
    "--prefill-servers http://p:1": ["--prefill-servers"],
    "--role prefill --prefill-servers http://p:1": ["--prefill-servers"],
    "--role prefill --kv-cache-dtype fp8 --calculate-kv-scales": ["--calculate-kv-scales", "--kv-cache-scale"],
}


@pytest.mark.parametrize("options", APART)
def test_options_that_do_not_go_together(options: str) -> None:
    with pytest.raises(ValueError, match=r"\(--role\)") as error:
        serve.run(parse(*options.split()))
    assert all(word in str(error.value) for word in APART[options])


class Keys:
    """Starts of a server's first rank up to its listener, with keys from options or the environment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        self.environment, self._log = monkeypatch, caplog
        for name in ("DCPMLA_API_KEY", "DCPMLA_TRANSFER_KEY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(serve, "listen", lambda *_: pytest.skip.Exception)

    def start(self, role: str, *options: str, url: str = "http://127.0.0.1:1") -> str:
        """Start a server as far as it goes; return its log."""
        self._log.clear()
        servers = ["--prefill-servers", url] if role == "decode" else []
        with pytest.raises(TypeError, match="context manager"):
            serve.run(parse("--role", role, *servers, *options))
        return self._log.text

    def refuse(self, role: str, *options: str, url: str = "http://127.0.0.1:1") -> str:
        """Start a server that refuses its options; return the error."""
        servers = ["--prefill-servers", url] if role == "decode" else []
        with pytest.raises(ValueError, match=r"\(--(transfer|api)-key, DCPMLA_(TRANSFER|API)_KEY\)") as error:
            serve.run(parse("--role", role, *servers, *options))
        return str(error.value)


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Keys:
    return Keys(monkeypatch, caplog)


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "LocalHost"])
def test_roles_without_a_key_inside_of_a_host(role: str, host: str, keys: Keys) -> None:
    """A start without a key of servers says who can then act as a server."""
    own, url = ["--host", host], f"http://{f'[{host}]' if ':' in host else host}:1"
    log = keys.start(role, *own, url=url)
    assert ("--transfer-key" in log and "whoever reaches the port" in log) is (role != "both")
    log = keys.start(role, *own, "--api-key", "sesame", url=url)
    assert ("--transfer-key" in log and "each client" in log) is (role != "both")
    assert not keys.start(role, *own, "--api-key", "sesame", "--transfer-key", "open", url=url)
    keys.environment.setenv("DCPMLA_TRANSFER_KEY", "open")
    assert not keys.start(role, *own, url=url)


@pytest.mark.parametrize(
    ("role", "options", "url"),
    [
        *(("prefill", ["--host", host], "") for host in ("0.0.0.0", "::", "10.0.0.2", "host", "localhost.example", "")),
        ("decode", ["--host", "0.0.0.0"], "http://127.0.0.1:1"),
        ("decode", [], "http://p:1"),
        ("decode", [], "http://127.0.0.1@10.0.0.2:1"),
        ("decode", [], "http://[::]:1"),
    ],
)
def test_roles_beyond_a_host_need_the_key_of_servers(role: str, options: list[str], url: str, keys: Keys) -> None:
    for api_key in ([], ["--api-key", "sesame"]):
        error = keys.refuse(role, *options, *api_key, url=url)
        assert f"role (--role) is {role}" in error
        assert not keys.start(role, *options, *api_key, "--transfer-key", "open", url=url)
    assert not keys.start("both", *options)


def test_wrong_keys(keys: Keys) -> None:
    assert "is empty" in keys.refuse("both", "--api-key", "")
    assert "is empty" in keys.refuse("prefill", "--transfer-key", "")
    assert "give another one" in keys.refuse("prefill", "--api-key", "sesame", "--transfer-key", "sesame")
    keys.environment.setenv("DCPMLA_API_KEY", "sesame")
    assert "give another one" in keys.refuse("prefill", "--transfer-key", "sesame")
    keys.environment.setenv("DCPMLA_TRANSFER_KEY", "")
    assert "is empty" in keys.refuse("prefill")


def test_keys_reach_the_http_process_and_no_other_rank(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks compare their arguments, and print differences."""
    args = parse("--role", "prefill", "--api-key", "sesame", "--transfer-key", "open")
    monkeypatch.setattr(serve, "listen", lambda *_: nullcontext())
    monkeypatch.setattr(serve, "Frontend", lambda main, _: pytest.fail(str(main.keywords["settings"])))
    with pytest.raises(pytest.fail.Exception, match="api_key='sesame'.*transfer_key='open'"):
        serve.run(args)
    assert not {"api_key", "transfer_key"} & vars(args).keys()


WRONG = {  # options -> words of the line
    **{
        f"--prefill-servers {url}": "not a server's URL"
        for url in ("p:1", "ftp://p", "http://", "http://p/v1", "http://p?x")
    },
    **{f"--allowed-origins {text}": "is not an origin" for text in ("a.example", "https://a.example/", "https://")},
    "--port 65536": "argument --port: '",
    "--port=-1": "argument --port: '",
    "--request-timeout 0": "argument --request-timeout: '",
    "--max-waiting x": "argument --max-waiting: '",
}


@pytest.mark.parametrize("options", WRONG)
def test_wrong_options(options: str) -> None:
    with pytest.raises(ValueError, match=re.escape(WRONG[options])):
        parse(*options.split())


def test_a_slash_at_the_end_is_no_part_of_a_url() -> None:
    urls = parse("--role", "decode", "--prefill-servers", "http://p:1/", "https://q").prefill_servers
    engine: Any = SimpleNamespace(outbox=SimpleNamespace(send=print))
    assert [server.url for server in Prefills(urls, engine, None).servers] == ["http://p:1", "https://q"]


def test_origins() -> None:
    origins = ["*", "https://a.example:8443"]
    assert parse("--allowed-origins", *origins).allowed_origins == origins


def facts(dcp: DCPConfig | None = None, dtype: str = "bf16", norm: float = 1.0, **config: Any) -> dict[str, str]:
    files: Any = SimpleNamespace(config=SimpleNamespace(to_dict=lambda: {"layers": 2, **config}), directory=Path())
    sizes: Any = SimpleNamespace(dtype=dtype, index_dtype="uint8")
    layer = nn.RMSNorm(4)
    nn.init.constant_(layer.weight, norm)
    placement = SimpleNamespace(dcp=dcp or DCPConfig())
    model: Any = SimpleNamespace(dtype="bf16", placement=placement, modules=lambda: [nn.ModuleDict({"norm": layer})])
    return dict(cache_facts(files, model, sizes))


def test_facts_name_what_differs() -> None:
    def differing(other: dict[str, str]) -> list[str]:
        return [name for name, value in facts().items() if other[name] != value]

    assert differing(facts(_name_or_path="elsewhere", transformers_version="9")) == []
    assert "--model" in differing(facts(layers=3))[0]
    assert differing(facts(norm=2.0)) == ["the digest of the norms of the model's weights (--model)"]
    assert "--kv-cache-dtype" in differing(facts(dtype="uint8"))[0]
    assert "--kv-cache-scale" in differing(facts(DCPConfig(kv_cache_dtype="fp8", kv_cache_scale=2.0)))[0]
