"""Folders that several processes of tests share are filled once."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from tests.engines.trees import once


def test_one_of_several_fills_a_folder(tmp_path: Path) -> None:
    """Four that want a folder at the same time get it whole, filled by one of them; nothing else is left."""
    together, fills = Barrier(4), []

    def fill(folder: Path) -> None:
        fills.append(folder)
        for name in "abc":
            (folder / name).write_text(name)

    def want(_: int) -> list[str]:
        together.wait()
        return sorted(path.name for path in once(tmp_path / "tree", fill).iterdir())

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(want, range(4))) == [["a", "b", "c"]] * 4
    assert len(fills) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tree", "tree.lock"]


def test_a_folder_is_filled_whole_or_not_at_all(tmp_path: Path) -> None:
    """A fill that fails skips the test and leaves no folder, so the next one tries again."""

    def fail(folder: Path) -> None:
        (folder / "a").write_text("a")
        raise OSError("the index cannot be reached")

    with pytest.raises(pytest.skip.Exception, match="the index cannot be reached"):
        once(tmp_path / "tree", fail)
    assert not (tmp_path / "tree").exists()
    assert once(tmp_path / "tree", lambda folder: (folder / "a").touch()) == tmp_path / "tree"
