"""DeepSeek-V4.1 with memories of n-grams: published names, against float64 with hashes in plain Python."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.integrations.test_drafts import PROMPTS, serve_families
from tests.integrations.test_ngrams import FIELDS, PlainHash, compress, save_tokenizer
from tests.integrations.test_transformers import check, make_cases
from tests.support.deepseek_v41_files import Reference, save_v41
from tests.support.quantized_models import dequantize, quantize
from tests.support.ranks import run_ranks
from tests.support.small_tokenizers import tokenizer_of


class WithMemories(Reference):
    """The oracle with hashes."""

    def __init__(self, reference: Reference, hashes: PlainHash) -> None:
        super().__init__(reference.model)
        self.hashes = hashes

    def __call__(self, ids: Tensor) -> SimpleNamespace:
        """Return logits [1, T, vocab] float32 of token ids [1, T]."""
        self.model.entries, self.model.chosen, self.model.candidates = {}, {}, None
        rows = dict(zip(FIELDS["engram_layer_ids"], self.hashes(ids[0], None, None).long(), strict=True))
        return SimpleNamespace(logits=self.model(ids[0], rows)[None].float())


def save_with_memories(directory: Path) -> WithMemories:
    """Save a tiny checkpoint with two memories, tables in fp8, and return its model."""
    num_ids = save_tokenizer_in(directory)
    fields: dict[str, Any] = {**FIELDS, "engram_compressed_vocab_size": num_ids}
    reference = save_v41(directory, **fields)
    config, generator = reference.model.config, torch.Generator().manual_seed(3)
    width, streams = config["hidden_size"], config["hc_mult"]
    tensors = load_file(directory / "model.safetensors")
    for layer, num_rows in zip(FIELDS["engram_layer_ids"], FIELDS["engram_num_embeddings"], strict=True):
        name = f"layers.{layer}.engram"
        codes, scales = quantize(torch.randn(num_rows, 64, generator=generator), (1, 32), True)
        tensors |= {f"{name}.embed.weight": codes, f"{name}.embed.scale": scales.to(torch.float8_e8m0fnu)}
        tensors[f"{name}.wkv.weight"] = torch.randn((streams + 1) * width, 6 * 64, generator=generator) / 20
        for which in "qk":
            tensors[f"{name}.{which}_weight"] = torch.rand(streams, width, generator=generator) + 0.5
        values = {key: tensor for key, tensor in tensors.items() if key.startswith(name)}
        values[f"{name}.embed.weight"] = dequantize(codes, scales, (1, 32))
        reference.model.tensors |= {key: tensor.double() for key, tensor in values.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    bound = (2**63 - 1) // num_ids // 2
    drawn = [np.random.default_rng(10007 * layer).integers(0, bound, 4) for layer in FIELDS["engram_layer_ids"]]
    multipliers = [[2 * int(number) + 1 for number in numbers] for numbers in drawn]
    ids = compress(tokenizer_of("byte_level"))
    return WithMemories(reference, PlainHash(ids, ids[FIELDS["engram_pad_token_id"]], multipliers))


def save_tokenizer_in(directory: Path) -> int:
    directory.mkdir(parents=True, exist_ok=True)
    return save_tokenizer(directory)


@pytest.mark.parametrize(("tp", "dcp_size", "interleave"), [(1, 1, 1), (2, 2, 8), (2, 1, 1)])
def test_logits_and_tokens(tp: int, dcp_size: int, interleave: int, tmp_path: Path) -> None:
    check(save_with_memories(tmp_path), tmp_path, tp, make_cases(tp, [dcp_size], (interleave,), ("auto",), True))


def test_drafts(tmp_path: Path) -> None:
    reference = save_with_memories(tmp_path)
    for outcome in run_ranks(2, serve_families, [tmp_path], 2, 2, 1)[0]:
        for prompt, (tokens, logits) in zip(PROMPTS, outcome, strict=True):
            expected = reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
            assert tokens == expected.argmax(-1).tolist()
