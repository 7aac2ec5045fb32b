"""`dcpmla generate` as its users call it: files it writes, mistakes it names."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcpmla.__main__ import build_parser
from dcpmla.cli.options import dcp_config
from dcpmla.config import DCPConfig
from tests.support.commands import generate, mistake
from tests.support.launchers import GENERATE, ROOT, Ended, run_forked, unattended
from tests.support.models import VOCAB_SIZE, random_model, tiny_config

pytestmark = pytest.mark.usefixtures("one_process_on_cpu")


def generate_on(num_ranks: int, model: Path, command: str, *more: object, check: bool = True) -> list[Ended]:
    options = ["--model", model, "--device", "cpu", "-tp", num_ranks, *command.split(), *more]
    return run_forked(unattended([*GENERATE, *options], num_ranks), check=check)


def read(directory: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    return json.loads((directory / "out.json").read_text()), dict(np.load(directory / "out.npz"))


def test_ranks_give_what_one_process_gives(model: Path, tmp_path: Path) -> None:
    command = f"--prompt-ids 5,6,7 --prompt-ids 9 --prompt-ids {','.join(map(str, range(1, 60)))} --max-new-tokens 6"
    files: dict[str, list[object]] = {}
    for name in ("one", "four"):
        (tmp_path / name).mkdir()
        files[name] = ["--json", tmp_path / name / "out.json", "--logits", tmp_path / name / "out.npz"]
    assert generate(model, command, *files["one"]) == 0
    sharded = " -dcp 4 --cp-kv-cache-interleave-size 2 --block-size 8 --max-num-batched-tokens 13"
    run, *_ = generate_on(4, model, command + sharded, *files["four"])
    (one, one_logits), (four, four_logits) = read(tmp_path / "one"), read(tmp_path / "four")
    assert one["outputs"] == four["outputs"]
    assert [len(output["prompt_token_ids"]) for output in one["outputs"]] == [3, 1, 59]
    for index, output in enumerate(one["outputs"]):
        logits = one_logits[f"logits_{index}"]
        assert (logits.dtype, logits.shape) == (np.float32, (len(output["token_ids"]), VOCAB_SIZE))
        assert logits.argmax(-1).tolist() == output["token_ids"]
        np.testing.assert_allclose(four_logits[f"logits_{index}"], logits, atol=1e-4)
    num_cached = sum(len(output["prompt_token_ids"]) + len(output["token_ids"]) - 1 for output in one["outputs"])
    assert one["kv_tokens_per_rank"] == [num_cached]
    assert sum(four["kv_tokens_per_rank"]) == num_cached
    assert max(four["kv_tokens_per_rank"]) < num_cached / 3
    assert (one["dcp_comm_backend"], four["dcp_comm_backend"]) == ("none", "a2a")
    assert "generate: 100%" in run.stderr  # the live line
    assert "waiting, cache " in run.stderr
    assert "ranks: 4 ranks, 4 of them on this host, started by torchrun" in run.stdout
    assert "exchange: a2a (auto: " in run.stdout


LAYOUT = {  # options -> field and value
    "--cp-kv-cache-interleave-size 2": ("cp_kv_cache_interleave_size", 2),
    "--block-size 8": ("block_size", 8),
    "--dcp-comm-backend a2a": ("dcp_comm_backend", "a2a"),
    "--dcp-exchange-timeout 9": ("exchange_timeout", 9),
    "--dcp-check-exchange": ("check_exchange", True),
    "--dcp-q-replicate": ("dcp_q_replicate", True),
    "--dcp-project-before-merge": ("dcp_project_before_merge", True),
    "--index-hadamard": ("index_hadamard", True),
    "--index-cache-dtype fp8": ("index_cache_dtype", "fp8"),
    "--kv-cache-dtype fp8_e4m3": ("kv_cache_dtype", "fp8"),
    "--attention-backend torch": ("attention_backend", "torch"),
    "--prefill-backend triton": ("prefill_backend", "triton"),
}


def test_options_reach_the_layout() -> None:
    sizes = {"tensor_parallel_size": 4, "decode_context_parallel_size": 2}
    for option, (name, value) in LAYOUT.items():
        args = build_parser().parse_args(["generate", "--model", "m", "-tp", "4", *option.split()])
        assert dcp_config(args, 2) == DCPConfig(**sizes, **{name: value})


def test_stops_and_sampling_options(model: Path, tmp_path: Path) -> None:
    """An end-of-sequence token ends a request and is its last token; --max-model-len ends it too, and so does a token
    that an option names. So hot that only what keeps the best token alone gives the greedy answer.
    """

    def output(model: Path, command: str) -> tuple[list[int], str]:
        assert generate(model, f"--prompt-ids 5,6,7 {command} --json", tmp_path / "out.json") == 0
        (found,) = json.loads((tmp_path / "out.json").read_text())["outputs"]
        return found["token_ids"], found["finish_reason"]

    tokens, _ = output(model, "--max-new-tokens 5")
    stopping = shutil.copytree(model, tmp_path / "model")
    (stopping / "generation_config.json").write_text(json.dumps({"eos_token_id": [VOCAB_SIZE - 1, tokens[2]]}))
    assert output(stopping, "--max-new-tokens 5") == (tokens[: tokens.index(tokens[2]) + 1], "stop")
    assert output(model, "--max-model-len 5") == (tokens[:2], "length")
    named = f"--max-new-tokens 5 --stop-token-ids {VOCAB_SIZE - 2},{tokens[3]}"
    assert output(model, named) == (tokens[: tokens.index(tokens[3]) + 1], "stop")
    for options, is_greedy in (("", False), ("--top-k 1", True), ("--top-p 1e-6", True)):
        assert (output(model, f"--max-new-tokens 5 --temperature 50 {options}")[0] == tokens) is is_greedy


MISTAKES = {  # options -> words of the line
    "-dcp 2": "decode_context_parallel_size (-dcp) is 2; it must divide tensor_parallel_size (-tp) 1: choose 1",
    "-tp 4": "tensor_parallel_size (-tp) is 4, but 1 ranks were started; start torchrun with --nproc-per-node 4",
    "--dcp-comm-backend pigeon": "argument --dcp-comm-backend: invalid choice: 'pigeon'",
    "--index-hadamard": "index_hadamard (--index-hadamard) goes with sparse MLA, whose layers have indexers",
    "--frobnicate": "unrecognized arguments: --frobnicate",
    "--max-model-len 3": "prompt 0 has 3 tokens; with --max-model-len 3 at most 2 leave room for a new one",
    f"--prompt-ids {','.join(300 * '1')}": "prompt 1 has 300 tokens; with --max-model-len 256",
    "--max-model-len 257": (
        "max_model_len (--max-model-len) is 257; it must be in [2, 256], where the model's positions end"
    ),
    f"--prompt-ids 1,{VOCAB_SIZE}": f"prompt 1 has token id {VOCAB_SIZE}; the model's vocabulary is [0, {VOCAB_SIZE})",
    "--prompt-ids=-1": "prompt 1 has token id -1",
    "--prompt-ids 5,x": "argument --prompt-ids: 'x' is not a token id; give whole numbers separated by commas",
    "--prompt hello": "--prompt needs a tokenizer",
    "--max-new-tokens 0": "argument --max-new-tokens: '0' is not a whole number of at least 1",
    "--temperature=-1": "temperature (--temperature) is -1.0; it must be a finite number of at least 0",
    "--json /no/such/dir/out.json": (
        "--json is /no/such/dir/out.json, where no file can be written (No such file or directory)"
    ),
    "--logits /": "--logits is /, which exists and is not a file; give the name of a file",
    "--top-p 0": "top_p (--top-p) is 0.0; it must be a number in (0, 1]",
    "--top-k=-1": "top_k (--top-k) is -1; it must be a whole number of at least 0",
    "--stop x": "stop (--stop) needs a tokenizer, and the model's does not load: ",
    "--stop-token-ids 5,x": "argument --stop-token-ids: 'x' is not a token id",
    "--kv-cache-memory-bytes 100": (
        "cache: the longest sequence, 18 tokens, needs 12,288 bytes a rank, but there is room for 0"
    ),
    "--prompt-file in.jsonl": "--prompt-file and --output-file belong together; give both or neither",
    "--prompt-file in.jsonl --output-file out.jsonl": (
        "--prompt-file does not go with --prompt, --prompt-ids, --json or --logits"
    ),
    "--timeout 0": "argument --timeout: '0' is not a whole number in [1, 604800]",
    "--seed=-1": "argument --seed: '-1' is not a whole number in [0, 2^32)",
    "--logits /dev/null": "--logits is /dev/null, which exists and is not a file",
    f"--json /tmp/{250 * 'x'}": "where no file can be written (File name too long)",
    "--max-new 3": "unrecognized arguments: --max-new 3",
    "--model " + 300 * "x": "no such directory, and no such model could be downloaded",
    "--device cuda": "device (--device) is 'cuda', but a rank sees 0 GPUs for 1 ranks of its host",
}


@pytest.mark.parametrize("command", MISTAKES, ids=lambda command: command[:60])
def test_mistakes_are_one_line(command: str, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert generate(model, "--prompt-ids 5,6,7 --json", tmp_path / "out.json", *command.split()) == 2
    assert MISTAKES[command] in mistake(capfd)
    assert list(tmp_path.iterdir()) == []  # nothing half-written


def test_no_prompt(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert generate(model, "") == 2
    assert "no prompt; give at least one --prompt, --prompt-ids or a --prompt-file" in mistake(capfd)


def test_one_rank_reports(model: Path, tmp_path: Path) -> None:
    """Every rank ends with exit code 2, one says why; also for a mistake that only rank 0 can see."""
    for wrong, message in (
        ("-dcp 3", "must divide"),
        (f"--json {tmp_path}/no/out.json", "where no file can be written"),
    ):
        ends = generate_on(2, model, f"--prompt-ids 5 {wrong}", check=False)
        said = "".join(end.stderr for end in ends)
        assert [end.returncode for end in ends] == [2, 2]
        assert said.count("dcpmla: error: ") == 1
        assert message in said
        assert "Traceback" not in said


def test_experts_that_do_not_divide(tmp_path: Path) -> None:
    config = tiny_config("deepseek_v3")
    config.moe_intermediate_size = 51
    random_model(config).save_pretrained(tmp_path)
    ends = generate_on(2, tmp_path, "--prompt-ids 5", check=False)
    message = "dcpmla: error: tensor_parallel_size (-tp) is 2; it must divide the experts' intermediate size 51"
    assert "".join(end.stderr for end in ends).count(message) == 1


def test_texts_and_ids_keep_the_order_given(tmp_path: Path) -> None:
    needle, out = ROOT / "examples" / "needle" / "model", tmp_path / "out.json"
    command = "--max-new-tokens 1 --prompt-ids 1,7,2000,4,7,5 --prompt"
    assert (
        generate(needle, command, "amber-ant 123; amber-apple 456; amber-ant?", "--prompt-ids", "1,9", "--json", out)
        == 0
    )
    outputs = json.loads(out.read_text())["outputs"]
    assert [len(output["prompt_token_ids"]) for output in outputs] == [6, 9, 2]
    assert outputs[1]["text"] == "123"
