"""`LLM`, the front door: its results, its errors, and that every rank and every caller gets out of it again."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

from dcpmla import LLM, SamplingParams
from dcpmla.__main__ import main
from dcpmla.integrations.arguments import DCP_OPTIONS
from dcpmla.integrations.engine_options import ENGINE_OPTIONS
from tests.support.launchers import run_forked, srun, unattended
from tests.support.models import VOCAB_SIZE

ROOT = Path(__file__).parents[1]
NEEDLE = ROOT / "examples" / "needle" / "model"
QUESTIONS = ["amber-ant 123; amber-apple 456; amber-ant?", "amber-ant 123; amber-apple 456; amber-apple?"]
ANSWERS = ["123", "456"]
SMALL = {"device": "cpu", "kv_cache_memory_bytes": 1 << 26}

pytestmark = pytest.mark.usefixtures("one_process_on_cpu")


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(NEEDLE, **SMALL) as llm:
        yield llm


def test_results_are_in_the_order_of_the_prompts(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    prompts = [QUESTIONS[1], [1, 9], QUESTIONS[0]]
    params = [SamplingParams(max_new_tokens=count) for count in (1, 5, 1)]
    results = llm.generate(prompts, params)
    assert [result.text for result in results][::2] == ANSWERS[::-1]
    assert results[1].prompt_token_ids == [1, 9]
    assert [len(result.token_ids) for result in results] == [1, 5, 1]
    assert {result.finish_reason for result in results} == {"length"}
    assert set(results[0].metrics()) == {"queue_seconds", "time_to_first_token", "time_per_token"}
    assert "3/3" in capfd.readouterr().err  # the bar
    assert llm.generate(QUESTIONS[0], SamplingParams(stop="3"), use_tqdm=False)[0].finish_reason == "stop"
    assert [len(result.token_ids) for result in llm.generate([[1, 9]], use_tqdm=False)] == [16]
    assert llm.generate([], use_tqdm=False) == []
    assert capfd.readouterr().err == ""


def test_a_stream_gives_each_token_as_it_comes(llm: LLM) -> None:
    params = SamplingParams(max_new_tokens=4)
    whole = [request.text for request in llm.generate(QUESTIONS, params, use_tqdm=False)]
    texts, ends = ["", ""], []
    for request, text in llm.stream(QUESTIONS, params):
        texts[int(request.request_id)] += text
        ends.append(request.finish_reason)
    assert texts == whole
    assert len(ends) == 8
    assert ends[:2] == [None, None]
    assert ends[-2:] == ["length", "length"]


def test_salts_part_prompts(llm: LLM) -> None:
    prompt, params = [1, *range(9, 79)], SamplingParams(max_new_tokens=1)
    num_cached = [
        llm.generate([prompt], params, use_tqdm=False, cache_salt=salt)[0].num_cached_tokens > 0
        for salt in ("a", "b", "", "a")
    ]
    ((request, _),) = llm.stream([prompt], params, cache_salt="b")
    assert [*num_cached, request.num_cached_tokens > 0] == [False, False, False, True, True]
    with pytest.raises(ValueError, match="cache_salt is 5; it must be text"):
        llm.generate([prompt], params, cache_salt=5)  # type: ignore[arg-type]


def test_a_stream_that_is_left_leaves_nothing_behind(llm: LLM) -> None:
    for _ in llm.stream(QUESTIONS, SamplingParams(max_new_tokens=100)):
        break
    assert not llm.engine.has_requests
    assert llm.engine.allocator.num_free == llm.engine.allocator.num_blocks
    assert llm.generate(QUESTIONS[0], SamplingParams(max_new_tokens=1), use_tqdm=False)[0].text == ANSWERS[0]


def test_draws_are_those_of_the_command(llm: LLM, tmp_path: Path) -> None:
    """With one params for several prompts: equal prompts draw from different streams."""
    params = SamplingParams(max_new_tokens=6, temperature=1.5, seed=3)
    drawn = [request.token_ids for request in llm.generate([[1, 9]] * 3, params, use_tqdm=False)]
    assert drawn[0] != drawn[1] != drawn[2]
    assert (
        llm.generate([[1, 9]] * 2, [params] * 2, use_tqdm=False)[1].token_ids not in drawn
    )  # a list is taken as it is
    llm.close()
    out = tmp_path / "out.json"
    options = ["--temperature", 1.5, "--seed", 3, "--max-new-tokens", 6, "--device", "cpu", "--json", out]
    assert main(["generate", "--model", str(NEEDLE), *3 * ["--prompt-ids", "1,9"], *map(str, options)]) == 0
    assert [output["token_ids"] for output in json.loads(out.read_text())["outputs"]] == drawn


def test_options_reach_the_engine(model: Path) -> None:
    options = {"block_size": 8, "max_num_seqs": 3, "max_model_len": 50, "enable_prefix_caching": False}
    with LLM(str(model), dtype="bfloat16", kv_cache_dtype="fp8_e4m3", **options, **SMALL) as llm:
        engine = llm.engine
        assert (engine.dcp.block_size, engine.scheduler.max_num_seqs, engine.max_model_len) == (8, 3, 50)
        assert engine.model.dtype == torch.bfloat16
        assert engine.dcp.kv_cache_dtype == "fp8"
        assert engine.cache[0].latents.dtype == torch.float8_e4m3fn
        prompt = list(range(1, 30))
        for _ in range(2):
            llm.generate(prompt, SamplingParams(max_new_tokens=1), use_tqdm=False)
        assert engine.stats.num_cached_tokens == 0
    with LLM(str(model), dtype=torch.float32, block_size=8, **SMALL) as llm:
        for _ in range(2):
            llm.generate(prompt, SamplingParams(max_new_tokens=1), use_tqdm=False)
        assert llm.engine.stats.num_cached_tokens == 24


def test_a_cache_on_cpus_is_what_the_model_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """No share of a large memory, but of a small one; and what the user asks for."""
    limits: dict[str, int] = {"max_model_len": 200, "max_num_seqs": 3}
    with LLM(NEEDLE, device="cpu", **limits) as llm:
        sizes = llm.engine.cache.sizes
        assert (sizes.num_blocks, sizes.block_tokens) == (3 * 4, 64)
        block_bytes = sizes.bytes_per_block
    with LLM(NEEDLE, device="cpu", **limits, kv_cache_memory_bytes=100 * block_bytes) as llm:
        assert llm.engine.cache.sizes.num_blocks == 100
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10 * block_bytes))
    with LLM(NEEDLE, device="cpu", **limits, gpu_memory_utilization=0.5) as llm:
        assert llm.engine.cache.sizes.num_blocks == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtyp": "fp8"}, "kv_cache_dtyp is no option of LLM; did you mean kv_cache_dtype[?] allowed are"),
        ({"model": "/no/such"}, "model .* is '/no/such': no such directory"),
        ({"zzz": 1}, "zzz is no option of LLM; allowed are .*block_size.*max_num_seqs.*timeout"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size [(]-tp[)] is 2, but 1 ranks were started"),
        ({"dtype": "int8"}, "dtype [(]--dtype[)] is 'int8'; it must be one of auto, float32, bfloat16"),
        (
            {"attention_backend": "fa9"},
            "attention_backend [(]--attention-backend[)] is 'fa9'; expected 'auto' or one of hopper, triton",
        ),
        ({"prefill_backend": "fa9"}, "prefill_backend [(]--prefill-backend[)] is 'fa9'; expected 'auto' or one of "),
        (
            {"prefill_backend": "hopper"},
            "prefill_backend .* is 'hopper', which needs a GPU; on CPUs choose 'auto' or .*torch",
        ),
        ({"attention_backend": "triton"}, "attention_backend .* is 'triton', which needs a GPU"),
        ({"max_num_seqs": "8"}, "max_num_seqs [(]--max-num-seqs[)] is '8'; it must be a whole number of at least 1"),
        ({"max_model_len": 1}, "max_model_len [(]--max-model-len[)] is 1; it must be in "),
        ({"timeout": 0}, "timeout [(]--timeout[)] is 0; it must be a finite number above 0"),
        ({"device": "tpu"}, "device [(]--device[)] is 'tpu'"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes .* is 0; it must be a whole number of at least 1"),
        ({"gpu_memory_utilization": 2}, "[(]--gpu-memory-utilization[)] is 2; it must be a number in [(]0, 1[]]"),
        ({"kv_cache_dtype": "fp9"}, "kv_cache_dtype .* is 'fp9'"),
    ],
)
def test_mistakes(options: dict[str, object], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(**{"model": str(NEEDLE), **SMALL, **options})
    assert not dist.is_initialized()  # the next try may succeed
    assert capfd.readouterr().err == ""  # in one process exceptions are the caller's


def test_wrong_prompts_leave_the_engine_as_it_was(llm: LLM) -> None:
    wrong = [
        ([QUESTIONS[0], []], None, "prompt 1: prompt is empty"),
        ([[5], [10**6]], None, "prompt 1: prompt has token id 1000000"),
        (["a", "b"], [SamplingParams()], "sampling_params has 1 elements, prompts 2"),
    ]
    for prompts, params, message in wrong:
        with pytest.raises(ValueError, match=message):
            llm.generate(prompts, params)  # type: ignore[arg-type]
        assert not llm.engine.has_requests
    assert llm.generate(QUESTIONS[0], SamplingParams(max_new_tokens=1), use_tqdm=False)[0].text == ANSWERS[0]


def test_one_at_a_time(llm: LLM) -> None:
    with pytest.raises(ValueError, match="torch.distributed is initialized already"):
        LLM(str(NEEDLE), **SMALL)
    llm.close()
    llm.close()
    with pytest.raises(ValueError, match="this LLM is closed"):
        llm.generate("amber-ant")


def test_the_caller_s_exceptions_are_the_caller_s() -> None:
    for error in (KeyError("mine"), ValueError("mine"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, LLM(str(NEEDLE), **SMALL):
            raise error
        assert caught.value is error
    assert not dist.is_initialized()


def test_its_options_are_those_of_generate() -> None:
    from dcpmla.__main__ import build_parser

    args = vars(build_parser().parse_args(["generate", "--model", "m"]))
    of_requests = {"command", "run", "prompts", "prompt_file", "output_file", "json", "logits"}
    of_requests |= {"max_new_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids"}
    of_requests |= {"nnodes", "node_rank", "master_addr", "master_port", "launch"}  # of the ranks that it starts
    allowed = {"model", "max_model_len", "revision", "device", "timeout", *DCP_OPTIONS, *ENGINE_OPTIONS}
    assert allowed | of_requests == set(args)


SCRIPT = f"""
import json, os, sys, time
from dcpmla import LLM, SamplingParams

rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0)))
with LLM(sys.argv[1], decode_context_parallel_size=2, timeout=20, **{SMALL!r}) as llm:
    prompts = json.loads(sys.argv[2])
    params = SamplingParams(max_new_tokens=3, temperature=0.8)
    results = llm.generate(prompts, params)
    streamed = [[request.request_id, text] for request, text in llm.stream(prompts, params)]
    assert (llm.rank, llm.engine.mesh.dcp_size) == (rank, 2)
    print(json.dumps([[result.token_ids for result in results], streamed]))
    if rank == 1:
        exec(sys.argv[3])
    else:
        exec(sys.argv[4])
print("done")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


PROMPTS = [[1, 9], random.Random(0).choices(range(1, VOCAB_SIZE - 1), k=40)]


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_ranks_give_what_one_process_gives(launcher: str, model: Path, script: Path) -> None:
    program = [script, model, json.dumps(PROMPTS), "", ""]
    is_torchrun = launcher == "torchrun"
    ends = run_forked(unattended(program, 2) if is_torchrun else srun(program, [2], "localhost", MASTER_PORT="29713"))
    outputs = [json.loads(end.stdout.splitlines()[0]) for end in ends]
    assert outputs[0] == outputs[1]
    with LLM(str(model), **SMALL) as llm:
        params = SamplingParams(max_new_tokens=3, temperature=0.8)
        assert outputs[0][0] == [result.token_ids for result in llm.generate(PROMPTS, params, use_tqdm=False)]
    assert sorted(index for index, _ in outputs[0][1]) == [0, 0, 0, 1, 1, 1]
    assert [end.stdout.splitlines()[-1] for end in ends] == ["done", "done"]
    assert ["generate: 100%" in end.stderr for end in ends] == [True, False]


