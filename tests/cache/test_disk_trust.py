"""What other users may put in the place of the disk tier's folders and files: it is refused, and stays as it is."""

import os
import socket
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from dcpmla.cache.disk_folder import DiskFolder
from tests.support.disk import IDENTITY, content_of, key_of, open_file, pieces_of, read_slot

NOBODY = 65534
FILES = ["rank0.0.blocks", "rank0.0.index", "identity.json"]
REFUSED = r"^kv_offloading_path \(--kv-offloading-path\) is .*; it must be a directory on a local disk"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user, which root may")


def link(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def dangling_link(path: Path, victim: Path) -> None:
    path.symlink_to(victim.with_name("none"))


def hard_link(path: Path, victim: Path) -> None:
    os.link(victim, path)


def link_to_a_device(path: Path, victim: Path) -> None:
    path.symlink_to("/dev/zero")


def pipe(path: Path, victim: Path) -> None:
    os.mkfifo(path)


def listener(path: Path, victim: Path) -> None:
    place = os.getcwd()
    os.chdir(path.parent)  # the path is too long for a socket's address
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(place)


def directory(path: Path, victim: Path) -> None:
    path.mkdir()
    (path / "mine").write_text("precious")


def open_to_others(path: Path, victim: Path) -> None:
    path.write_text("precious")
    path.chmod(0o666)


def of_another_user(path: Path, victim: Path) -> None:
    path.write_text("precious")
    path.chmod(0o600)
    os.chown(path, NOBODY, NOBODY)


THINGS = [link, dangling_link, hard_link, link_to_a_device, pipe, listener, directory, open_to_others]


def states(*folders: Path) -> dict[Path, tuple[object, ...]]:
    """Return kind, owner, size, number of names and text of all that folders hold; names of our own are left out."""
    found: dict[Path, tuple[object, ...]] = {}
    for folder in folders:
        for path in folder.rglob("*"):
            status = path.lstat()
            text = path.read_text() if stat.S_ISREG(status.st_mode) and status.st_size < 100 else None
            found[path] = status.st_mode, status.st_uid, status.st_size, status.st_nlink, text
    return found


@pytest.mark.parametrize("name", FILES[:2])
@pytest.mark.parametrize("put", [*THINGS, pytest.param(of_another_user, marks=needs_root)])
def test_what_is_not_ours_is_refused(tmp_path: Path, name: str, put: Callable[[Path, Path], None]) -> None:
    """Also where a file of blocks of ours is beside it. It is neither opened for good, resized nor removed."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = DiskFolder(tmp_path / "tier", IDENTITY).path
    if name.endswith("index"):
        (folder / FILES[0]).touch(mode=0o600)
    put(folder / name, victim)
    before = {path: state for path, state in states(tmp_path).items() if path.name not in FILES or path.name == name}
    with pytest.raises(ValueError, match=REFUSED):
        open_file(tmp_path / "tier")
    after = states(tmp_path)
    assert {path: after[path] for path in before} == before


@pytest.mark.parametrize("put", THINGS)
def test_an_identity_is_replaced_and_not_followed(tmp_path: Path, put: Callable[[Path, Path], None]) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = DiskFolder(tmp_path / "tier", IDENTITY).path
    (folder / "identity.json").unlink()
    put(folder / "identity.json", victim)
    if put is directory:
        with pytest.raises(ValueError, match=REFUSED):
            DiskFolder(tmp_path / "tier", IDENTITY)
    else:
        open_file(tmp_path / "tier").close()
        written = (folder / "identity.json").lstat()
        assert stat.S_ISREG(written.st_mode)
        assert stat.S_IMODE(written.st_mode) == 0o600
    assert victim.read_text() == "precious"


def put_folder(path: Path, kind: str, victim: Path) -> None:
    if kind == "link":
        path.symlink_to(victim)
    elif kind == "file":
        path.write_text("precious")
    else:
        path.mkdir()
        path.chmod(0o777 if kind == "open" else 0o700)
        (path / "mine.txt").write_text("precious")
        if kind == "another user's":
            os.chown(path, NOBODY, NOBODY)


@pytest.mark.parametrize("kind", ["link", "file", "open", pytest.param("another user's", marks=needs_root)])
def test_a_folder_that_is_not_ours_is_refused(tmp_path: Path, kind: str) -> None:
    """In the place of this identity's. In the place of another identity's it is left alone."""
    victim, tier = tmp_path / "victim", tmp_path / "tier"
    for folder in (victim, tier):
        folder.mkdir()
    (victim / "mine.txt").write_text("precious")
    name = DiskFolder(tmp_path / "elsewhere", IDENTITY).path.name
    put_folder(tier / name, kind, victim)
    before = states(victim, tier)
    with pytest.raises(ValueError, match=REFUSED):
        DiskFolder(tier, IDENTITY)
    assert states(victim, tier) == before
    other = DiskFolder(tier, {**IDENTITY, "model": "d2"})
    other.claim(0)
    assert not other.others
    after = states(victim, tier)
    assert {path: after[path] for path in before} == before


@needs_root
def test_blocks_of_another_identity_that_are_not_ours_stay(tmp_path: Path) -> None:
    open_file(tmp_path).close()
    folder = DiskFolder(tmp_path, IDENTITY).path
    os.chown(folder, NOBODY, NOBODY)
    other = DiskFolder(tmp_path, {**IDENTITY, "model": "d2"})
    assert not other.others
    other.claim(0)
    assert sorted(path.name for path in folder.iterdir()) == ["identity.json", "rank0.0.blocks", "rank0.0.index"]


def test_a_folder_that_is_replaced_is_still_ours(tmp_path: Path) -> None:
    """All of it goes into the folder that was checked, and none into what has its path now."""
    victim = tmp_path / "victim"
    victim.mkdir()
    tier = DiskFolder(tmp_path / "tier", IDENTITY)
    moved = tmp_path / "moved"
    tier.path.rename(moved)
    tier.path.symlink_to(victim)
    claimed = tier.claim(0)
    os.close(claimed.open_index())
    with suppress(OSError):  # not all file systems have direct reads
        os.close(claimed.open_direct())
    claimed.remove()
    os.close(claimed.lock)
    assert not list(victim.iterdir())
    assert [path.name for path in moved.iterdir()] == ["identity.json"]


def test_a_file_that_is_replaced_is_not_opened_again(tmp_path: Path) -> None:
    claimed = DiskFolder(tmp_path, IDENTITY).claim(0)
    claimed.blocks.unlink()
    claimed.blocks.touch(mode=0o600)
    with pytest.raises(OSError, match="rank0"):
        claimed.open_direct()
    os.close(claimed.lock)


@pytest.mark.parametrize(
    "name", ["rank0.x.blocks", "rank0.007.blocks", "rank0..blocks", f"rank0.{'9' * 400}.index"[:255]]
)
def test_odd_names_are_left_alone(tmp_path: Path, name: str) -> None:
    path = DiskFolder(tmp_path, IDENTITY).path / name
    path.write_text("precious")
    file = open_file(tmp_path)
    file.write(0, key_of(1), pieces_of(content_of(1)))
    file.close()
    assert read_slot(open_file(tmp_path), 0, key_of(1)) == content_of(1)
    assert path.read_text() == "precious"
