"""Lines written for `vllm serve`: what is taken, what has no effect, what is refused and with which words."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

from dcpmla.__main__ import build_parser, main
from dcpmla.cli.field_options import values_of
from dcpmla.cli.options import dcp_config
from dcpmla.cli.serve import _read_template
from dcpmla.cli.vllm_arguments import plain_arguments
from dcpmla.cli.vllm_options import VLLM_OPTIONS, VllmOption, check_quantization, check_vllm_options
from dcpmla.integrations.engine_options import EngineOptions
from dcpmla.job.hosts import Hosts
from tests.support.commands import mistake

pytest.importorskip("pydantic")  # serve needs it
pytestmark = pytest.mark.usefixtures("one_process_on_cpu")


def parse(*arguments: str) -> Any:
    return build_parser().parse_args(["serve", *arguments])


def notes_of(*arguments: str) -> list[str]:
    """Return the lines on options without effect."""
    args = parse("m", *arguments)
    return [*check_vllm_options(args.vllm_options, args.model)]


def serve_parser() -> Any:
    (commands,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    return commands.choices["serve"].filled()


# Options as published recipes of vLLM and InferenceX's scripts combine them, and those of them that have no effect.
LINES = {
    "deepseek-ai/DeepSeek-V3.2 -tp 8 --trust-remote-code --kernel-config.enable_flashinfer_autotune=False "
    "--tokenizer-mode deepseek_v32 --tool-call-parser deepseek_v32 --enable-auto-tool-choice "
    "--reasoning-parser deepseek_v3 --speculative-config.method mtp --speculative-config.num_speculative_tokens 2": (
        ["--trust-remote-code", "--tokenizer-mode", "--kernel-config"],
        {"speculative_method": "mtp", "num_speculative_tokens": 2, "reasoning_parser": "deepseek_v3"},
    ),
    "moonshotai/Kimi-K2.5 --host 0.0.0.0 --port 8888 --gpu-memory-utilization 0.95 --tensor-parallel-size 8 "
    "--max-model-len 10240 --max-num-seqs 64 --reasoning-parser kimi_k2 --tool-call-parser kimi_k2 "
    "--compilation_config.pass_config.fuse_allreduce_rms true --trust-remote-code --no-enable-prefix-caching": (
        ["--trust-remote-code", "--compilation-config"],
        {"enable_prefix_caching": False, "max_num_seqs": 64, "max_model_len": 10240, "tool_call_parser": "kimi_k2"},
    ),
    "moonshotai/Kimi-K3 -tp 8 --decode-context-parallel-size 8 --dcp-comm-backend a2a --load-format fastsafetensors "
    "--kv-cache-dtype bfloat16 --language-model-only --pipeline-parallel-size 1 --async-scheduling "
    "--reasoning-parser kimi_k3 --no-enable-flashinfer-autotune --disable-custom-all-reduce": (
        ["--disable-custom-all-reduce"],
        {"decode_context_parallel_size": 8, "load_format": "auto", "kv_cache_dtype": "bfloat16"},
    ),
    "--model zai-org/GLM-5.2-FP8 -ep -dp 1 --kv-cache-dtype fp8_e4m3 --tool-call-parser glm47 --reasoning-parser glm45 "
    "--enable-chunked-prefill --disable-log-requests --swap-space 16 --cpu-offload-gb 0 --seed 0 --dtype half "
    "--tokenizer zai-org/GLM-5.2-FP8 --device-memory-utilization 0.8 --moe-backend auto --served-model-name glm": (
        ["--swap-space", "--seed"],
        {"enable_expert_parallel": True, "dtype": "float16", "gpu_memory_utilization": 0.8},
    ),
    "deepseek-ai/DeepSeek-R1 --reasoning-parser deepseek_r1 --spec-method ngram --spec-tokens 4 "
    "--cudagraph-capture-sizes 1 2 --default-chat-template-kwargs.thinking true --dcp-kv-cache-interleave-size 4": (
        ["--cudagraph-capture-sizes"],
        {
            "reasoning_parser": "deepseek_v3",
            "speculative_method": "ngram",
            "num_speculative_tokens": 4,
            "default_chat_template_kwargs": {"thinking": True},
            "cp_kv_cache_interleave_size": 4,
        },
    ),
}


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split("/")[1].split()[0])
def test_published_lines_are_taken(line: str) -> None:
    without_effect, values = LINES[line]
    args = parse(*line.split())
    assert args.model == re.search(r"[\w-]+/[\w.-]+", line)[0]  # type: ignore[index]
    notes = [*check_vllm_options(args.vllm_options, args.model)]
    assert [note.split()[0] for note in notes] == without_effect
    assert all(" has no effect: " in note for note in notes)
    assert {name: getattr(args, name) for name in values} == values
    EngineOptions.of(vars(args))
    args.tensor_parallel_size = 8
    assert dcp_config(args, args.decode_context_parallel_size).kv_cache_dtype in ("auto", "bf16", "fp8")


REFUSED = {
    "--pipeline-parallel-size 2": "--pipeline-parallel-size is '2'; it must be 1: give all ranks to -tp",
    "-dp 8": "-dp is '8'; it must be 1: a server is one group of ranks",
    "--tokenizer other/model": "--tokenizer is 'other/model'; it must be m: put the tokenizer's files into",
    "--no-enable-chunked-prefill": "--no-enable-chunked-prefill is not supported: prompts are always computed",
    "--cpu-offload-gb 10": "--cpu-offload-gb is '10'; it must be 0: weights stay on GPUs",
    "--kv-transfer-config {}": "--kv-transfer-config is '{}', which is not supported: use --role and",
    "--enable-lora": "--enable-lora is not supported: adapters are not served",
    "--enable_log_requests": "--enable-log-requests is not supported: prompts and answers are never logged",
    '--speculative-config {"method":"medusa"}': "method of --speculative-config is 'medusa'; it must be ngram or mtp",
    '--speculative-config {"method":"eagle3"}': "model of --speculative-config is None with method 'eagle3'; eagle3",
    '--speculative-config {"method":"mtp","model":"x"}': "model of --speculative-config is 'x' with method 'mtp'",
    '--speculative-config {"method":"mtp","rejection_sample_method":"block"}': "must be standard, or synthetic with",
    '--speculative-config {"method":"mtp","draft_sample_method":"greedy"}': "has draft_sample_method; give method,",
    "--speculative-config mtp": "--speculative-config is 'mtp'; give an object such as",
    "--default-chat-template-kwargs []": "argument --default-chat-template-kwargs: '[]' is no JSON object",
    "--load-format gguf": "argument --load-format: invalid choice: 'gguf' (choose from",
    "--kv-cache-dtype nvfp4": "argument --kv-cache-dtype: invalid choice: 'nvfp4' (choose from",
}


@pytest.mark.parametrize("options", REFUSED)
def test_what_is_refused_is_named(options: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "m", "--device", "cpu", *options.split()]) == 2
    assert REFUSED[options] in mistake(capfd)


def value_of(option: VllmOption) -> list[str]:
    return [] if option.is_flag else ["of-no-option"]


@pytest.mark.parametrize("option", VLLM_OPTIONS, ids=lambda option: option.names[0])
def test_every_option_does_what_its_row_says(option: VllmOption) -> None:
    for name in option.names:
        for same in option.same:
            value = "m" if same == "MODEL" else same
            given = [f"--no-{name[2:]}" if same == "off" else name] if option.is_flag else [name, value]
            assert notes_of(*given) == []
        other = [f"--no-{name[2:]}"] if option.same == ("on",) else [name, *value_of(option)]
        if option.is_ignored:
            assert notes_of(*other) == [f"{other[0]} has no effect: {option.words}"]
        else:
            with pytest.raises(ValueError, match=f"^{re.escape(other[0])} is .*: {re.escape(option.words)}$"):
                notes_of(*other)


def test_words_name_options_that_exist() -> None:
    known = {*serve_parser()._option_string_actions} - {name for option in VLLM_OPTIONS for name in option.names}
    named = {name for option in VLLM_OPTIONS for name in re.findall(r"(?<!\w)--?[a-z][a-z-]+", option.words)}
    assert len(named) > 15
    assert not named - known


def test_the_log_and_several_hosts_have_vllms_options() -> None:
    """They have vLLM's meaning here, so they are no part of the table."""
    hosts = "--nnodes 2 --node-rank 1 --master-addr host0 --master-port 5000"
    args = parse("m", "--disable-uvicorn-access-log", *hosts.split())
    assert args.disable_access_log
    assert Hosts(**values_of(Hosts, args)) == Hosts(nnodes=2, node_rank=1, master_addr="host0", master_port=5000)
    assert [*check_vllm_options(args.vllm_options, args.model)] == []
    assert notes_of("--headless") == ["--headless has no effect: the first rank alone answers HTTP"]


