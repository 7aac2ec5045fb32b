"""The command `dcpmla plan`: tables, files, mistakes."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from dcpmla.__main__ import main
from dcpmla.extras import install
from tests.support.commands import mistake
from tests.support.models import tiny_config
from tests.support.plan_cases import FP8, LAYER, RESULTS, write


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.json"
    path.write_text(tiny_config("deepseek_v3").to_json_string())
    return path


def plan(model: object, command: str = "") -> int:
    """Run the command with options that are separated by spaces; return the exit code."""
    return main(["plan", "--model", str(model), *command.split()])


def test_command_writes_the_plan(config_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "plan.json", tmp_path / "plan.png"
    command = "--machine h200x8 -tp 4,8 -dcp 1,8 --kv-cache-dtype bf16,fp8_e4m3"
    command += " --batch 2 --context 200 --max-num-batched-tokens 1024 --input-len 1500"
    measured = RESULTS / "h200x4" / "exchange.json"
    assert plan(config_file, f"{command} --json {out} --plot {plot} --measured {measured}") == 0
    content = json.loads(out.read_text())
    assert [(s["tp"], s["dcp"], s["kv_cache_dtype"]) for s in content["settings"]] == [
        (4, 1, "bf16"),
        (4, 1, "fp8"),
        (8, 1, "bf16"),
        (8, 8, "bf16"),
        (8, 1, "fp8"),
        (8, 8, "fp8"),
    ]
    keys = {"weight_bytes_per_rank", "kv_bytes_per_token", "kv_tokens_per_rank", "kv_tokens_total", "step_us"}
    assert all(keys <= set(setting) and "total" in setting["step_us"] for setting in content["settings"])
    assert content["recommended"]["tp"] in (4, 8)
    assert [s["exchange"] for s in content["settings"]] == ["none", "none", "none", "direct", "none", "direct"]
    printed = capfd.readouterr().out
    assert content["recommended"]["reason"] in printed
    assert re.search(
        r"^tp +dcp +exchange +cache .*\n( +[48] +1 +none +.*\n){3} +8 +8 +direct +bf16 ", printed, re.MULTILINE
    )
    assert re.search(
        r"^ *cache +dcp +bytes a token +tokens a GB +tokens on 8 GPUs\n( *(bf16|fp8) +[18] .*\n){4}\n", printed, re.M
    )
    rows = [row for row in json.loads(measured.read_text())["rows"] if row["operation"] != "gather_context"]
    known = [row for row in rows if row["variant"] != "fp8" and row["exchange"] != "vllm_direct"]
    assert [{**row, "predicted_us": 0} for row in known] == [{**row, "predicted_us": 0} for row in content["measured"]]
    prompts = content["prompts"]
    assert [(s["new"], s["context"], s["num_decodes"]) for s in prompts["steps"]] == [
        (size - (load if size == 1024 else 0), context, load)
        for context in (0, 200)
        for size in (64, 512, 1024)
        for load in (0, 2)
    ]
    assert re.search(
        r"^steps of tp [48], .* alone and with 2 decodes of 200 tokens\n"
        r"prompt tokens +after +graph +step ms +graph with decodes +with decodes ms +decodes wait ms\n"
        r"( +(64|512|1,024) +(0|200) +\S.*\n){6}a prompt of 1,500 tokens takes ",
        printed,
        re.MULTILINE,
    )
    alone, beside = prompts["first_token"]
    assert (alone["num_tokens"], alone["num_steps"], alone["longest_wait_us"]) == (1500, 2, 0)
    waits = f"with 2 decodes {beside['time_us'] / 1e3:.2f} ms in {beside['num_steps']} steps, each at most "
    assert waits + f"{beside['longest_wait_us'] / 1e3:.2f} ms longer than with decodes alone" in printed
    lines = [line for line in printed.splitlines() if re.match(r"(gather_heads|combine) ", line)]
    for row, line in zip(content["measured"], lines, strict=True):
        assert line.startswith(f"{row['operation']} {row['exchange']}")
        times = re.findall(r"[\d,.]+", line[26:])[:3]
        expected = [row["median_us"], row["predicted_us"], row["predicted_us"] / row["median_us"]]
        assert [float(time.replace(",", "")) for time in times] == pytest.approx(expected, rel=5e-3, abs=0.06)
    assert f"({len(known)} rows; " in printed
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_command_takes_a_directory_and_prints_a_table(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tiny_config("longcat_flash").save_pretrained(tmp_path)
    assert plan(tmp_path, "-dcp 1,4 --batch 1 --context 1000") == 0
    out = capfd.readouterr().out
    assert "recommended: tp 8, dcp 1" in out
    assert "positions end at 256" in out
    table = [line for line in out.splitlines() if re.match(r"\s*(tp|8)\s+(dcp|\d)", line)]
    assert len(table) == 3
    assert len({len(line) for line in table}) == 1


def test_nothing_is_recommended_where_nothing_fits(
    config_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither of 1 GiB for the weights nor for the load there is room: no time is predicted."""
    small, out, plot = tmp_path / "machine.json", tmp_path / "plan.json", tmp_path / "plan.png"
    for memory, words in ((1 << 10, "even the weights"), (1 << 22, "No setting holds 2,000 x 20,000 tokens")):
        small.write_text(json.dumps({"memory_bytes": memory}))
        command = f"--machine {small} -tp 4,8 --batch 2000 --context 20000 --input-len 64"
        command += f" --kv-offloading-size 1 --json {out} --plot {plot}"
        assert plan(config_file, command) == 0
        printed, content = capfd.readouterr().out, json.loads(out.read_text())
        assert re.search(rf"^recommended: none\. .*{words}", printed, re.MULTILINE)
        assert "steps of tp" not in printed
        assert "tiers of the cache" not in printed
        for field in ("recommended", "prompts", "tiers"):
            assert content[field] is None
        for setting in content["settings"]:
            assert (setting["fits"], setting["tokens_per_second"]) == (False, None)
            assert (setting["step_us"], setting["crossover"]) == ({}, {})
        assert plot.read_bytes().startswith(b"\x89PNG")


