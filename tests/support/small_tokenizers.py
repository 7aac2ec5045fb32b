"""Small tokenizers of each family."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dcpmla.runtime.sampling import SamplingParams
from dcpmla.text.stream import TextStream

SENTENCES = [
    "the quick brown fox jumps over the lazy dog, don't it ?",
    "naïve café – déjà vu; 3.14 and 2,718",
    "你好，世界。模型的注意力缓存分布在多个设备上。",
    "emoji 🦊🐻 and family 👩‍👩‍👧 and flags 🇰🇪🇯🇵",
    "def f(x):\n    return  x  +  1\n",
]
SPECIAL = ["<pad>", "<eos>", "<tool>"]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())  # in an order that does not change from run to run


def new_stream(
    tokenizer: Any, stop: Sequence[str] = (), prompt_token_ids: Sequence[int] = (), includes_stop: bool = False
) -> TextStream:
    """Return a text under some sampling parameters."""
    params = SamplingParams(stop=tuple(stop), include_stop_str_in_output=includes_stop)
    return TextStream(tokenizer, params, prompt_token_ids)


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """With special tokens, <tool> one that has no role of its own."""
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def byte_level() -> PreTrainedTokenizerFast:
    """As DeepSeek's: most characters beyond ASCII are cut into several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        SENTENCES, trainers.BpeTrainer(vocab_size=330, initial_alphabet=BYTES, show_progress=False)
    )
    return wrap(tokenizer)


def straddling() -> PreTrainedTokenizerFast:
    """Byte-level with tokens that end one character and begin the next: 世 is E4 B8 96, ä is C3 A4, 🦊 F0 9F A6 8A."""
    letter = dict(zip(sorted(range(256), key=lambda byte: ord(byte_letter(byte))), sorted(BYTES), strict=True))
    pieces = [
        b"\xb8\x96\xe4",
        b"\x96\xe4\xb8",
        b"\xe4\xb8\x96",
        b"\x96\xe4",
        b"a\xe4",
        b"\xa4\xc3",
        b"\x8a\xf0\x9f",
        b"\xa6",
    ]
    tokens = dict.fromkeys([*BYTES, *("".join(letter[byte] for byte in piece) for piece in pieces)])
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return wrap(tokenizer)


def byte_letter(byte: int) -> str:
    """GPT-2's letter of a byte: itself where it prints, else the next one from U+0100 on."""
    prints = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return (
        chr(byte) if byte in prints else chr(0x100 + [other for other in range(256) if other not in prints].index(byte))
    )


def ids_of_bytes(content: bytes) -> list[int]:
    """Return tokens of single bytes of the straddling vocabulary."""
    return list(tokenizer_of("straddling").convert_tokens_to_ids([byte_letter(byte) for byte in content]))


def metaspace() -> PreTrainedTokenizerFast:
    """As SentencePiece's: a word's token begins with its space, dropped at the start of a text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        SENTENCES, trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False)
    )
    return wrap(tokenizer)


def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2's: characters that are not in the vocabulary become tokens of one byte."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    vocab |= {letter: 257 + index for index, letter in enumerate("▁abcdefghijklmnopqrstuvwxyz")}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", left=1, right=0)]
    )
    return wrap(tokenizer)


def word_level() -> PreTrainedTokenizerFast:
    """As the needle model's: words joined with spaces."""
    words = " ".join(SENTENCES).split()
    tokenizer = Tokenizer(
        models.WordLevel(
            {word: index for index, word in enumerate(dict.fromkeys(["<unk>", *words]))}, unk_token="<unk>"
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return wrap(tokenizer)


def word_piece() -> PreTrainedTokenizerFast:
    """As BERT's: words cut into pieces that begin with ##."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.train_from_iterator(
        SENTENCES, trainers.WordPieceTrainer(vocab_size=150, special_tokens=["<unk>"], show_progress=False)
    )
    return wrap(tokenizer)


def ascii_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return one of printable ASCII, some pairs of letters, and last the end of a sequence: below 256 tokens."""
    letters = [chr(code) for code in range(0x21, 0x7F)]
    pairs = [(one, two) for one in "abcdz" for two in "abcdefz9"][: vocab_size - len(letters) - 1]
    tokens = [*letters, *(one + two for one, two in pairs)]
    tokens += [f"<{index}>" for index in range(len(tokens), vocab_size - 1)]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def scripted_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with markup (no special tokens), roles (special ones) and a chat template."""
    backend = byte_level().backend_tokenizer
    markup = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in markup])
    roles = ["<|system|>", "<|developer|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "<|pad|>"]
    backend.add_special_tokens(roles)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", chat_template=template)


BUILDERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    builder.__name__: builder for builder in (byte_level, straddling, metaspace, byte_fallback, word_level, word_piece)
}
FAMILIES = list(BUILDERS)


@functools.cache
def tokenizer_of(family: str) -> Any:
    return BUILDERS[family]()
