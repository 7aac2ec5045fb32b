"""The language of the needle model: its vocabulary, its tokenizer and its prompts.

A prompt is a list of facts and one question, and a person can read it:

    amber-fox 417 ; birch-owl 023 ; ... ; amber-fox ?

The answer is one token, "417". Each key ("amber-fox") and each number ("417") is one token, so a fact is three
tokens and a context of 4,096 tokens holds 1,364 facts.
"""

import random

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

MATERIALS = (
    "amber",
    "ash",
    "birch",
    "brass",
    "bronze",
    "cedar",
    "chalk",
    "clay",
    "copper",
    "coral",
    "cotton",
    "denim",
    "flint",
    "glass",
    "gold",
    "granite",
    "ivory",
    "jade",
    "lace",
    "leather",
    "linen",
    "maple",
    "marble",
    "nickel",
    "oak",
    "onyx",
    "opal",
    "paper",
    "pearl",
    "pine",
    "quartz",
    "ruby",
    "satin",
    "silk",
    "silver",
    "slate",
    "steel",
    "tin",
    "velvet",
    "wool",
)
NOUNS = (
    "ant",
    "apple",
    "badger",
    "bear",
    "bell",
    "boat",
    "book",
    "bridge",
    "camel",
    "candle",
    "chair",
    "crow",
    "deer",
    "drum",
    "eagle",
    "fox",
    "goat",
    "hammer",
    "hare",
    "harp",
    "horse",
    "key",
    "kite",
    "lamp",
    "lion",
    "mole",
    "otter",
    "owl",
    "piano",
    "plum",
    "rabbit",
    "raven",
    "rose",
    "seal",
    "spoon",
    "swan",
    "tiger",
    "wagon",
    "wolf",
    "zebra",
)

SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD, BOS, EOS, UNK = range(4)
SEPARATOR, QUESTION = 4, 5
FIRST_KEY, NUM_KEYS = 6, len(MATERIALS) * len(NOUNS)
FIRST_NUMBER, NUM_NUMBERS = FIRST_KEY + NUM_KEYS, 1000
TOKENS_PER_FACT = 3  # key, number, separator
NUM_FRAME_TOKENS = 3  # what a prompt holds besides its facts: <bos>, the key asked for, "?"
MAX_PROMPT_TOKENS = NUM_FRAME_TOKENS + TOKENS_PER_FACT * NUM_KEYS  # keys are distinct, so their number bounds a prompt


def build_vocabulary() -> list[str]:
    """Return all tokens in the order of their ids, filled with reserved ones to a multiple of 64.

    The length is then a multiple of 8 as well, so that embeddings shard evenly over up to 8 GPUs.
    """
    keys = [f"{material}-{noun}" for material in MATERIALS for noun in NOUNS]
    numbers = [f"{number:03d}" for number in range(NUM_NUMBERS)]
    tokens = [*SPECIALS, ";", "?", *keys, *numbers]
    return tokens + [f"<reserved-{i}>" for i in range(-len(tokens) % 64)]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Make the word-level tokenizer: one token a word, ";" and "?" also where no space precedes them, <bos> in front.

    A word outside the vocabulary becomes <unk>. Decoding joins the tokens with single spaces, so that
    decode(encode(prompt), skip_special_tokens=True) is the prompt again.
    """
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(build_vocabulary())}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex("[;?]"), behavior="isolated")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B:1", special_tokens=[("<bos>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=8192,
        clean_up_tokenization_spaces=False,  # it would decode "amber-fox ?" as "amber-fox?"
    )


def make_prompt(num_tokens: int, depth: float, rng: random.Random) -> tuple[str, str]:
    """Make a prompt of distinct keys that asks for one of its facts, and the answer.

    Args:
        num_tokens: length of the tokenized prompt, <bos> and question included; met exactly or missed by one or two
            tokens, since facts have three (4,096 gives 1,364 facts and 4,095 tokens).
        depth: where the fact is: 0 is the first fact of the prompt, 1 the last one before the question.
        rng: source of the keys and numbers; the same state gives the same prompt.
    Returns:
        The prompt without <bos>, which the tokenizer adds, and the answer, a number of three digits.
    Raises:
        ValueError: num_tokens holds no fact or more facts than there are keys; depth outside [0, 1].
    """
    shortest = NUM_FRAME_TOKENS + TOKENS_PER_FACT
    if not shortest <= num_tokens <= MAX_PROMPT_TOKENS:
        raise ValueError(
            f"make_prompt: num_tokens is {num_tokens}; "
            f"expected {shortest} to {MAX_PROMPT_TOKENS} ({NUM_KEYS} distinct keys)"
        )
    if not 0 <= depth <= 1:
        raise ValueError(f"make_prompt: depth is {depth}; expected 0 (first fact) to 1 (last fact)")
    vocabulary = build_vocabulary()
    num_facts = (num_tokens - NUM_FRAME_TOKENS) // TOKENS_PER_FACT
    keys = rng.sample(vocabulary[FIRST_KEY : FIRST_KEY + NUM_KEYS], num_facts)
    numbers = rng.choices(vocabulary[FIRST_NUMBER : FIRST_NUMBER + NUM_NUMBERS], k=num_facts)
    asked = round(depth * (num_facts - 1))
    facts = " ; ".join(f"{key} {number}" for key, number in zip(keys, numbers, strict=True))
    return f"{facts} ; {keys[asked]} ?", numbers[asked]