def test_command_plans_sparse_models(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config, out, plot = tmp_path / "config.json", tmp_path / "plan.json", tmp_path / "plan.png"
    config.write_text(tiny_config("glm_moe_dsa").to_json_string())
    command = f"-dcp 1,8 --kv-cache-dtype fp8 --index-cache-dtype fp8 --context 200 --json {out} --plot {plot}"
    assert plan(config, command) == 0
    settings = json.loads(out.read_text())["settings"]
    assert [(s["index_cache_dtype"], s["kv_bytes_per_token"]) for s in settings] == 2 * [
        ("fp8", 3 * (16 + 8) + 2 * (16 + 4))
    ]
    assert all(s["step_us"]["selection"] > 0 for s in settings)
    printed = capfd.readouterr().out
    assert re.search(r"^tp .* projections +selection +gather +attention ", printed, re.MULTILINE)
    assert re.search(r"^cache +index cache +dcp .*\n( *(bf16|fp8) +(bf16|fp8) +[18] .*\n){8}\n", printed, re.MULTILINE)
    assert plot.read_bytes().startswith(b"\x89PNG")


MISTAKES = {  # options -> words of the line
    "-tp 5 -dcp 1": "must divide the model's 24 attention heads",
    "-tp 4,8 -dcp 3": "must divide tensor_parallel_size (-tp) 8",
    "-tp 4 --num-gpus 6": "num_gpus (--num-gpus) is 6; it must be a multiple of tensor_parallel_size (-tp) 4",
    "--batch 1" + "0" * 30: "it must be a whole number in [1, 1099511627776]",
    "--context 1" + "0" * 400: "context (--context) is 1000000",
    "--input-len 1" + "0" * 400: "argument --input-len: '1000",
    "--max-num-batched-tokens 16777217": (
        "argument --max-num-batched-tokens: '16777217' is not a whole number in [1, 16777216]"
    ),
    "-tp 1000000000": "must divide the model's 24 attention heads",
    "-dcp 0": "not a whole number of at least 1",
    "--kv-cache-dtype int4": "choose from bf16, fp8, fp8_ds_mla",
    "--kv-cache-dtype fp8_ds_mla": "fp8_ds_mla scales 128 values of kv_c at a time; kv_lora_rank is 16",
    "--index-cache-dtype fp8": (
        "index_cache_dtype (--index-cache-dtype) fp8 goes with sparse MLA, whose layers have indexers"
    ),
    "--kv-offloading-size 0": (
        "kv_offloading_size (--kv-offloading-size) is 0.0; it must be a finite number above 0, or none"
    ),
    "--kv-offloading-size nan": "kv_offloading_size (--kv-offloading-size) is nan",
    "--kv-offloading-disk-size 3": (
        "kv_offloading_disk_size (--kv-offloading-disk-size) is 3; blocks reach disks through host memory"
    ),
    "--machine h100x3": "choose a preset (h100x1, h100x2, h100x4, h100x8, h100x16, h200x1,",
    "--measured nowhere.json": "--measured is nowhere.json",
    "--json /nowhere/out.json": "--json is /nowhere/out.json",
    "--plot plan.word": "its ending must be one of",
    "--model nowhere": "model (--model) is nowhere",
    "--model " + "n" * 5000: "no such file or directory",
    "--machine " + "n" * 5000: "choose a preset",
}


@pytest.mark.parametrize("command", MISTAKES, ids=lambda command: command[:60])
def test_mistakes_are_one_line(
    command: str,
    config_file: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert plan(config_file, command) == 2
    captured = capfd.readouterr()
    assert MISTAKES[command] in captured.err
    assert len(captured.err.strip().splitlines()) == 1
    assert captured.out == ""
    assert not (tmp_path / "plan.word").exists()


BAD_FIELDS = {  # values of a config's fields that no model has
    "hidden_size": [-1],
    "vocab_size": [0],
    "num_hidden_layers": [0, 10**9],
    "kv_lora_rank": [0],
    "num_attention_heads": [0],
    "n_routed_experts": [0],
    "n_shared_experts": [-3],
    "quantization_config": ["fp8", [1]],
}
BAD_FP8 = {
    "quant_method": ["quark"],
    "weight_block_size": [128, [128], [0, 0], ["a", "b"]],
    "modules_to_not_convert": [5, "lm_head"],
}
BAD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    *(({name: value}, f"{name} is {value!r}") for name, values in BAD_FIELDS.items() for value in values),
    *(
        ({"quantization_config": {**FP8, name: value}}, f"{name} is {value!r}")
        for name, values in BAD_FP8.items()
        for value in values
    ),
    ({"num_experts_per_tok": 999}, "num_experts_per_tok is 999; it must be in [1, 4]"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_CONFIGS)
def test_bad_configs_are_one_line(
    changes: dict[str, Any], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = json.loads(tiny_config("deepseek_v3").to_json_string())
    assert plan(write(tmp_path / "config.json", {**config, **changes})) == 2
    assert message in mistake(capfd)


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_outputs_are_none_of_the_inputs(
    option: str, config_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    measured = tmp_path / "bench.png"
    measured.write_bytes(LAYER.read_bytes())
    for read in (config_file, measured):
        before = read.read_bytes()
        assert plan(config_file, f"--measured {measured} --machine h200x8,{measured} {option} {read}") == 2
        assert f"{option} is {read}, which is read" in mistake(capfd)
        assert read.read_bytes() == before
    out = tmp_path / "out.png"
    assert plan(config_file, f"--json {out} --plot {out}") == 2
    assert "--json and --plot are both" in mistake(capfd)
    assert not out.exists()


def test_default_dcp_sizes_are_those_that_divide(config_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    assert plan(config_file, f"-tp 1,4,6 --context 64 --json {out}") == 0
    settings = [(s["tp"], s["dcp"]) for s in json.loads(out.read_text())["settings"]]
    assert settings == [(1, 1), (4, 1), (4, 2), (4, 4), (6, 1), (6, 2), (6, 3), (6, 6)]


def test_command_compares_cuts_of_a_cluster(
    config_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    assert plan(config_file, f"--num-gpus 96 -tp 8,24 -dcp 8 --batch 960 --context 64 --json {out}") == 0
    settings = json.loads(out.read_text())["settings"]
    assert [(s["tp"], s["num_gpus"], s["num_replicas"], s["num_nodes"]) for s in settings] == [
        (8, 96, 12, 12),
        (24, 96, 4, 12),
    ]
    printed = capfd.readouterr().out
    assert "96 GPUs in 12 nodes" in printed
    assert "not measured: they assume a network of 45 GB/s" in printed


@pytest.mark.parametrize(
    ("name", "num_gpus", "words"),
    [
        ("h200x4", 4, "measured on 1 to 8 H200s, but for what docs/planning.md names"),
        ("h100x16", 16, "from the datasheet, at the shares that H200s reach; two hosts of 8, whose network is assumed"),
        ("b200x1", 1, "from the datasheet, .* no kernels of its own for it"),
    ],
)
def test_a_preset_says_where_its_numbers_are_from(
    name: str, num_gpus: int, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without -tp all its GPUs are one group."""
    config = write(tmp_path / "v3.json", {**transformers.DeepseekV3Config().to_dict(), "dtype": "bfloat16"})
    out = tmp_path / "plan.json"
    assert plan(config, f"--machine {name} --context 4096 --json {out}") == 0
    assert re.search(rf"^numbers of the machine: {words}", capfd.readouterr().out, re.MULTILINE)
    content = json.loads(out.read_text())
    assert {setting["tp"] for setting in content["settings"]} == {num_gpus}
    assert re.match(words, content["machine"]["source"])


def test_notes_say_what_the_numbers_rest_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = write(
        tmp_path / "v3.json", {**transformers.DeepseekV3Config(quantization_config=FP8).to_dict(), "dtype": "bfloat16"}
    )
    assert plan(config, "-tp 8 -dcp 8 --context 4096") == 0
    assert "note:" not in capfd.readouterr().out
    measured = json.loads(LAYER.read_text())
    sampled = write(tmp_path / "layer.json", {**measured, "rows": measured["rows"][::20]})
    assert plan(config, f"--machine h200x8,{sampled} -tp 32 -dcp 8 --context 4096") == 0
    report = capfd.readouterr().out
    assert " on h200x8, calibrated, nodes of 8 GPUs" in report
    notes = [line for line in report.splitlines() if line.startswith("note:")]
    assert ["not measured" in notes[0], "tp 32 cuts through" in notes[1], len(notes)] == [True, True, 2]


def test_a_plot_without_matplotlib_names_the_extra(
    config_file: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plan(config_file, f"--plot {tmp_path / 'plan.png'}") == 2
    assert f"needs the extra plot: {install('plot')} (" in mistake(capfd)
