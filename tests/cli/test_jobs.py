"""Jobs of `dcpmla generate`: lines of prompts in, lines of outputs out, and a rerun that goes on where the last run
ended.
"""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dcpmla.cli.output import open_output_lines
from tests.support.commands import generate, mistake
from tests.support.launchers import ROOT
from tests.support.models import VOCAB_SIZE

pytestmark = pytest.mark.usefixtures("one_process_on_cpu")


def run_job(model: Path, directory: Path, *options: object) -> int:
    files = ["--prompt-file", directory / "in.jsonl", "--output-file", directory / "out.jsonl"]
    return generate(model, "--block-size 8", *files, *options)


def write_lines(path: Path, lines: list[Any]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


PROMPTS = [
    {"id": "a", "prompt_token_ids": [5, 6, 7]},
    {"id": 7, "prompt_token_ids": [9], "max_new_tokens": 2},
    {"id": "7", "prompt_token_ids": list(range(1, 30)), "temperature": 2.0, "top_k": 50},
    {"id": "seeded", "prompt_token_ids": [5, 6, 7], "temperature": 2.0, "seed": 4, "logprobs": 1, "prompt_logprobs": 0},
]


def test_outputs_are_those_of_the_prompts_alone(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A rerun adds what is missing of them."""
    out = tmp_path / "out.jsonl"
    write_lines(tmp_path / "in.jsonl", PROMPTS)
    options = "--max-new-tokens", 6, "--max-num-seqs", 2, "--max-num-batched-tokens", 10
    assert run_job(model, tmp_path, *options) == 0
    outputs = {output["id"]: output for output in read_lines(out)}
    assert set(outputs) == {"a", 7, "7", "seeded"}
    times = {"queue_seconds", "time_to_first_token", "time_per_token"}
    assert set(outputs["a"]) == {"id", "token_ids", "text", "finish_reason"} | times
    assert [len(outputs[name]["token_ids"]) for name in ("a", 7, "7", "seeded")] == [6, 2, 6, 6]
    assert [entry[0] for entry in outputs["seeded"]["logprobs"]] == outputs["seeded"]["token_ids"]
    assert [[token, len(top)] for token, _, top in outputs["seeded"]["prompt_logprobs"]] == [[5, 0], [6, 0], [7, 0]]
    for number, prompt in enumerate(PROMPTS):
        single = tmp_path / f"single {number}"
        single.mkdir()
        lines = [{"id": f"other {index}", "prompt_token_ids": [1]} for index in range(number)]
        write_lines(single / "in.jsonl", [*lines, prompt])  # in its own line: a prompt's stream comes from its line
        assert run_job(model, single, "--max-new-tokens", 6) == 0
        alone = {output["id"]: output["token_ids"] for output in read_lines(single / "out.jsonl")}
        assert alone[prompt["id"]] == outputs[prompt["id"]]["token_ids"]
    first, second, *_ = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(first + second[:-5])  # a crash leaves this
    capfd.readouterr()
    assert run_job(model, tmp_path, *options) == 0
    assert out.read_bytes().startswith(first)
    lines = read_lines(out)
    assert len(lines) == 4
    assert {line["id"]: line["token_ids"] for line in lines} == {
        name: output["token_ids"] for name, output in outputs.items()
    }
    assert f"{out} has 1 of 4 outputs already" in capfd.readouterr().out
    before = out.read_bytes()
    # Nothing is missing: the model is not even loaded.
    assert run_job(model, tmp_path, "--gpu-memory-utilization", 7) == 0
    assert out.read_bytes() == before


NEEDLE = ROOT / "examples" / "needle" / "model"
QUESTION = "amber-ant 123; amber-apple 456; amber-ant?"


def test_stops_come_from_the_options_and_from_the_lines(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The model answers 123 123 123 ..."""
    write_lines(
        tmp_path / "in.jsonl",
        [
            {"id": "option", "prompt": QUESTION},
            {"id": "line", "prompt": QUESTION, "stop": "23 123 1"},
            {"id": "lines", "prompt": QUESTION, "stop": ["456", "23 123 1", "123 12"]},
            {"id": "none", "prompt": QUESTION, "stop": [], "max_new_tokens": 3},
            {"id": "begun", "prompt": QUESTION, "stop": "123 456", "max_new_tokens": 2},
        ],
    )
    assert run_job(NEEDLE, tmp_path, "--stop", "456", "--stop", "3 1") == 0
    outputs = {output["id"]: output for output in read_lines(tmp_path / "out.jsonl")}
    found = {name: (each["text"], len(each["token_ids"]), each["finish_reason"]) for name, each in outputs.items()}
    assert found == {
        "option": ("12", 2, "stop"),
        "line": ("1", 3, "stop"),
        "lines": ("", 2, "stop"),
        "none": ("123 123 123", 3, "length"),
        "begun": ("123 123", 2, "length"),
    }


BAD_LINES = {  # -> words of the error
    '{"id": "b", "prompt_tok': "not a JSON object (Unterminated string",
    "[1, 2]": "a JSON object is expected, not list",
    '{"prompt_token_ids": [1]}': '"id" is null; it must be there, a string or a whole number',
    '{"id": 1.5, "prompt_token_ids": [1]}': '"id" is 1.5; it must be there, a string or a whole number',
    '{"id": 1}': 'give either "prompt", a string, or "prompt_token_ids", a list of whole numbers',
    '{"id": 1, "prompt": "x", "prompt_token_ids": [1]}': 'give either "prompt"',
    '{"id": 1, "prompt_token_ids": [1, "x"]}': 'give either "prompt"',
    '{"id": 1, "prompt_token_ids": [1], "temprature": 1}': "'temprature' is not a sampling parameter; allowed are ",
    '{"id": 1, "prompt_token_ids": [1], "top_p": 7}': "top_p (--top-p) is 7; it must be a number in (0, 1]",
    f'{{"id": 1, "prompt_token_ids": [{VOCAB_SIZE}]}}': (
        f"the prompt has token id {VOCAB_SIZE}; the model's vocabulary is"
    ),
    f'{{"id": 1, "prompt_token_ids": {[1] * 256}}}': "the prompt has 256 tokens; with --max-model-len 256 at most 255",
    '{"id": 1, "prompt_token_ids": []}': "the prompt is empty",
    '{"id": "a", "prompt_token_ids": [1]}': "id 'a' is also that of line 1; ids must differ",
    '{"id": "\\ud800", "prompt_token_ids": [1]}': "\"id\" has '\\ud800' at position 0, which is no character",
    '{"id": ' + 5000 * "[": "not a JSON object (",
    '{"id": 1, "prompt": "x"}': '"prompt" needs a tokenizer, and the model\'s does not load',
}


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: line[:40])
def test_a_bad_line_is_named_before_anything_is_done(
    line: str, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps(PROMPTS[0]) + "\n\n" + line)
    assert run_job(model, tmp_path) == 2
    assert f"in.jsonl, line 3: {BAD_LINES[line]}" in mistake(capfd)
    assert not (tmp_path / "out.jsonl").exists()


def test_files_that_do_not_belong_together(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_lines(tmp_path / "in.jsonl", PROMPTS)
    for content, message in (
        (json.dumps(line("z")) + "\n", "which has id 'z' that is not in --prompt-file; give the files of one job"),
        (json.dumps(line("z")) + '\n{"id": "a', "which has id 'z' that is not in --prompt-file"),
    ):
        (tmp_path / "out.jsonl").write_text(content)
        assert run_job(model, tmp_path) == 2
        assert message in mistake(capfd)
        assert (tmp_path / "out.jsonl").read_text() == content
    (tmp_path / "in.jsonl").write_text("\n")
    assert run_job(model, tmp_path) == 2
    assert "in.jsonl, which has no prompts" in mistake(capfd)
    (tmp_path / "in.jsonl").unlink()
    assert run_job(model, tmp_path) == 2
    assert "in.jsonl, which cannot be read (" in mistake(capfd)
    assert run_job(model, tmp_path, "--output-file", tmp_path / "in.jsonl") == 2
    assert "are both" in mistake(capfd)


@pytest.mark.parametrize(
    ("name", "message"),
    [("no/out.jsonl", "no file can be written"), (".", "no file can be written"), ("pipe", "not a file")],
)
def test_odd_output_files(name: str, message: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=message), open_output_lines(tmp_path / name):
        pass


def line(request_id: str | int, text: str = "") -> dict[str, Any]:
    return {"id": request_id, "token_ids": [], "text": text, "finish_reason": "stop"}


BEGUN = ['{"id": "a', "{", json.dumps(PROMPTS[0])[:-5]]  # after an output, an output may begin like these
FOREIGN = [
    json.dumps({**line(5), "id": ["a"]}) + "\n",
    "text\n",
    "notes without an end",
    '{"id": 5}',
    json.dumps(PROMPTS[0]),
    '{"id": 5, "token_ids": [1, 2]}',
    '{"id": 5, "finish_reason": "stop", "token_ids": []}\n',
    '{"id":5,"token_ids":[],"text":"","finish_reason":"stop"}\n',
    "\n",
]


@pytest.mark.parametrize("content", [*BEGUN, *FOREIGN, *(json.dumps(line(1)) + "\n" + text for text in FOREIGN)])
def test_a_foreign_file_stays_as_it_is(content: str, tmp_path: Path) -> None:
    (tmp_path / "out").write_text(content)
    message = "--output-file is .*out, whose .*line.* is no output of generate; give a new file, or one that generate"
    with pytest.raises(ValueError, match=message), open_output_lines(tmp_path / "out"):
        pass
    assert (tmp_path / "out").read_text() == content


def test_a_run_without_outputs_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    cut = json.dumps(line(1)) + "\n" + json.dumps(line(2))[:20]
    (tmp_path / "cut").write_text(cut)
    for name in ("empty", "cut", "new"):
        with open_output_lines(tmp_path / name) as lines:
            lines.append([])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["cut", "empty"]
    assert (tmp_path / "cut").read_text() == cut


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with (
        open_output_lines(tmp_path / "out"),
        pytest.raises(ValueError, match="which another run is writing"),
        open_output_lines(tmp_path / "out"),
    ):
        pass


@given(texts=st.lists(st.text(), max_size=5), cut=st.integers(0, 400))
@example(texts=["}"], cut=37)
def test_a_file_cut_anywhere_is_whole_lines_again(
    texts: list[str], cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("lines") / "out"
    with open_output_lines(path) as lines:
        for index, text in enumerate(texts):
            lines.append([line(index, text)])
    content = path.read_bytes() if texts else b""
    path.write_bytes(content[:cut])
    kept = content[: cut + 1].count(b"\n")  # the last one's end may be missing
    if 0 < len(content[:cut]) <= len(b'{"id": 0, "token_ids": '):  # too short to be known as an output
        with pytest.raises(ValueError, match="last line is no output"), open_output_lines(path):
            pass
        path.unlink()
    with open_output_lines(path) as lines:
        assert lines.ids == set(range(kept))
        lines.append([line("new", "")])
    written = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
    assert written == [*(line(index, text) for index, text in enumerate(texts[:kept])), line("new", "")]


@pytest.mark.parametrize("takes_half", [False, True])
def test_lines_that_fit_on_a_full_disk_are_kept(
    takes_half: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that a step finishes together are written together, and the disk has room for some of them."""
    path, write = tmp_path / "out", os.write
    room = len(json.dumps(line(1))) * 5 // 2

    def write_some(descriptor: int, data: bytes) -> int:
        left = room - os.fstat(descriptor).st_size
        if left <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[: left // 2 or left if takes_half else left])

    with open_output_lines(path) as lines:
        monkeypatch.setattr(os, "write", write_some)
        with pytest.raises(OSError, match="No space left on device") as caught:
            lines.append([line(1), line(2), line(3), line(4)])
        assert caught.value.filename == str(path)
        monkeypatch.undo()
        assert read_lines(path) == [line(1), line(2)]
        lines.append([line(5)])
    with open_output_lines(path) as lines:
        assert lines.ids == {1, 2, 5}
