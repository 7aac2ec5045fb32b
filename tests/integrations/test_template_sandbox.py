"""The release of jinja2, whose sandbox runs the chat templates of checkpoints."""

import tomllib
from importlib import metadata

import pytest

from dcpmla.__main__ import build_parser
from dcpmla.integrations.tokenizer import check_template_sandbox
from tests.support.launchers import ROOT


def install(patch: pytest.MonkeyPatch, version: str | None) -> None:
    def find(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    patch.setattr(metadata, "version", find)


@pytest.mark.parametrize("version", ["3.1.5", "3.1", "2.11.3", "unknown", None])
def test_earlier_sandboxes_are_refused(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, version)
    args = build_parser().parse_args(["serve", "--model", "absent", "--port", "0"])
    with pytest.raises(ValueError, match=rf"^jinja2 is {version or 'missing'}; it must be 3\.1\.6 or later, .*$"):
        args.run(args)


@pytest.mark.parametrize("version", ["3.1.6", "3.1.10", "3.2", "4.0.0"])
def test_later_sandboxes_are_taken(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, version)
    check_template_sandbox()


def test_the_release_is_declared() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "jinja2>=3.1.6" in extras["serve"]
    check_template_sandbox()
