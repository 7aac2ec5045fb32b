"""Checkpoints that `dcpmla generate` cannot serve: one line says why."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.commands import generate, mistake

pytestmark = pytest.mark.usefixtures("one_process_on_cpu")


LAYER_0, LAYER_1 = "model.layers.0.self_attn", "model.layers.1.self_attn"
BROKEN_TENSORS: list[tuple[str, torch.Tensor | None, str]] = [
    (f"{LAYER_1}.q_b_proj.weight", None, f"{LAYER_1}: checkpoint: tensor q_b_proj.weight is missing"),
    (
        f"{LAYER_0}.q_b_proj.weight",
        torch.zeros(384, 24, dtype=torch.int8),
        f"tensor {LAYER_0}.q_b_proj.weight has dtype I8, but there are no scales",
    ),
    ("model.norm.weight", torch.zeros(47), "model.norm.weight has shape (47,); the model's config asks for (48,)"),
]


@pytest.mark.parametrize(("name", "replace", "message"), BROKEN_TENSORS)
def test_broken_checkpoints(
    name: str,
    replace: torch.Tensor | None,
    message: str,
    model: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    broken = shutil.copytree(model, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    del tensors[name]
    tensors |= {} if replace is None else {name: replace}
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    assert generate(broken, "--prompt-ids 5") == 2
    assert message in mistake(capfd)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model.safetensors", b"garbage", "model.safetensors is not a readable safetensors file"),
        ("model.safetensors.index.json", b"{}", "model.safetensors.index.json is no JSON object with weight_map"),
        ("config.json", b"[]", "config.json is no JSON object"),
        ("config.json", b"{", "config.json is no JSON: Expecting property name"),
        ("config.json", b'{"model_type": "llama"}', "'llama' is not an MLA model this runtime knows; choose deepseek"),
        ("config.json", b'{"model_type": "deepseek_v3", "hidden_size": "abc"}', "config.json is no deepseek_v3 config"),
    ],
)
def test_broken_files(
    file: str, content: bytes, message: str, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = shutil.copytree(model, tmp_path / "model")
    (broken / file).write_bytes(content)
    assert generate(broken, "--prompt-ids 5") == 2
    assert message in mistake(capfd)


def test_a_broken_tokenizer_matters_to_texts_only(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = shutil.copytree(model, tmp_path / "model")
    (broken / "tokenizer.json").write_text("{}")
    assert generate(broken, "--prompt-ids 5 --max-new-tokens 1") == 0
    capfd.readouterr()
    assert generate(broken, "--prompt hello") == 2
    assert "--prompt needs a tokenizer, and the model's does not load: " in mistake(capfd)
