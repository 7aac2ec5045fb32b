"""Models from the Hugging Face hub, in a cache as huggingface_hub keeps it: revisions, and commits of all ranks."""

import errno
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import huggingface_hub
import pytest
import torch.distributed as dist

from dcpmla import LLM
from dcpmla.__main__ import main
from dcpmla.config import DCPConfig
from dcpmla.integrations import model_files
from dcpmla.integrations.model_files import find_commit, find_model
from dcpmla.integrations.open_model import open_model
from tests.support.launchers import environment
from tests.support.models import save_tiny
from tests.support.ranks import run_ranks
from tests.support.whole_models import load_engine_on_rank

MODEL = "org/tiny"
FIRST, SECOND = "1" * 40, "2" * 40


def save_hub(cache: Path, main: str) -> Path:
    """Save a model in two commits, named `main` and `v1`; return the folder of snapshots."""
    folder = cache / "models--org--tiny"
    (folder / "refs").mkdir(parents=True)
    for name, commit in (("main", main), ("v1", FIRST)):
        (folder / "refs" / name).write_text(commit)
    for commit in (FIRST, SECOND):
        (folder / "snapshots" / commit).mkdir(parents=True)
        save_tiny("deepseek_v3", folder / "snapshots" / commit)
    return folder / "snapshots"


def use_cache(patch: pytest.MonkeyPatch, cache: Path) -> None:
    download = partial(huggingface_hub.snapshot_download, cache_dir=cache, local_files_only=True)
    patch.setattr(model_files, "snapshot_download", download)


def test_revisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = save_hub(tmp_path, SECOND)
    use_cache(monkeypatch, tmp_path)
    for revision, commit in ((None, SECOND), ("main", SECOND), ("v1", FIRST), (FIRST, FIRST)):
        directory = find_model(MODEL, revision)
        assert directory == snapshots / commit
        assert find_commit(directory) == open_model(MODEL, revision=revision).commit == commit
    assert find_commit(tmp_path) is None
    assert open_model(str(snapshots / FIRST)).digests["commit"] == FIRST
    with pytest.raises(ValueError, match=r"could be downloaded in revision \(--revision\) 'v2'"):
        find_model(MODEL, "v2")
    with pytest.raises(ValueError, match=r"revision \(--revision\) is 'v1', but model \(--model\) is the directory"):
        find_model(str(tmp_path), "v1")
    for revision in ("", 1):
        with pytest.raises(ValueError, match=rf"revision \(--revision\) is {revision!r}; it must be a branch"):
            find_model(MODEL, revision)  # type: ignore[arg-type]


def load_own_commits(caches: list[Path]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        use_cache(patch, caches[dist.get_rank()])
        files = open_model(MODEL)
    words = f"^commit of the model's directory differs between ranks: .*{FIRST[:30]}.* on rank 0, .*{SECOND[:30]}.* on"
    with pytest.raises(ValueError, match=words):
        load_engine_on_rank(files, DCPConfig(tensor_parallel_size=2), seq_lens=[8])


def test_hosts_with_different_commits_end_with_one_message(tmp_path: Path) -> None:
    """Each host downloads its own snapshot, and a branch moves; both snapshots' files are equal here."""
    caches = [tmp_path / "first", tmp_path / "second"]
    for cache, commit in zip(caches, (FIRST, SECOND), strict=True):
        save_hub(cache, commit)
    run_ranks(2, load_own_commits, caches)


@pytest.mark.usefixtures("one_process_on_cpu")
def test_generate_records_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = save_hub(tmp_path, SECOND)
    use_cache(monkeypatch, tmp_path)
    options = ["generate", "--prompt-ids", "5,6,7", "--max-new-tokens", "2", "--json", str(tmp_path / "out")]
    options += ["--device", "cpu", "--kv-cache-memory-bytes", str(1 << 20), "--model"]
    for model, commit in (([MODEL, "--revision", "v1"], FIRST), ([MODEL], SECOND), ([str(snapshots / "local")], None)):
        if commit is None:
            (snapshots / SECOND).rename(snapshots / "local")
        assert not main([*options, *model])
        assert json.loads((tmp_path / "out").read_text()).get("model_commit") == commit


def test_llm_takes_a_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_hub(tmp_path, SECOND)
    use_cache(monkeypatch, tmp_path)
    with pytest.raises(ValueError, match=r"in revision \(--revision\) 'v2'"):
        LLM(MODEL, revision="v2", device="cpu")
    with LLM(MODEL, revision="v1", device="cpu", kv_cache_memory_bytes=1 << 20) as llm:
        assert len(llm.generate([[5, 6, 7]], use_tqdm=False)[0].token_ids) > 0


@contextmanager
def hub(status: int, headers: dict[str, str]) -> Iterator[str]:
    """Serve a hub that gives one answer to everything; yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in ({"content-length": "0"} | headers).items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def mistake() -> str:
    """Return the cause in the message on a model that cannot be downloaded."""
    start = f"model (--model) is {MODEL!r}: no such directory, and no such model could be downloaded: "
    with pytest.raises(ValueError, match=f"^{re.escape(start)}") as raised:
        find_model(MODEL)
    return str(raised.value).removeprefix(start)


ANSWERS = [
    (401, {}, "401 from the hub: no such model, a private one, or a wrong token (HF_TOKEN)"),
    (404, {"X-Error-Code": "RepoNotFound"}, "404 from the hub: no such model"),
    (404, {"X-Error-Code": "RevisionNotFound"}, "404 from the hub, which has the model, but no such revision"),
    (403, {"X-Error-Code": "GatedRepo"}, "it is gated; accept its terms on the hub"),
    (403, {}, "403 from the hub: the token (HF_TOKEN) may not read it"),
    (503, {}, "503 from the hub; try again later"),
]


@pytest.mark.parametrize(("status", "headers", "words"), ANSWERS)
def test_a_download_that_fails_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, headers: dict[str, str], words: str
) -> None:
    with hub(status, headers) as address:
        download = partial(huggingface_hub.snapshot_download, cache_dir=tmp_path, endpoint=address)
        monkeypatch.setattr(model_files, "snapshot_download", download)
        assert mistake().startswith(words)


def test_a_download_without_a_network_says_so(tmp_path: Path) -> None:
    """In a process of its own, as a user runs it: huggingface_hub reads variables when it is imported."""
    with hub(200, {}) as address:
        pass  # Nothing listens there any more.
    command = [sys.executable, "-m", "dcpmla", "generate", "--model", MODEL, "--device", "cpu", "--prompt-ids", "5"]
    env = environment() | {"HF_HUB_CACHE": str(tmp_path), "HF_ENDPOINT": address, "HF_TOKEN": "hf_secret"}
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 2, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("dcpmla: ")]
    assert f"could be downloaded: no connection to {address} (" in line
    assert line.endswith("), and the local cache has no such snapshot")
    assert "hf_secret" not in result.stderr


def test_offline_mode_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    download = partial(huggingface_hub.snapshot_download, cache_dir=tmp_path)
    monkeypatch.setattr(model_files, "snapshot_download", download)
    assert mistake() == "HF_HUB_OFFLINE is set, and the local cache has no such snapshot"


def test_a_download_that_fills_the_disk_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(model_files, "snapshot_download", fill)
    with pytest.raises(ValueError, match="could be downloaded: .*No space left on device"):
        find_model(MODEL)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"could be downloaded: it is no hub id \(NAME, or OWNER/NAME\)"):
        find_model("a/b/c")
