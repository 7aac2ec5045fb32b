"""SGLang's plug-in where there is no SGLang: what a release is told that it does not know."""

import logging

import pytest

from dcpmla.integrations import sglang


@pytest.mark.parametrize("release", ["0.5.22", "0.5.24", "0.6.0", "0.5.230"])
def test_another_release_is_left_alone(
    release: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sglang, "version", lambda name: release)
    with caplog.at_level(logging.WARNING):
        sglang.register()  # would import SGLang
    assert caplog.messages == [
        f"dcpmla: sglang {release} is not among the tested releases (0.5.23); --attention-backend dcpmla is not added"
    ]


def test_a_patch_of_a_tested_release_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "version", lambda name: "0.5.23.post1")
    with pytest.raises(ModuleNotFoundError, match="sglang"):
        sglang.register()
