"""Train the chat model: a DeepSeek-V3-architecture transformer of 6 layers that chats, calls tools and writes JSON.

    python examples/chat/train_chat.py

On one CPU core, best one that multiplies in bfloat16. Writes config.json, model.safetensors (bfloat16),
generation_config.json, the tokenizer with its chat template, and training.json (what was measured, with what) into
--output, and again whenever it has measured.

Conversations grow in the first half of the training: few facts and tools first. There are three losses, of which the
first half has the other two as well, because copying heads learn late or never from next tokens alone:
- on next tokens: those of the assistant, and a share of the others;
- on the first layer: its output must name the previous token;
- on the third layer: its output must name what followed the last earlier place with the same token.
"""

import argparse
import copy
import json
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from chat_tokenizer import ASSISTANT, BOS, EOS, PAD, train_tokenizer
from conversations import Conversation, conversations
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from words import Words

POOL = 512  # conversations that are sorted by length into batches
TOKENS_PER_STEP = 2048
LEARNING_RATE, WARMUP_STEPS = 4e-3, 100
OTHERS_SHARE, OTHERS_WEIGHT = 0.2, 0.5  # tokens that are not the assistant's: how many count, and how much
COPY_SHARE, COPY_WEIGHT = 0.3, 0.3  # tokens in the losses on the first and the third layer
STEPS_PER_CHECK = 200


def build_config(vocab_size: int) -> DeepseekV3Config:
    """Describe the architecture: dense, with full-rank queries as DeepSeek-V2-Lite has them."""
    return DeepseekV3Config(
        vocab_size=vocab_size,
        hidden_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
        intermediate_size=256,
        moe_intermediate_size=64,
        first_k_dense_replace=6,
        n_routed_experts=2,  # dense models ignore it, but the field takes no zero
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        num_mtp_layers=0,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        initializer_range=0.05,
        tie_word_embeddings=True,  # what a head copies is then read as it was written, also words that are rare
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        attn_implementation="sdpa",
    )


def build_model(config: DeepseekV3Config) -> DeepseekV3ForCausalLM:
    """Make a fresh float32 model whose embeddings share a direction.

    Without it the rotary logits of k_pe, a projection without bias, say nothing about position at first.
    """
    model = DeepseekV3ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.add_(0.1 * torch.randn(config.hidden_size))
    return model


class Batch(NamedTuple):
    """Conversations of about one length.

    ids [B, T] int64, padded at the end; answered [B, T - 1] bool: whether the next token is the assistant's.
    """

    ids: Tensor
    answered: Tensor


def answered_tokens(ids: Sequence[int]) -> list[bool]:
    """Return which tokens the assistant writes: those after <|assistant|>, up to and including <eos>."""
    writes, result = False, []
    for token in ids:
        result.append(writes)
        writes = (writes or token == ASSISTANT) and token != EOS
    return result


def encode(tokenizer: Any, talks: Sequence[Conversation]) -> list[list[int]]:
    """Return the tokens of conversations."""
    texts = [tokenizer.apply_chat_template(talk.messages, tools=talk.schemas(), tokenize=False) for talk in talks]
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return ids


def batches(tokenizer: Any, words: Words, size: float) -> list[Batch]:
    """Draw POOL conversations, and return them in batches of about TOKENS_PER_STEP tokens, in random order."""
    sequences = sorted(encode(tokenizer, list(islice(conversations(words, size), POOL))), key=len)
    result, start = [], 0
    while start < len(sequences):
        end = start + 1
        while end < len(sequences) and (end + 1 - start) * len(sequences[end]) <= TOKENS_PER_STEP:
            end += 1
        longest = len(sequences[end - 1])
        rows = [ids + [PAD] * (longest - len(ids)) for ids in sequences[start:end]]
        answered = torch.tensor([answered_tokens(row) for row in rows])
        result.append(Batch(torch.tensor(rows), answered[:, 1:]))
        start = end
    words.rng.shuffle(result)
    return result


