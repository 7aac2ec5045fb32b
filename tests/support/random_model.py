"""A model of random logits over the vocabulary of a byte-level tokenizer, for tests of grammars."""

import hashlib
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.cache.latent import LatentCache
from tests.support.hash_model import HashModel
from tests.support.models import random_model, tiny_config
from tests.support.small_tokenizers import tokenizer_of

TOKENIZER = tokenizer_of("byte_level")
EOS = TOKENIZER.convert_tokens_to_ids("<eos>")
TOOL = TOKENIZER.convert_tokens_to_ids("<tool>")
VOCAB_SIZE = len(TOKENIZER) + 19  # a padded vocabulary, as models have it
LINES = [token for text, token in TOKENIZER.get_vocab().items() if "\n" in TOKENIZER.convert_tokens_to_string([text])]


class RandomModel(HashModel):
    """A model whose logits are random numbers that depend on the whole sequence, as the cache has it.

    Args:
        favourites: Texts whose tokens have larger logits by a number.
    """

    vocab_size = VOCAB_SIZE
    eos_token_ids = frozenset([EOS])

    def __init__(self, favourites: dict[str, float] | None = None) -> None:
        super().__init__()
        self.biases = torch.zeros(VOCAB_SIZE)
        for text, number in (favourites or {}).items():
            self.biases[TOKENIZER(text)["input_ids"]] += number

    def hidden(self, token_ids: Tensor, metadata: StepMetadata, cache: LatentCache) -> Tensor:
        self._found: dict[int, Tensor] = {}
        rows = super().hidden(token_ids, metadata, cache)
        logits = torch.zeros(len(rows), VOCAB_SIZE)
        for at, own in self._found.items():
            logits[at] = own
        return logits

    def _compute(self, token_ids: Tensor, cache: LatentCache, logits: Tensor, metadata: StepMetadata) -> None:
        ends = self._sequences(token_ids[: metadata.num_tokens], metadata, cache[0].latents.view(-1, 2))
        self.steps.append([num_new for _, num_new in ends.values()])
        self._found.update({at: self.logits_after(sequence) for at, (sequence, _) in ends.items() if sequence})

    def logits_after(self, sequence: Sequence[int]) -> Tensor:
        digest = hashlib.sha256(repr(list(sequence)).encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
        return torch.randn(VOCAB_SIZE, generator=generator) + self.biases


def save_random_model(directory: Path, template: str | None = None) -> None:
    """Save a tiny DeepSeek-V3 of one layer with the vocabulary, its tokenizer and a chat template."""
    config = tiny_config("deepseek_v3")
    config.num_hidden_layers = 1
    config.vocab_size, config.eos_token_id = VOCAB_SIZE, EOS
    random_model(config).save_pretrained(directory)
    tokenizer = copy(TOKENIZER)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)


def text_of(token_ids: Sequence[int]) -> Any:
    return TOKENIZER.decode([token for token in token_ids if token != EOS])
