"""`dcpmla generate` as its users call it: files it writes, mistakes it names."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcpmla.__main__ import build_parser, main
from dcpmla.cli.options import dcp_config
from dcpmla.config import DCPConfig
from tests.support.launchers import GENERATE, Ended, run_forked, unattended
from tests.support.models import VOCAB_SIZE, random_model, tiny_config

pytestmark = pytest.mark.usefixtures("one_process_on_cpu")


def generate_on(num_ranks: int, *options: object, check: bool = True) -> list[Ended]:
    return run_forked(unattended([*GENERATE, *options], num_ranks), check=check)


def generate(*options: object) -> int:
    return main(["generate", *map(str, options)])


def read(directory: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    return json.loads((directory / "out.json").read_text()), dict(np.load(directory / "out.npz"))


def test_ranks_give_what_one_process_gives(model: Path, tmp_path: Path) -> None:
    def options(directory: Path) -> list[object]:
        directory.mkdir()
        prompts = ["--prompt-ids", "5,6,7", "--prompt-ids", "9", "--prompt-ids", ",".join(map(str, range(1, 60)))]
        files = ["--json", directory / "out.json", "--logits", directory / "out.npz"]
        return ["--model", model, *prompts, "--max-new-tokens", "6", "--device", "cpu", *files]

    assert generate(*options(tmp_path / "one")) == 0
    sharded = [
        "-tp",
        4,
        "-dcp",
        4,
        "--cp-kv-cache-interleave-size",
        2,
        "--block-size",
        8,
        "--max-num-batched-tokens",
        13,
    ]
    run, *_ = generate_on(4, *options(tmp_path / "four"), *sharded)
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


def test_options_reach_the_layout() -> None:
    options = ["generate", "--model", "m", "-tp", "4", "--block-size", "8"]
    options += ["--cp-kv-cache-interleave-size", "2", "--dcp-comm-backend", "a2a", "--dcp-exchange-timeout", "9"]
    plain = DCPConfig(
        tensor_parallel_size=4,
        decode_context_parallel_size=2,
        cp_kv_cache_interleave_size=2,
        dcp_comm_backend="a2a",
        exchange_timeout=9,
        block_size=8,
    )
    assert dcp_config(build_parser().parse_args(options), 2) == plain
    for name in ("dcp_q_replicate", "dcp_project_before_merge", "index_hadamard"):
        args = build_parser().parse_args([*options, f"--{name.replace('_', '-')}"])
        assert dcp_config(args, 2) == dataclasses.replace(plain, **{name: True})
    assert dcp_config(build_parser().parse_args([*options, "--dcp-check-exchange"]), 2).check_exchange
    assert dcp_config(build_parser().parse_args([*options, "--index-cache-dtype", "fp8"]), 2).index_cache_dtype == "fp8"
    assert dcp_config(build_parser().parse_args([*options, "--kv-cache-dtype", "fp8_e4m3"]), 2).kv_cache_dtype == "fp8"
    backends = ["--attention-backend", "torch", "--prefill-backend", "triton"]
    chosen = dcp_config(build_parser().parse_args([*options, *backends]), 2)
    assert (chosen.attention_backend, chosen.prefill_backend) == ("torch", "triton")


def test_temperature_is_the_same_on_every_cut(model: Path, tmp_path: Path) -> None:
    def sample(seed: int, tp: int, num_prompts: int = 2) -> list[list[int]]:
        file = tmp_path / f"{seed}_{tp}.json"
        options = ["--model", model, *num_prompts * ["--prompt-ids", "5,6,7"], "--max-new-tokens", 8, "--device", "cpu"]
        options += ["--temperature", 0.8, "--seed", seed, "--json", file]
        if tp == 1:
            assert generate(*options) == 0
        else:
            generate_on(tp, *options, "-tp", tp, "-dcp", tp)
        return [output["token_ids"] for output in json.loads(file.read_text())["outputs"]]

    assert sample(3, 1) == sample(3, 2)
    assert sample(3, 1) != sample(4, 1)
    assert sample(3, 1)[0] != sample(3, 1)[1]  # equal prompts draw from different streams
    assert sample(3, 1, num_prompts=1)[0] == sample(3, 1)[0]  # a prompt's stream is its own


def test_stops(model: Path, tmp_path: Path) -> None:
    """An end-of-sequence token ends a request and is its last token; --max-model-len ends it too."""
    free = tmp_path / "free.json"
    assert (
        generate("--model", model, "--prompt-ids", "5,6,7", "--max-new-tokens", 5, "--device", "cpu", "--json", free)
        == 0
    )
    tokens = json.loads(free.read_text())["outputs"][0]["token_ids"]
    stopping = tmp_path / "model"
    stopping.mkdir()
    for file in model.iterdir():
        (stopping / file.name).write_bytes(file.read_bytes())
    (stopping / "generation_config.json").write_text(json.dumps({"eos_token_id": [VOCAB_SIZE - 1, tokens[2]]}))
    out = tmp_path / "stop.json"
    assert (
        generate("--model", stopping, "--prompt-ids", "5,6,7", "--max-new-tokens", 5, "--device", "cpu", "--json", out)
        == 0
    )
    output = json.loads(out.read_text())["outputs"][0]
    assert output["token_ids"] == tokens[: tokens.index(tokens[2]) + 1]
    assert output["finish_reason"] == "stop"
    assert (
        generate("--model", model, "--prompt-ids", "5,6,7", "--max-model-len", 5, "--device", "cpu", "--json", out) == 0
    )
    output = json.loads(out.read_text())["outputs"][0]
    assert (output["token_ids"], output["finish_reason"]) == (tokens[:2], "length")


MISTAKES = {
    "dcp does not divide tp": (
        ["-dcp", 2],
        "decode_context_parallel_size (-dcp) is 2; it must divide tensor_parallel_size (-tp) 1: choose 1",
    ),
    "too few ranks": (
        ["-tp", 4],
        "tensor_parallel_size (-tp) is 4, but 1 ranks were started; start torchrun with --nproc-per-node 4",
    ),
    "interleave": (
        ["--cp-kv-cache-interleave-size", 3],
        "(--cp-kv-cache-interleave-size) is 3; it must divide block_size (--block-size) 64",
    ),
    "block size": (["--block-size", 0], "block_size (--block-size) is 0; it must be a whole number"),
    "backend": (["--dcp-comm-backend", "pigeon"], "argument --dcp-comm-backend: invalid choice: 'pigeon'"),
    "dense model": (
        ["--index-hadamard"],
        "index_hadamard (--index-hadamard) goes with sparse MLA, whose layers have indexers",
    ),
    "unknown option": (["--frobnicate"], "unrecognized arguments: --frobnicate"),
    "model": (["--model", "/no/such/dir"], "model (--model) is '/no/such/dir': no such directory"),
    "long prompt": (
        ["--max-model-len", 3],
        "prompt 0 has 3 tokens; with --max-model-len 3 at most 2 leave room for a new one",
    ),
    "long prompt for the model": (
        ["--prompt-ids", ",".join("1" * 300)],
        "prompt 1 has 300 tokens; with --max-model-len 256",
    ),
    "model length": (
        ["--max-model-len", 257],
        "max_model_len (--max-model-len) is 257; it must be in [2, 256], where the model's positions end",
    ),
    "ids": (
        ["--prompt-ids", f"1,{VOCAB_SIZE}"],
        f"prompt 1 has token id {VOCAB_SIZE}; the model's vocabulary is [0, {VOCAB_SIZE})",
    ),
    "negative id": (["--prompt-ids=-1"], "prompt 1 has token id -1"),
    "no ids": (
        ["--prompt-ids", "5,x"],
        "argument --prompt-ids: 'x' is not a token id; give whole numbers separated by commas",
    ),
    "no tokenizer": (["--prompt", "hello"], "--prompt needs a tokenizer"),
    "new tokens": (["--max-new-tokens", 0], "argument --max-new-tokens: '0' is not a whole number of at least 1"),
    "temperature": (
        ["--temperature=-1"],
        "temperature (--temperature) is -1.0; it must be a finite number of at least 0",
    ),
    "batched tokens": (
        ["--max-num-batched-tokens=-8"],
        "argument --max-num-batched-tokens: '-8' is not a whole number of at least 1",
    ),
    "json": (
        ["--json", "/no/such/dir/out.json"],
        "--json is /no/such/dir/out.json, where no file can be written (No such file or directory)",
    ),
    "logits": (["--logits", "/"], "--logits is /, which exists and is not a file; give the name of a file"),
    "no temperature": (
        ["--temperature", "nan"],
        "temperature (--temperature) is nan; it must be a finite number of at least 0",
    ),
    "top-p": (["--top-p", 0], "top_p (--top-p) is 0.0; it must be a number in (0, 1]"),
    "top-k": (["--top-k=-1"], "top_k (--top-k) is -1; it must be a whole number of at least 0"),
    "stop": (["--stop", "x"], "stop (--stop) needs a tokenizer, and the model's does not load: "),
    "stop ids": (["--stop-token-ids", "5,x"], "argument --stop-token-ids: 'x' is not a token id"),
    "seqs": (["--max-num-seqs", 0], "argument --max-num-seqs: '0' is not a whole number of at least 1"),
    "small cache": (
        ["--kv-cache-memory-bytes", 100],
        "cache: the longest sequence, 18 tokens, needs 12,288 bytes a rank, but there is room for 0",
    ),
    "memory": (
        ["--gpu-memory-utilization", 1.5],
        "gpu_memory_utilization (--gpu-memory-utilization) is 1.5; it must be a number in (0, 1]",
    ),
    "half a job": (
        ["--prompt-file", "in.jsonl"],
        "--prompt-file and --output-file belong together; give both or neither",
    ),
    "job and json": (
        ["--prompt-file", "in.jsonl", "--output-file", "out.jsonl"],
        "--prompt-file does not go with --prompt, --prompt-ids, --json or --logits",
    ),
    "timeout": (["--timeout", 0], "argument --timeout: '0' is not a whole number in [1, 604800]"),
    "attention backend": (
        ["--attention-backend", "fa9"],
        "attention_backend (--attention-backend) is 'fa9'; expected 'auto' or one of hopper, triton",
    ),
    "seed": (["--seed=-1"], "argument --seed: '-1' is not a whole number in [0, 2^32)"),
    "device file": (["--logits", "/dev/null"], "--logits is /dev/null, which exists and is not a file"),
    "long name": (["--json", "/tmp/" + 250 * "x"], "where no file can be written (File name too long)"),
    "abbreviation": (["--max-new", 3], "unrecognized arguments: --max-new 3"),
    "long model name": (["--model", 300 * "x"], "no such directory, and no such model could be downloaded"),
    "device": (["--device", "cuda"], "device (--device) is 'cuda', but a rank sees 0 GPUs for 1 ranks of its host"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line(name: str, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options, message = MISTAKES[name]
    out = tmp_path / "out.json"
    assert generate("--model", model, "--prompt-ids", "5,6,7", "--device", "cpu", "--json", out, *options) == 2
    errors = capfd.readouterr().err.strip().splitlines()
    assert len(errors) == 1, errors
    assert errors[0].startswith("dcpmla: error: ")
    assert message in errors[0]
    assert list(tmp_path.iterdir()) == []  # nothing half-written


def test_no_prompt(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert generate("--model", model, "--device", "cpu") == 2
    assert "no prompt; give at least one --prompt, --prompt-ids or a --prompt-file" in capfd.readouterr().err


def test_one_rank_reports(model: Path, tmp_path: Path) -> None:
    """Every rank ends with exit code 2, one says why; also for a mistake that only rank 0 can see."""
    options = ["--model", model, "--prompt-ids", "5", "--device", "cpu", "-tp", 2]
    for wrong, message in (
        [["-dcp", 3], "must divide"],
        [["--json", tmp_path / "no" / "out.json"], "where no file can be written"],
    ):
        ends = generate_on(2, *options, *wrong, check=False)
        said = "".join(end.stderr for end in ends)
        assert [end.returncode for end in ends] == [2, 2]
        assert said.count("dcpmla: error: ") == 1
        assert message in said
        assert "Traceback" not in said


def test_experts_that_do_not_divide(tmp_path: Path) -> None:
    config = tiny_config("deepseek_v3")
    config.moe_intermediate_size = 51
    random_model(config).save_pretrained(tmp_path)
    ends = generate_on(2, "--model", tmp_path, "--prompt-ids", "5", "--device", "cpu", "-tp", 2, check=False)
    message = "dcpmla: error: tensor_parallel_size (-tp) is 2; it must divide the experts' intermediate size 51"
    assert "".join(end.stderr for end in ends).count(message) == 1


def test_texts_and_ids_keep_the_order_given(tmp_path: Path) -> None:
    needle, out = Path(__file__).parents[2] / "examples" / "needle" / "model", tmp_path / "out.json"
    prompts = [
        "--prompt-ids",
        "1,7,2000,4,7,5",
        "--prompt",
        "amber-ant 123; amber-apple 456; amber-ant?",
        "--prompt-ids",
        "1,9",
    ]
    assert generate("--model", needle, *prompts, "--max-new-tokens", 1, "--device", "cpu", "--json", out) == 0
    outputs = json.loads(out.read_text())["outputs"]
    assert [len(output["prompt_token_ids"]) for output in outputs] == [6, 9, 2]
    assert outputs[1]["text"] == "123"
