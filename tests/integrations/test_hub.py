"""Models from the Hugging Face hub, in a cache as huggingface_hub keeps it: revisions, and commits of all ranks."""

import json
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest
import torch.distributed as dist

from dcpmla import LLM
from dcpmla.__main__ import main
from dcpmla.config import DCPConfig
from dcpmla.integrations import model_files
from dcpmla.integrations.model_files import find_commit, find_model
from dcpmla.integrations.open_model import open_model
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