def continued(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return what followed the last earlier place with the same token, and whether there is one: both [B, T].

    Places at which the token before is the same, too, come first.
    """
    length = ids.shape[1]
    same = ids[:, :, None] == ids[:, None, :]
    before = pad(same[:, :-1, :-1], (1, 0, 1, 0))
    earlier = torch.ones(length, length, dtype=torch.bool).tril(-1)
    score = (same & earlier) * (1 + torch.arange(length) + length * before)
    best, place = score.max(-1)
    return ids.gather(1, (place + 1).clamp_max(length - 1)), (best > 0) & (ids != PAD)


def copy_loss(model: DeepseekV3ForCausalLM, layers: Sequence[Tensor], ids: Tensor) -> Tensor:
    """Return the loss on the first and the third layer, of a share of the tokens.

    Args:
        layers: Outputs of the embedding and of all layers, each [B, T, hidden].
    """
    drawn = (ids != PAD) & (torch.rand(ids.shape) < COPY_SHARE)
    targets, found = continued(ids)
    names_previous, names_continued = drawn[:, 1:], drawn & found
    hidden = torch.cat([layers[1][:, 1:][names_previous], layers[3][names_continued]])
    logits = model.lm_head(model.model.norm(hidden)).float()
    return cross_entropy(logits, torch.cat([ids[:, :-1][names_previous], targets[names_continued]]))


def losses(model: DeepseekV3ForCausalLM, batch: Batch, learns_copying: bool) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses, and the share of the assistant's tokens that are right."""
    output = model.model(input_ids=batch.ids, use_cache=False, output_hidden_states=learns_copying)
    counted = batch.answered | ((batch.ids[:, 1:] != PAD) & (torch.rand(batch.answered.shape) < OTHERS_SHARE))
    logits = model.lm_head(output.last_hidden_state[:, :-1][counted]).float()
    targets, answered = batch.ids[:, 1:][counted], batch.answered[counted]
    weights = torch.where(answered, 1.0, OTHERS_WEIGHT)
    loss = (cross_entropy(logits, targets, reduction="none") * weights).sum() / answered.sum()
    if learns_copying:
        loss = loss + COPY_WEIGHT * copy_loss(model, output.hidden_states, batch.ids)
    return loss, (logits.argmax(-1) == targets)[answered].float().mean()


def build_optimizers(model: DeepseekV3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices and AdamW for embeddings and norms."""
    layers = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if not any(parameter is each for each in layers)]
    return [
        torch.optim.Muon(layers, lr=LEARNING_RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


class Training:
    """A model in training.

    Args:
        num_steps: Steps of the whole training, which the learning rate and the conversations' size follow.
    """

    def __init__(self, model: DeepseekV3ForCausalLM, tokenizer: Any, num_steps: int, seed: int) -> None:
        self.model, self.tokenizer, self.num_steps = model, tokenizer, num_steps
        self.words = Words(random.Random(seed))
        self.step, self.num_tokens, self._start = 0, 0, time.time()
        self._optimizers = build_optimizers(model)

    def run(self) -> None:
        """Train until the next check, at most STEPS_PER_CHECK steps and a pool later."""
        until = min(self.num_steps, self.step + STEPS_PER_CHECK)
        while self.step < until:
            right = [self.take_step(batch) for batch in batches(self.tokenizer, self.words, self._size())]
            print(
                f"{time.time() - self._start:5.0f} s  step {self.step}  tokens {self.num_tokens}  "
                f"size {self._size():.2f}  right tokens {sum(right) / len(right):.4f}",
                flush=True,
            )

    def summary(self) -> dict[str, float]:
        """Return what it took."""
        seconds, cpu = time.time() - self._start, time.process_time()
        return {"steps": self.step, "tokens": self.num_tokens, "seconds": round(seconds), "cpu_seconds": round(cpu)}

    def _size(self) -> float:
        return min(1.0, 2 * self.step / self.num_steps)

    def take_step(self, batch: Batch) -> float:
        """Train on a batch; return the share of the assistant's tokens that were right."""
        done = self.step / self.num_steps
        rate = LEARNING_RATE * min(1, (self.step + 1) / WARMUP_STEPS) * max(0.01, min(1, 2 * (1 - done)))
        with torch.autocast("cpu", torch.bfloat16):
            loss, right = losses(self.model, batch, done < 0.5)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.num_tokens += batch.ids.numel()
        return right.item()


def to_bfloat16(model: DeepseekV3ForCausalLM) -> DeepseekV3ForCausalLM:
    """Return a copy with bfloat16 weights, as saved; Module.to would round the rotary frequencies, too."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


@torch.no_grad()
def accuracy(model: DeepseekV3ForCausalLM, tokenizer: Any, words: Words, num_conversations: int) -> dict[str, Any]:
    """Return the share of answers of each task that greedy decoding writes whole, after a right conversation."""
    right: dict[str, list[bool]] = defaultdict(list)
    talks = list(islice(conversations(words, 1.0), num_conversations))
    for talk, ids in zip(talks, encode(tokenizer, talks), strict=True):
        best = model(input_ids=torch.tensor([ids])).logits[0].argmax(-1).tolist()
        starts = [place for place, token in enumerate(ids) if token == ASSISTANT]
        for task, start in zip(talk.tasks, starts, strict=True):
            end = ids.index(EOS, start)
            right[task].append(best[start:end] == ids[start + 1 : end + 1])
    return {task: {"right": sum(each), "answers": len(each)} for task, each in sorted(right.items())}


def save(training: Training, folder: Path, options: dict[str, Any], num_conversations: int) -> None:
    """Write the model, its tokenizer, and its accuracy on words that training has and on words that it leaves out."""
    to_bfloat16(training.model).save_pretrained(folder)
    training.tokenizer.save_pretrained(folder, save_jinja_files=False)  # the template goes into tokenizer_config.json
    model = DeepseekV3ForCausalLM.from_pretrained(folder, dtype="float32", attn_implementation="sdpa").eval()
    report = {
        "accuracy": {
            name: accuracy(
                model, training.tokenizer, Words(random.Random(options["seed"] + 1), held_out), num_conversations
            )
            for name, held_out in (("words of training", False), ("held out", True))
        },
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "training": training.summary(),
        "options": options,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    (folder / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    for name, tasks in report["accuracy"].items():
        print(
            f"{name}: " + ", ".join(f"{task} {each['right']}/{each['answers']}" for task, each in tasks.items()),
            flush=True,
        )


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train the chat model.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2400, help="training steps of about 2,000 tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "model", help="folder to write")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse_options()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    talks = islice(conversations(Words(random.Random(-1 - options.seed)), 1.0), 8000)
    tokenizer = train_tokenizer(talks)
    training = Training(build_model(build_config(len(tokenizer))), tokenizer, options.steps, options.seed)
    chosen = {"steps": options.steps, "seed": options.seed}
    while training.step < options.steps:
        training.run()
        save(training, options.output, chosen, 2000 if training.step >= options.steps else 50)


if __name__ == "__main__":
    main()
