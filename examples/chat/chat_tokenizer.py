"""The chat model's tokenizer, byte-level BPE of the conversations' words, and its chat template."""

from collections.abc import Iterable

from conversations import Conversation
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 2048
SPECIALS = ("<pad>", "<bos>", "<eos>", "<|tools|>", "<|system|>", "<|user|>", "<|assistant|>", "<|result|>")
# Calls have DeepSeek-V3.1's markup; servers show these tokens to their parsers, so they are not special.
CALLS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
PAD, BOS, EOS = range(3)
ASSISTANT = SPECIALS.index("<|assistant|>")
# A name or a number is the same token after a space and in quotes, so that it can be copied from text into JSON.
_WORDS = r" ?[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[\p{Lu}\p{Lt}][\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}{1,2}| ?[^\s\p{L}\p{M}\p{N}]+|\s"

TEMPLATE = """\
{{- bos_token }}
{%- if tools %}
  {{- '<|tools|>' }}
  {%- for tool in tools %}
    {%- set function = tool.function | default(tool) %}
    {{- function.name + '(' }}
    {%- for name, schema in ((function.parameters or {}).properties or {}).items() %}
      {{- name + ': ' + (schema.type if schema.type is string else schema | tojson) }}
      {%- if not loop.last %}{{ ', ' }}{% endif %}
    {%- endfor %}
    {{- ')' }}
    {%- if function.description %}{{ ' ' + function.description }}{% endif %}
    {{- '\\n' }}
  {%- endfor %}
{%- endif %}
{%- for message in messages %}
  {%- if message.role in ['system', 'developer'] %}
    {{- '<|system|>' + message.content }}
  {%- elif message.role == 'user' %}
    {{- '<|user|>' + message.content }}
  {%- elif message.role == 'tool' %}
    {{- '<|result|>' + message.content }}
  {%- elif message.role == 'assistant' %}
    {{- '<|assistant|>' + (message.content or '') }}
    {%- if message.tool_calls %}
      {{- '<｜tool▁calls▁begin｜>' }}
      {%- for call in message.tool_calls %}
        {%- set arguments = call.function.arguments %}
        {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}
        {{- (arguments if arguments is string else arguments | tojson) + '<｜tool▁call▁end｜>' }}
      {%- endfor %}
      {{- '<｜tool▁calls▁end｜>' }}
    {%- endif %}
    {{- '<eos>' }}
  {%- else %}
    {{- raise_exception('unknown role: ' + message.role) }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""


def train_tokenizer(talks: Iterable[Conversation]) -> PreTrainedTokenizerFast:
    """Train a tokenizer of VOCAB_SIZE tokens. All bytes are tokens, so that it encodes and decodes any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[*SPECIALS, *CALLS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    render = _with_template(tokenizer).apply_chat_template
    tokenizer.train_from_iterator(
        (render(talk.messages, tools=talk.schemas(), tokenize=False) for talk in talks), trainer
    )
    for token in CALLS:
        tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    return _with_template(tokenizer)


def _with_template(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE,
    )