def test_help_shows_no_option_of_the_table() -> None:
    text = serve_parser().format_help()
    assert "--speculative-config" in text
    assert not [name for option in VLLM_OPTIONS for name in option.names if re.search(rf"^  {name}\b", text, re.M)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "m", "--max-model-lenn", "5"], "arguments: --max-model-lenn 5; did you mean --max-model-len?"),
        (["serve", "--model", "m", "--pipeline-paralel-size=2"], "=2; did you mean --pipeline-parallel-size?"),
        (["serve", "--max-num-seq", "2", "--model", "m"], "arguments: --max-num-seq 2; did you mean --max-num-seqs?"),
        (["serve", "m", "x"], "unrecognized arguments: x"),
        (["generate", "m", "--promt", "a"], "unrecognized arguments: --promt a; did you mean --prompt?"),
        (["generate", "m", "--trust-remote-code"], "unrecognized arguments: --trust-remote-code"),
        (["plan", "--model", "m", "--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["serve"], "the following arguments are required: MODEL"),
        (["serve", "m", "--model", "n"], "unrecognized arguments: m"),
    ],
)  # fmt: skip
def test_unknown_options_get_the_nearest_name(
    arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    line = mistake(capfd)
    assert message in line
    assert ("did you mean" in line) == ("did you mean" in message)


def test_plain_arguments() -> None:
    given = ["m_a", "--a_b", "c_d", "--e_f=g_h", "--x.y_z", "1", "--x.b.c=2", "--x.b.d", "t_t", "-O3", "--", "--no-a_b"]
    *plain, name, value = plain_arguments(given)
    assert plain == ["m_a", "--a-b", "c_d", "--e-f=g_h", "-O3", "--", "--no-a-b"]
    assert name == "--x"
    assert json.loads(value) == {"y_z": 1, "b": {"c": 2, "d": "t_t"}}
    assert plain_arguments([]) == []
    assert plain_arguments(["--x.y"]) == ["--x", '{"y": ""}']


def test_chat_templates_are_files_or_texts(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages }}")
    assert _read_template(str(file)) == _read_template("{{ messages }}") == "{{ messages }}"
    with pytest.raises(ValueError, match=r"^chat_template \(--chat-template\) is 'messages', which cannot be read"):
        _read_template("messages")


