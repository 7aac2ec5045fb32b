"""The disk tier among links, pipes, open files and other users' files: refused in one line, and nothing is changed."""

import itertools
import json
import os
import re
import socket
import stat
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dcpmla.__main__ import main
from dcpmla.cache.disk_file import BlockFile
from dcpmla.cache.disk_folder import DiskFolder
from dcpmla.own_files import open_own
from tests.support.disk import IDENTITY, SLOT_BYTES, content_of, key_of, open_file, pieces_of, read_slot

OTHER = {**IDENTITY, "layout": "tp 4, dcp 2, interleave 16"}
STRANGER = 65534
PRECIOUS = b"precious" * 100
FILES_OF = [f"{content}{rank}.0" for content in ("rank", "states", "probe") for rank in (0, 3)]
NAMES = [f"{name}.{suffix}" for name in FILES_OF for suffix in ("blocks", "index")]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def tree(directory: Path) -> dict[str, tuple[object, ...]]:
    """Return kind, mode, owner, names, target and content of all that a directory holds, without following links."""
    entries: dict[str, tuple[object, ...]] = {}
    for path in [directory, *directory.rglob("*")]:
        status = path.lstat()
        is_file = stat.S_ISREG(status.st_mode)
        content = path.read_bytes() if is_file else os.readlink(path) if path.is_symlink() else None
        entries[str(path)] = status.st_mode, status.st_uid, status.st_nlink if is_file else 0, content
    return entries


def own(path: Path, mode: int = 0o600) -> None:
    path.write_bytes(PRECIOUS)
    path.chmod(mode)


def give_away(path: Path) -> None:
    own(path)
    os.chown(path, STRANGER, STRANGER)


def bind(path: Path) -> None:
    """Make a socket; its address is relative because it may have 107 characters."""
    before = os.open(".", os.O_RDONLY)
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.fchdir(before)
        os.close(before)


def fill_folder(path: Path, user: int = -1) -> None:
    path.mkdir(mode=0o700)
    own(path / "mine")
    os.chown(path, user, user)


def open_folder(mode: int, path: Path, victim: Path) -> None:
    fill_folder(path)
    path.chmod(mode)


Make = Callable[[Path, Path], object]
# What takes the place of a file or folder, and the beginning of what the refusal says of it. The victim is beside it.
ODD: dict[str, tuple[Make, str]] = {
    "link": (lambda path, victim: path.symlink_to(victim), "a link of user"),
    "dangling link": (lambda path, victim: path.symlink_to(victim.parent / "missing"), "a link of user"),
    "link to a device": (lambda path, victim: path.symlink_to("/dev/zero"), "a link of user"),
    "link to itself": (lambda path, victim: path.symlink_to(path.name), "a link of user"),
    "link to a folder": (lambda path, victim: path.symlink_to(victim.parent), "a link of user"),
    "hard link": (lambda path, victim: path.hardlink_to(victim), "a file .*of user"),
    "pipe": (lambda path, victim: os.mkfifo(path, 0o600), "a pipe of user"),
    "socket": (lambda path, victim: bind(path), "a socket of user"),
    "open file": (lambda path, victim: own(path, 0o666), "a file of user"),
    "another user's": (lambda path, victim: give_away(path), f"a file of user {STRANGER} "),
}
ODD_FILES: dict[str, tuple[Make, str]] = ODD | {
    "hard link": (ODD["hard link"][0], "a file with 2 names of user"),
    "open file": (ODD["open file"][0], "a file of user .* with mode 0666"),
    "folder": (lambda path, victim: fill_folder(path), "a folder of user"),
}
ODD_FOLDERS: dict[str, tuple[Make, str]] = ODD | {
    "another user's": (lambda path, victim: fill_folder(path, STRANGER), f"a folder of user {STRANGER} ")
}
OPEN_FOLDERS: dict[str, tuple[Make, str]] = {
    f"mode {mode:o}": (partial(open_folder, mode), rf"a folder of user \d+ with mode 0{mode:o}")
    for mode in (0o755, 0o750, 0o701, 0o730, 0o777)
}


