"""Hashes of n-grams in plain Python, for a small model's fields and tokenizer."""

import re
import unicodedata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.small_tokenizers import tokenizer_of

FIELDS: dict[str, Any] = {
    "engram_layer_ids": [1, 2],
    "engram_num_embeddings": [700, 650],
    "engram_max_ngram_size": 4,
    "engram_n_heads": 2,
    "engram_head_dim": 64,
    "engram_vocab_size": 64,
    "engram_pad_token_id": 2,
}
ORDERS = [2, 2, 3, 3, 4, 4]
PRIMES = [[67, 71, 73, 79, 83, 89], [97, 101, 103, 107, 109, 113]]


def compress(tokenizer: Any) -> list[int]:
    """Return the compressed id of each token, by Python's own tables of characters."""
    seen: dict[str, int] = {}
    ids = []
    for token in range(len(tokenizer)):
        text = tokenizer.decode([token])
        key = tokenizer.convert_ids_to_tokens(token)
        if "\ufffd" not in text:
            letters = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
            letters = "".join(letter for letter in letters if unicodedata.category(letter) != "Mn").lower()
            letters = re.sub(r"[ \t\r\n]+", " ", letters)
            key = (letters if letters == " " else letters.strip()) or text
        ids.append(seen.setdefault(key, len(seen)))
    return ids


def save_tokenizer(directory: Path) -> int:
    """Save a tokenizer; return its number of compressed ids."""
    tokenizer = tokenizer_of("byte_level")
    tokenizer.save_pretrained(directory)
    ids = compress(tokenizer)
    assert len(ids) > max(ids) + 1
    return max(ids) + 1


def hash_row(ids: list[int], pad_id: int, multipliers: list[int], orders: list[int], primes: list[int]) -> list[int]:
    """Return the rows of a table for the n-grams at the end of some ids: a column for each order and prime."""
    row = []
    for column, (order, prime) in enumerate(zip(orders, primes, strict=True)):
        number = 0
        for distance in range(order):
            number ^= (ids[-1 - distance] if distance < len(ids) else pad_id) * multipliers[distance]
        assert number < 2**63
        row.append(number % prime + sum(primes[:column]))
    return row


class PlainHash(nn.Module):
    """The hashes of a step that is one whole sequence."""

    def __init__(self, token_map: list[int], pad_id: int, multipliers: list[list[int]]) -> None:
        super().__init__()
        self.token_map, self.pad_id, self.multipliers = token_map, pad_id, multipliers

    def forward(self, token_ids: Tensor, step: Any, cache: Any) -> Tensor:
        ids = [self.token_map[token] for token in token_ids.tolist()]
        layers = [
            [hash_row(ids[: end + 1], self.pad_id, own, ORDERS, primes) for end in range(len(ids))]
            for own, primes in zip(self.multipliers, PRIMES, strict=True)
        ]
        return torch.tensor(layers, dtype=torch.int32)
