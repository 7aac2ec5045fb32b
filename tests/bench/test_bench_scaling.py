"""`bench scaling` on real ranks, on one and two nodes; its timing and result files."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dcpmla.__main__ import main
from dcpmla.bench.layer_stack import LayerStack
from dcpmla.bench.results import write_results
from dcpmla.bench.timing import time_operation
from dcpmla.config import MLAConfig
from dcpmla.parallel.mesh import init_mesh
from dcpmla.planning.machine import H200X8
from dcpmla.planning.measured import predict_row
from dcpmla.planning.weights import read_model
from tests.support.launchers import run_forked, srun, unattended
from tests.support.models import tiny_config
from tests.support.ranks import run_ranks

SCALING = Path(__file__).parents[2] / "benchmarks" / "results" / "h200x4" / "scaling.json"
PROGRAM = ["-m", "dcpmla", "bench", "scaling"]
TINY = ["--model", "tiny", "--num-layers", "2", "--context", "96"]


def settings_of(rows: list[dict[str, Any]], part: str) -> set[tuple[int, int]]:
    return {(row["tp"], row["dcp"]) for row in rows if row.get("part") == part}


def test_four_ranks_measure_every_size_and_predict_more(tmp_path: Path) -> None:
    out, plot = tmp_path / "scaling.json", tmp_path / "scaling.png"
    config = tmp_path / "config.json"
    config.write_text(tiny_config("longcat_flash").to_json_string())  # 24 heads, two attention layers a decoder layer
    options = [
        "--model",
        config,
        "--batch",
        "1,3",
        "--context",
        "70",
        "--simulate",
        "16,1536",
        "--json",
        out,
        "--plot",
        plot,
        "--commit",
        "abc",
    ]
    result, *_ = run_forked(unattended([*PROGRAM, *options], 4))
    content = json.loads(out.read_text())
    assert (content["commit"], content["machine"]) == ("abc", "4 x CPU")
    assert content["versions"]["torch"] == torch.__version__
    measured, predicted = (
        [row for row in content["rows"] if row["kind"] == kind] for kind in ("measured", "predicted")
    )
    assert (
        len(measured) + len(predicted)
        == len(content["rows"])
        == len([line for line in result.stdout.splitlines() if "predicted" in line])
    )

    assert (
        settings_of(measured, "total") == settings_of(measured, "attention") == {(1, 1), (2, 2), (4, 4), (4, 1), (4, 2)}
    )
    exchanges = {
        (row["operation"], row.get("backend"), row["dcp"], row["num_tokens"]) for row in measured if "operation" in row
    }
    operations = [
        ("all_reduce", None),
        *((name, backend) for name in ("gather_heads", "combine") for backend in ("a2a", "ag_rs")),
    ]
    assert exchanges == {(*operation, dcp, batch) for operation in operations for dcp in (2, 4) for batch in (1, 3)}
    assert all(row["median_us"] > 0 and row["num_nodes"] == 1 and not row["in_graph"] for row in measured)

    by_ranks = {n: [row for row in predicted if row["num_ranks"] == n] for n in (16, 1536)}
    assert settings_of(by_ranks[16], "total") == {(8, dcp) for dcp in (1, 2, 4, 8)}
    assert settings_of(by_ranks[1536], "total") == {(24, dcp) for dcp in (1, 2, 3, 4, 6, 8, 12, 24)}
    assert {row["num_replicas"] for row in by_ranks[1536]} == {64}
    assert {row["num_nodes"] for row in by_ranks[1536] if row["dcp"] == 24} == {3}
    assert all("median_us" not in row for row in predicted)
    model = read_model(tiny_config("longcat_flash"))
    assert {(row["num_ranks"], row["gpus_per_node"]) for row in measured} == {(4, 4)}
    for row in content["rows"]:  # a row says all that its prediction needs
        assert row["predicted_us"] == pytest.approx(predict_row(H200X8, model, row), abs=0.06)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_two_ranks_on_each_of_two_nodes(tmp_path: Path) -> None:
    """A group of 2 stays on its node, the group of 4 crosses; the other node's predictions pay the network."""
    out = tmp_path / "scaling.json"
    run_forked(srun([*PROGRAM, *TINY, "--batch", "2", "--json", out], [2, 2], "localhost,elsewhere"))
    rows = json.loads(out.read_text())["rows"]
    nodes = {row["dcp"]: row["num_nodes"] for row in rows if row.get("operation") == "combine"}
    assert nodes == {2: 1, 4: 2}
    gathers = {row["dcp"]: row["predicted_us"] for row in rows if row.get("operation") == "gather_heads"}
    assert gathers[4] - gathers[2] == pytest.approx(H200X8.network_us, abs=0.2)