@pytest.mark.parametrize(
    ("calls", "line", "codes"),
    [
        (
            ("llm.generate([1])", "llm.generate([2])"),
            "prompts and sampling_params (a hash of them) differs between ranks: ",
            {1, 2},  # for who says it, it is a mistake
        ),
        (
            ("raise KeyError('mine')", "llm.generate([1])"),
            "rank 1 failed (KeyError: 'mine') in the program that calls LLM",
            {1},
        ),
    ],
    ids=["different prompts", "between two calls, in the caller's code"],
)
def test_a_rank_that_fails_ends_all(
    calls: tuple[str, str], line: str, codes: set[int], model: Path, script: Path
) -> None:
    """Rank 1 makes the first of the calls, while rank 0 makes the other."""
    ends = run_forked(unattended([script, model, json.dumps(PROMPTS), *calls], 2), check=False)
    said = "".join(end.stderr for end in ends)
    assert {end.returncode for end in ends} <= codes
    assert said.count("dcpmla: error: ") == 1
    assert f"dcpmla: error: {line}" in said


def test_a_slow_caller_is_waited_for(model: Path, script: Path) -> None:
    """A rank that computes something of its own is not lost, however long it takes: here longer than its timeout."""
    text = script.read_text().replace("timeout=20", "timeout=2")
    script.write_text(text)
    calls = "time.sleep(7); llm.generate([1])", "llm.generate([1])"
    ends = run_forked(unattended([script, model, json.dumps(PROMPTS), *calls], 2))
    assert [end.stdout.splitlines()[-1] for end in ends] == ["done", "done"]
