"""What a server takes from vLLM, compared with vLLM's files: names of options and metrics, the format of KV events."""

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dcpmla.cache.block_events import HOST, Cleared, Removed, Stored
from dcpmla.cli.vllm_options import VLLM_OPTIONS
from dcpmla.serving.kv_events import EventsConfig, KVEventBatch, published
from dcpmla.serving.metric_names import METRICS
from tests.engines.trees import VERSIONS, vllm_tree

VERSION = VERSIONS[-1]
# Options of earlier versions, which recipes still have, and -O, which another file of vLLM reads.
EARLIER = {
    *("--disable-log-requests", "--swap-space", "--enable-reasoning", "--guided-decoding-backend", "--task"),
    *("--max-num-partial-prefills", "--max-seq-len-to-capture", "-O"),
}


@pytest.fixture(scope="module")
def tree() -> Path:
    return vllm_tree(VERSION) / "vllm"


def test_options_are_vllms(tree: Path) -> None:
    engine = (tree / "engine/arg_utils.py").read_text()
    known = {*re.findall(r'"(--?[a-zA-Z][\w-]*)"', engine.partition("def add_cli_args")[2])}
    front = (tree / "entrypoints/common/cli_args.py").read_text()
    known |= {f"--{name.replace('_', '-')}" for name in re.findall(r"^    (\w+): ", front, re.MULTILINE)}
    known |= {*re.findall(r'"(--?[a-z][\w-]*)"', front + (tree / "entrypoints/cli/serve.py").read_text())}
    names = {name for option in VLLM_OPTIONS for name in option.names}
    assert names - known == EARLIER


def test_metrics_are_vllms(tree: Path) -> None:
    source = "".join((tree / "v1" / name).read_text() for name in ("metrics/loggers.py", "spec_decode/metrics.py"))
    kinds = {name: kind for kind, name in re.findall(r'_(gauge|counter|histogram)_cls\(\s*name="vllm:(\w+)"', source)}
    kinds |= dict.fromkeys(re.findall(r'^ +\(?"vllm:(spec_decode_\w+)", "', source, re.MULTILINE), "counter")
    kinds |= dict.fromkeys(re.findall(r'name = "vllm:(\w+)"', source), "gauge")
    ours = {name: metric for metric in METRICS.values() for name in metric.vllm}
    assert {name: kinds[name] for name in ours} == {
        name: metric.kind.replace("tally", "histogram") for name, metric in ours.items()
    }
    for name, metric in ours.items():
        for label in metric.vllm_labels:
            assert re.search(rf'"{label}"|metrics_info', source), (name, label)
    assert 'labelnames = ["model_name", "engine"]' in source


def structs_of(tree: Path) -> Mapping[str, Any]:
    """Return vLLM's structs of events, without importing vLLM."""
    syntax = ast.parse((tree / "distributed/kv_events.py").read_text())
    names = "EventBatch", "KVCacheEvent", "BlockStored", "BlockRemoved", "AllBlocksCleared", "KVEventBatch"
    classes = [node for node in syntax.body if isinstance(node, ast.ClassDef) and node.name in names]
    assert [node.name for node in classes] == list(names)
    found: dict[str, Any] = {"msgspec": msgspec, "Any": Any, "ExternalBlockHash": bytes | int}
    exec(compile(ast.Module(classes, []), "kv_events.py", "exec"), found)
    return found


def test_events_are_read_by_vllms_structs(tree: Path) -> None:
    """They come back as they were sent, and vLLM sends the same fields."""
    structs, key, parent = structs_of(tree), bytes(range(32)), bytes(range(1, 33))
    events = [Stored([key], parent, [5, 6]), Stored([parent], None, [7, 8], "salt", HOST), Removed(key), Cleared()]
    sent = msgspec.msgpack.encode(KVEventBatch(1.5, [*published(events, 2)], 0))
    batch = msgspec.msgpack.decode(sent, type=structs["KVEventBatch"])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch)) == msgspec.msgpack.decode(sent)
    assert (batch.ts, batch.data_parallel_rank, len(batch.events)) == (1.5, 0, 4)
    first, second, removed, cleared = batch.events
    assert (first.token_ids, first.block_size, first.medium) == ([5, 6], 2, "GPU")
    assert (second.parent_block_hash, second.extra_keys, second.medium) == (None, [("salt",)], "CPU")
    assert removed.block_hashes == first.block_hashes
    assert isinstance(cleared, structs["AllBlocksCleared"])


def test_the_config_of_events_is_vllms(tree: Path) -> None:
    syntax = ast.parse((tree / "config/kv_events.py").read_text())
    (config,) = (node for node in syntax.body if isinstance(node, ast.ClassDef))
    fields = {
        node.target.id: ast.literal_eval(node.value)
        for node in config.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None
    }
    assert fields == msgspec.structs.asdict(EventsConfig())


def test_hashes_are_integers_by_default(tree: Path) -> None:
    assert 'os.getenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")' in (tree / "envs.py").read_text()
    text = (tree / "v1/core/kv_cache_utils.py").read_text()
    assert 'int.from_bytes(hash_bytes, byteorder="big") & ((1 << 64) - 1)' in text