def test_measured_files_feed_the_planner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What 4 H200s measured of DeepSeek-V3's layers calibrates a plan, and stands beside it."""
    config = tmp_path / "config.json"
    config.write_text(transformers.DeepseekV3Config().to_json_string())
    command = [
        "plan",
        "--model",
        config,
        "--machine",
        f"h200x8,{SCALING}",
        "--measured",
        SCALING,
        "-tp",
        "4",
        "--context",
        "64",
    ]
    assert main(list(map(str, command))) == 0
    report = capsys.readouterr().out
    assert "h200x8, calibrated (exchange, attention, layers)" in report
    num_rows = sum(row["kind"] == "measured" for row in json.loads(SCALING.read_text())["rows"])
    assert f"{num_rows} measured rows\n" in report
    for subject in ("part total", "part attention", "a2a combine", "all_reduce"):
        assert f"{subject}: predicted is" in report


def test_layers_of_sparse_models_run_as_dense_ones(tmp_path: Path) -> None:
    config, out = tmp_path / "config.json", tmp_path / "scaling.json"
    config.write_text(tiny_config("deepseek_v32").to_json_string())
    assert main(["bench", "scaling", "--model", str(config), *TINY[2:], "--batch", "1", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["part"] for row in rows] == ["total", "attention"]
    assert all(row["median_us"] > 0 and row["predicted_us"] > 0 for row in rows)


def test_what_does_not_fit_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "scaling.json"
    assert (
        main(["bench", "scaling", *TINY[:2], "--batch", "1", "--context", "64,100000000000", "--json", str(out)]) == 0
    )
    assert "skipped: decode step of tp 1 dcp 1, 1 x 100,000,000,000: cache:" in capsys.readouterr().out
    assert {row["context"] for row in json.loads(out.read_text())["rows"]} == {64}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-layers", "0"], "--num-layers: '0' is not a whole number"),
        (["--batch", "0"], "not a whole number"),
        (["--model", "deepseek-v9"], "model (--model) is deepseek-v9: no such file"),
        (["--json", "/nowhere/out.json"], "--json is /nowhere/out.json"),
        (["--json", "same.png", "--plot", "same.png"], "--json and --plot are both same.png"),
        (["--machine", "h300"], "machine (--machine) is 'h300'"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_measured(
    options: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "scaling", *options]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert len(captured.err.strip().splitlines()) == 1


# ---- its parts


def slow_on_rank_1(_: int) -> None:
    time.sleep(0.02 if torch.distributed.get_rank() == 1 else 0)


def test_a_time_is_the_slowest_ranks() -> None:
    times = run_ranks(2, time_slow_rank)
    assert times[0] == times[1]
    assert times[0] >= 20_000


def time_slow_rank() -> float:
    return time_operation(slow_on_rank_1, torch.device("cpu"), calls=5, num_samples=3).median_us


StackOfRank = tuple[
    list[int], int, bool
]  # tokens it attends to, slots that a step writes, whether the output is finite and all ranks'


def stacks_of(cuts: list[tuple[int, int]]) -> list[StackOfRank]:
    """A step of a stack under each (tp, dcp)."""
    config = MLAConfig.from_hf(tiny_config("deepseek_v3"))
    stacks: list[StackOfRank] = []
    with torch.inference_mode():
        for tp, dcp in cuts:
            torch.manual_seed(0)  # the same hidden states on all ranks, as in a model
            stack = LayerStack(config, init_mesh(tp, dcp), 2, 3, 70, torch.device("cpu"), torch.float32)
            before = [rows.clone() for rows in stack.cache.layers]
            out = stack.step()
            written = sum(
                int((rows != old).any(-1).sum()) for rows, old in zip(stack.cache.layers, before, strict=True)
            )
            everyone = [torch.empty_like(out) for _ in range(4)]
            torch.distributed.all_gather(everyone, out)
            assert stack.metadata[0].decode is not None
            is_same = bool(out.isfinite().all()) and all(torch.equal(out, other) for other in everyone)
            stacks.append((stack.metadata[0].decode.local_seq_lens.tolist(), written, is_same))
    return stacks


def test_a_stack_is_a_decode_step() -> None:
    cuts = [(4, 4), (4, 2)]
    for (_, dcp), ranks in zip(cuts, zip(*run_ranks(4, stacks_of, cuts), strict=True), strict=True):
        group = ranks[:dcp]
        assert [sum(lens) for lens in zip(*(lens for lens, _, _ in group), strict=True)] == [70, 70, 70]
        assert (
            sum(written for _, written, _ in group) == 2 * 3
        )  # each layer stores each request's token once in a group
        assert all(same for _, _, same in ranks)


def test_results_name_their_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
    ).stdout.strip()
    rows = [{"operation": "gather_heads", "median_us": 1.5}]
    write_results(tmp_path / "a.json", rows, 8, torch.device("cpu"))
    content = json.loads((tmp_path / "a.json").read_text())
    assert list(content) == ["commit", "machine", "versions", "rows"]
    assert (content["commit"], content["machine"], content["rows"]) == (head or "unknown", "8 x CPU", rows)
    assert content["versions"]["transformers"] == transformers.__version__
    monkeypatch.setenv("PATH", str(tmp_path))  # no git there
    write_results(tmp_path / "a.json", rows, 8, torch.device("cpu"))
    assert json.loads((tmp_path / "a.json").read_text())["commit"] == "unknown"