def cases(places: Iterable[str], odd: Iterable[str]) -> list[Any]:
    """Return each place with each kind of odd thing. Only root can give files to another user."""
    return [
        pytest.param(place, kind, marks=as_root if kind == "another user's" else ())
        for place, kind in itertools.product(places, odd)
    ]


def refusal(directory: Path, path: Path, words: str) -> str:
    option = rf"^kv_offloading_path \(--kv-offloading-path\) is {re.escape(str(directory))}: "
    rule = r"[^\n]*; only [^\n]* used[^\n]*; it must be a directory on [^\n]*$"
    return rf"{option}{re.escape(str(path))} is {words}{rule}"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    (tmp_path / "victim").mkdir(mode=0o700)
    own(tmp_path / "victim" / "file")
    return tmp_path / "victim" / "file"


AT_THE_START = [
    *cases(("identity.json", "rank0.0.blocks"), ODD_FILES),
    *cases(NAMES, ["link"]),  # whichever rank's file it is
    *cases(("folder",), ODD_FOLDERS | OPEN_FOLDERS),
    *cases(("directory",), ODD_FOLDERS),
]


@pytest.mark.parametrize(("place", "kind"), AT_THE_START)
def test_odd_things_at_the_start(place: str, kind: str, victim: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    open_file(disk).close()
    folder = DiskFolder(disk, IDENTITY).path
    path = {"directory": disk, "folder": folder}.get(place, folder / place)
    if path.is_dir():
        path.rename(tmp_path / "moved")
    path.unlink(missing_ok=True)
    make, words = (ODD_FOLDERS | OPEN_FOLDERS if place in ("directory", "folder") else ODD_FILES)[kind]
    make(path, victim)
    before = tree(tmp_path)
    with pytest.raises(ValueError, match=refusal(disk, path, words)):
        DiskFolder(disk, IDENTITY)
    assert tree(tmp_path) == before


@pytest.mark.parametrize(("suffix", "kind"), cases(("blocks", "index"), ODD_FILES))
def test_odd_things_that_come_after_the_start(suffix: str, kind: str, victim: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    folder = DiskFolder(disk, IDENTITY)
    path = folder.path / f"rank0.0.{suffix}"
    make, words = ODD_FILES[kind]
    make(path, victim)
    before = tree(tmp_path)
    for _ in range(2):  # The lock of the blocks is free after a refusal of the index.
        with pytest.raises(ValueError, match=refusal(disk, path, words)):
            folder.claim(0)
    after = tree(tmp_path)
    assert {name: after[name] for name in before} == before


OF_OTHERS = [*cases(("blocks", "index"), ODD_FILES), *cases(("folder",), ODD_FOLDERS | OPEN_FOLDERS)]


@pytest.mark.parametrize(("place", "kind"), OF_OTHERS)
def test_odd_things_of_another_identity(place: str, kind: str, victim: Path, tmp_path: Path) -> None:
    """The job runs beside them in a directory that users share, and does not remove them."""
    disk = tmp_path / "disk"
    other = DiskFolder(disk, OTHER).path
    disk.chmod(0o1777)
    own(other / "rank0.0.blocks")
    if place == "folder":
        identity = (other / "identity.json").read_bytes()
        other.rename(tmp_path / "moved")
        (ODD_FOLDERS | OPEN_FOLDERS)[kind][0](other, victim)
        for folder in (victim.parent, other):
            if folder.is_dir():
                (folder / "identity.json").write_bytes(identity)
                own(folder / "rank0.0.blocks")
    else:
        path = other / f"rank0.0.{place}"
        path.unlink(missing_ok=True)
        ODD_FILES[kind][0](path, victim)
    before = tree(victim.parent) | (tree(other) if not other.is_symlink() else {})
    assert place != "folder" or not DiskFolder(disk, IDENTITY).others
    open_file(disk).close()
    assert tree(victim.parent) | (tree(other) if not other.is_symlink() else {}) == before


def test_links_above_the_directory(tmp_path: Path) -> None:
    """One's own are followed, another user's are not."""
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    open_file(tmp_path / "link" / "disk").close()
    assert (tmp_path / "target" / "disk").is_dir()
    if os.geteuid() == 0:
        os.chown(tmp_path / "link", STRANGER, STRANGER, follow_symlinks=False)
        before = tree(tmp_path)
        for disk in (tmp_path / "link" / "disk", tmp_path / "link" / "new" / "disk"):
            message = rf"link is a link of user {STRANGER} with mode 0777; links of user 0 or of root are followed"
            with pytest.raises(ValueError, match=message):
                DiskFolder(disk, IDENTITY)
        assert tree(tmp_path) == before


@pytest.mark.parametrize("level", ["directory", "folder"])
def test_a_folder_that_is_replaced_after_its_making(level: str, victim: Path, tmp_path: Path) -> None:
    """The job goes on in the folder that it has made."""
    disk = tmp_path / "disk"
    folder = DiskFolder(disk, IDENTITY)
    path = disk if level == "directory" else folder.path
    kept = tmp_path / "moved" / (folder.path.name if level == "directory" else "")
    path.rename(tmp_path / "moved")
    path.symlink_to(victim.parent)
    before = tree(victim.parent)
    file = BlockFile(folder.claim(0), 4, SLOT_BYTES)
    file.write(0, key_of(1), pieces_of(content_of(1)))
    folder.claim(0, "probe").remove()
    file.close()
    assert tree(victim.parent) == before
    assert sorted(entry.name for entry in kept.iterdir()) == ["identity.json", "rank0.0.blocks", "rank0.0.index"]
    with pytest.raises(ValueError, match=refusal(disk, path, "a link of user")):
        DiskFolder(disk, IDENTITY)


@pytest.mark.parametrize(("level", "kind"), cases(("directory", "folder"), ODD_FOLDERS))
def test_a_folder_that_is_replaced_right_after_it_is_made(
    level: str, kind: str, victim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    path = disk if level == "directory" else DiskFolder(disk, IDENTITY).path
    if level == "folder":
        path.rename(tmp_path / "before")
    make_folder, (make, words) = os.mkdir, ODD_FOLDERS[kind]

    def make_and_replace(made: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        make_folder(made, mode, dir_fd=dir_fd)
        if Path(made).name == path.name and not (tmp_path / "moved").exists():
            path.rename(tmp_path / "moved")
            make(path, victim)

    before = tree(victim.parent)
    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", make_and_replace)
        with pytest.raises(ValueError, match=refusal(disk, path, words)):
            DiskFolder(disk, IDENTITY)
    after = tree(victim.parent)
    assert kind == "hard link" or after == before
    assert victim.read_bytes() == PRECIOUS
    assert not list((tmp_path / "moved").iterdir())


@pytest.mark.parametrize(("name", "kind"), cases(("rank0.0.blocks",), ODD_FILES))
def test_a_file_that_is_replaced_before_it_is_opened(
    name: str, kind: str, victim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the first look and the opening: a link is not followed, a pipe does not block, the rest is looked at."""
    open_file(tmp_path / "disk").close()
    folder = DiskFolder(tmp_path / "disk", IDENTITY)
    path, opens = folder.path / name, os.open

    def replace_and_open(entry: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if entry == name and not (folder.path / "moved").exists():
            path.rename(folder.path / "moved")
            ODD_FILES[kind][0](path, victim)
        return opens(entry, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", replace_and_open)
    with pytest.raises(ValueError, match=r"^kv_offloading_path \(--kv-offloading-path\) is [^\n]*$"):
        folder.claim(0)
    assert victim.read_bytes() == PRECIOUS
    assert stat.S_IMODE(victim.stat().st_mode) == 0o600


ODD_NAMES = ["x.blocks", "00.blocks", "-1.index", "\u0663.blocks", "0.1.blocks", "0\n.blocks"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names(name: str, tmp_path: Path) -> None:
    path = DiskFolder(tmp_path, IDENTITY).path / f"rank0.{name}"
    own(path)
    before = tree(tmp_path)
    with pytest.raises(ValueError, match=r"^kv_offloading_path [^\n]* has another name than files of ranks[^\n]*$"):
        DiskFolder(tmp_path, IDENTITY)
    assert tree(tmp_path) == before


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    path = os.fsencode(DiskFolder(tmp_path, IDENTITY).path) + b"/\xff.blocks"
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    with pytest.raises(ValueError, match=r"\\udcff\.blocks' has another name") as caught:
        DiskFolder(tmp_path, IDENTITY)
    str(caught.value).encode()
    with pytest.raises(ValueError, match=r"\(--kv-offloading-path\) is '/nul\\x00': .*null"):
        DiskFolder(Path("/nul\0"), IDENTITY)


def test_files_of_earlier_versions_are_used(tmp_path: Path) -> None:
    """They made the directory and identity.json with the modes of the umask, and left `identity.PID` after a kill."""
    disk = tmp_path / "disk"
    for umask in (0o022, 0o002):
        disk.mkdir(mode=0o777 & ~umask, exist_ok=True)
        file = open_file(disk)
        file.write(0, key_of(1), pieces_of(content_of(1)))
        file.close()
        folder = DiskFolder(disk, IDENTITY).path
        (folder / "identity.json").chmod(0o666 & ~umask)
        (folder / "identity.123").write_text("")
        disk.chmod(0o777 & ~umask)
        file = open_file(disk)
        assert read_slot(file, 0, key_of(1)) == content_of(1)
        file.close()
        assert stat.S_IMODE((folder / "identity.json").stat().st_mode) == 0o600


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_what_is_made_is_closed_to_others(umask: int, tmp_path: Path) -> None:
    os.umask(umask)
    open_file(tmp_path / "disk").close()
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [tmp_path / "disk", *(tmp_path / "disk").rglob("*")]}
    assert all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in modes.items()), modes
    assert len(modes) == 5


@pytest.mark.parametrize("content", [b"", b"no json", b"{" * 10_000])
def test_a_damaged_identity_is_written_again(content: bytes, tmp_path: Path) -> None:
    path = DiskFolder(tmp_path, IDENTITY).path / "identity.json"
    path.write_bytes(content)
    DiskFolder(tmp_path, OTHER)
    DiskFolder(tmp_path, IDENTITY)
    assert json.loads(path.read_text()) == IDENTITY


@pytest.mark.parametrize(("name", "kind"), cases(("file",), ODD_FILES))
def test_own_files(name: str, kind: str, victim: Path, tmp_path: Path) -> None:
    """The same function opens files by their paths."""
    path = tmp_path / name
    ODD_FILES[kind][0](path, victim)
    before = tree(tmp_path)
    with pytest.raises(PermissionError, match=f"^{path} is {ODD_FILES[kind][1]}"):
        open_own(path, os.O_WRONLY | os.O_CREAT)
    assert tree(tmp_path) == before


def test_a_command_refuses_links(
    model: Path, victim: Path, tmp_path: Path, one_process_on_cpu: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """It writes its blocks, ends with one line if a link has the place of a file or the folder, and starts again."""
    disk, prompt = tmp_path / "disk", ",".join(str(1 + index % 50) for index in range(100))
    sizes = "--block-size 16 --kv-cache-memory-bytes 1048576 --kv-offloading-size 0.01 --kv-offloading-disk-size 0.01"
    options = f"--device cpu --dtype float32 {sizes} --max-new-tokens 1 --prompt-ids {prompt}".split()
    command = ["generate", "--model", str(model), "--kv-offloading-path", str(disk), *options]
    assert main(command) == 0
    (index,) = disk.glob("*/rank0.0.index")
    content = index.read_bytes()
    assert any(content)
    before = tree(victim.parent)
    for name in ("rank0.0.blocks", "rank0.0.index", "identity.json", ""):
        path = index.parent / name
        path.rename(tmp_path / "moved")
        path.symlink_to(victim if name else victim.parent)
        assert main(command) == 2
        refused = capfd.readouterr().err
        assert f"kv_offloading_path (--kv-offloading-path) is {disk}: {path} is a link of user" in refused
        assert "Traceback" not in refused
        assert tree(victim.parent) == before
        path.unlink()
        (tmp_path / "moved").rename(path)
    assert index.read_bytes() == content
    assert main(command) == 0