def test_methods_of_drafts_have_vllms_names() -> None:
    for method, served in (("mtp", "mtp"), ("deepseek_mtp", "mtp"), ("ngram", "ngram"), ("dspark", "dspark")):
        config = {"method": method, "num_speculative_tokens": 5, "prompt_lookup_max": 4, "model": None}
        args = parse("m", "--speculative-config", json.dumps(config))
        assert (args.speculative_method, args.num_speculative_tokens) == (served, 5)
    args = parse("m", "--speculative-config", '{"method": "mtp"}')
    assert (args.speculative_method, args.num_speculative_tokens) == ("mtp", EngineOptions().num_speculative_tokens)
    config = {"method": "eagle3", "model": "head", "num_speculative_tokens": 2, "synthetic_acceptance_length": 2.5}
    for added in ({}, {"rejection_sample_method": "synthetic"}):
        args = parse("m", "--speculative-config", json.dumps(config | added))
        assert EngineOptions.of(vars(args)).synthetic_acceptance_length == 2.5
        assert (args.speculative_method, args.speculative_model, args.num_speculative_tokens) == ("eagle3", "head", 2)


def test_quantization_is_the_checkpoints() -> None:
    def config(**values: Any) -> Any:
        return argparse.Namespace(**values)

    fp8 = config(quantization_config={"quant_method": "fp8"})
    check_quantization(None, fp8)
    check_quantization("fp8", fp8)
    check_quantization(None, config())
    for model in (config(), config(quantization_config=None), fp8):
        with pytest.raises(ValueError, match=r"^quantization \(--quantization\) is 'awq', but the checkpoint's"):
            check_quantization("awq", model)
