"""Train the needle model: a DeepSeek-V3-architecture transformer of 2 layers that answers questions over thousands
of facts.

    python examples/needle/train.py --seconds 300

One GPU; on a CPU it only shows that it runs. Writes config.json, model.safetensors (bfloat16),
generation_config.json, the tokenizer and training.json (what was measured, with what) into --output.

A training sequence is "<bos>", facts "key number ;" and questions "key ? number ;". There are two losses:
- on the answers, and on no other next token: facts are random, nothing else can be predicted;
- on the first layer: where a key has just been read, its output must name that key. The first layer has to carry
  each key one token on before the second can compare keys at all. Answers alone teach that slowly or never, so it is
  taught.
Sequences start at 24 tokens and double, up to 6,144, whenever the model gets more than 97 % of a batch right; every
other batch is shorter, or the model forgets short contexts.
"""

import argparse
import copy
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from prompts import (
    BOS,
    EOS,
    FIRST_KEY,
    FIRST_NUMBER,
    NUM_KEYS,
    NUM_NUMBERS,
    PAD,
    QUESTION,
    SEPARATOR,
    build_tokenizer,
    build_vocabulary,
)
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

FIRST_LENGTH, LAST_LENGTH = 24, 6144  # tokens of a training sequence
FIRST_WORDS = 128  # keys and numbers in sequences of FIRST_LENGTH; in longer ones there are more, in proportion
CONTEXTS = (256, 1024, 2048, 4096, 4800)  # tokens of facts in a held-out sequence
TOKENS_PER_STEP, STEPS_PER_CHECK = 16384, 100
LEARNING_RATE, WARMUP_STEPS = 1e-3, 500
# Experts one by one: the grouped kernels do not take the mixed dtypes of autocast.
IMPLEMENTATIONS = {"attn_implementation": "sdpa", "experts_implementation": "eager"}


def build_config(num_experts: int, q_lora_rank: int) -> DeepseekV3Config:
    """Describe the architecture: dense (num_experts = 0), or a dense first layer and then routed experts, 2 a token."""
    if num_experts < 0 or num_experts == 1:
        raise ValueError(f"--experts is {num_experts}; expected 0 (dense) or at least 2 (each token goes to 2)")
    if q_lora_rank < 0:
        raise ValueError(f"--q-lora-rank is {q_lora_rank}; expected 0 (full-rank queries) or a positive rank")
    return DeepseekV3Config(
        vocab_size=len(build_vocabulary()),
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=q_lora_rank or None,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
        intermediate_size=512,
        moe_intermediate_size=128,
        first_k_dense_replace=1 if num_experts else 2,
        n_routed_experts=num_experts or 2,  # dense models ignore it, but the field takes no zero
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        num_mtp_layers=0,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        initializer_range=0.05,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        **IMPLEMENTATIONS,
    )


def build_model(config: DeepseekV3Config, device: str) -> DeepseekV3ForCausalLM:
    """Make a fresh float32 model whose embeddings share a direction.

    The direction is essential: k_pe comes from the hidden state by a projection without bias, so with embeddings of
    mean zero the rotary logits say nothing about position, no head learns to look at the previous token, and accuracy
    stays at chance.
    """
    model = DeepseekV3ForCausalLM(config).to(device)
    with torch.no_grad():
        model.model.embed_tokens.weight.add_(0.1 * torch.randn(config.hidden_size).to(device))
    return model


class Batch(NamedTuple):
    """Sequences of one layout, on one device.

    ids [B, 1 + 3 F + 4 Q] int64: <bos>, F facts "key number ;", Q questions "key ? number ;".
    question_marks [Q] int64: positions of the "?"; the answer is one position later.
    after_keys [F + Q] int64: positions that follow a key, which are the numbers of the facts and the question marks.
    """

    ids: Tensor
    question_marks: Tensor
    after_keys: Tensor

    @property
    def answers(self) -> Tensor:
        """Token ids of the answers, [B, Q] int64."""
        return self.ids[:, self.question_marks + 1]


def make_batch(
    num_sequences: int, num_facts: int, num_questions: int, generator: torch.Generator, num_words: int = NUM_KEYS
) -> Batch:
    """Draw random facts about the first num_words keys, then questions about different ones of them, on the
    generator's device.
    """
    device = generator.device
    # Distinct keys make the answer unique; distinct questions keep it from being read off an earlier answer.
    keys = (
        FIRST_KEY + torch.rand(num_sequences, num_words, generator=generator, device=device).argsort(1)[:, :num_facts]
    )
    numbers = FIRST_NUMBER + torch.randint(min(num_words, NUM_NUMBERS), keys.shape, generator=generator, device=device)
    asked = torch.rand(num_sequences, num_facts, generator=generator, device=device).argsort(1)[:, :num_questions]
    key, number = keys.gather(1, asked), numbers.gather(1, asked)
    facts = torch.stack([keys, numbers, torch.full_like(keys, SEPARATOR)], -1)
    questions = torch.stack([key, torch.full_like(key, QUESTION), number, torch.full_like(key, SEPARATOR)], -1)
    bos = torch.full((num_sequences, 1), BOS, device=device)
    ids = torch.cat([bos, facts.flatten(1), questions.flatten(1)], 1)
    question_marks = 2 + 3 * num_facts + 4 * torch.arange(num_questions, device=device)
    return Batch(ids, question_marks, torch.cat([2 + 3 * torch.arange(num_facts, device=device), question_marks]))


def training_batch(length: int, rng: random.Random, generator: torch.Generator) -> Batch:
    """Draw about TOKENS_PER_STEP tokens in sequences of at most length tokens, a random 50-80 % of them in facts."""
    num_facts = min(int(length * rng.uniform(0.5, 0.8)) // 3, NUM_KEYS)
    num_questions = min((length - 1 - 3 * num_facts) // 4, num_facts)
    num_words = min(FIRST_WORDS * length // FIRST_LENGTH, NUM_KEYS)
    return make_batch(max(4, TOKENS_PER_STEP // length), num_facts, num_questions, generator, num_words)


def losses(model: DeepseekV3ForCausalLM, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss on the answers, that on the first layer (scalars), and the share of answers that are right."""
    output = model.model(input_ids=batch.ids, use_cache=False, output_hidden_states=True)
    answers = model.lm_head(output.last_hidden_state[:, batch.question_marks]).float()
    keys = model.lm_head(model.model.norm(output.hidden_states[1][:, batch.after_keys])).float()
    answer_loss = cross_entropy(answers.flatten(0, 1), batch.answers.flatten())
    key_loss = cross_entropy(keys.flatten(0, 1), batch.ids[:, batch.after_keys - 1].flatten())
    return answer_loss, key_loss, (answers.argmax(-1) == batch.answers).float().mean()


@torch.no_grad()
def accuracy(model: DeepseekV3ForCausalLM, context: int, num_sequences: int, seed: int) -> float:
    """Return the share of right answers over random sequences of context tokens of facts and 16 questions each, in the
    model's dtype.
    """
    generator = torch.Generator(model.device).manual_seed(seed)
    num_right = 0
    for _ in range(num_sequences):
        batch = make_batch(1, context // 3, 16, generator)
        hidden = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
        num_right += int((model.lm_head(hidden[:, batch.question_marks]).argmax(-1) == batch.answers).sum())
    return num_right / (16 * num_sequences)


def to_bfloat16(model: DeepseekV3ForCausalLM) -> DeepseekV3ForCausalLM:
    """Return a copy with bfloat16 weights, as saved; Module.to would round the rotary frequencies, too."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def train(model: DeepseekV3ForCausalLM, seconds: float, seed: int, num_sequences: int) -> dict[str, float]:
    """Train in place until the time is over or two successive checks find every held-out answer right at all CONTEXTS.

    Returns:
        What it took: steps, seconds and the length of the last sequences.
    """
    device = model.device.type
    rng, generator = random.Random(seed), torch.Generator(device).manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    start, step, length, num_perfect = time.time(), 0, FIRST_LENGTH, 0
    while (elapsed := time.time() - start) < seconds and num_perfect < 2:
        optimizer.param_groups[0]["lr"] = (
            LEARNING_RATE * min(1, (step + 1) / WARMUP_STEPS) * (1 if elapsed < 0.8 * seconds else 0.1)
        )
        shorter = round(FIRST_LENGTH * (length / FIRST_LENGTH) ** rng.random())
        batch = training_batch(length if step % 2 else shorter, rng, generator)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            answer_loss, key_loss, right = losses(model, batch)
        optimizer.zero_grad()
        (answer_loss + key_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % STEPS_PER_CHECK:
            continue
        print(
            f"{time.time() - start:4.0f} s  step {step}  length {length}  loss {answer_loss.item():.3f}  "
            f"first layer {key_loss.item():.3f}  accuracy {right.item():.3f}",
            flush=True,
        )
        if right > 0.97 and length < LAST_LENGTH:
            length *= 2
        elif right > 0.97:
            # Fresh sequences at each check: two perfect ones are twice the evidence.
            saved = to_bfloat16(model)
            held_out = [accuracy(saved, context, num_sequences, seed + step) for context in CONTEXTS]
            print(f"        held out {dict(zip(CONTEXTS, held_out, strict=True))}", flush=True)
            num_perfect = num_perfect + 1 if min(held_out) == 1 else 0
    return {"steps": step, "seconds": round(time.time() - start, 1), "last_length": length}


def measure(folder: Path, device: str, num_sequences: int) -> dict[str, dict[str, float]]:
    """Measure the saved model's accuracy at each of CONTEXTS, computing in bfloat16 and in float32."""
    accuracies: dict[str, dict[str, float]] = {}
    for name in ("bfloat16", "float32"):
        model = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=name, **IMPLEMENTATIONS).to(device).eval()
        accuracies[name] = {str(context): accuracy(model, context, num_sequences, seed=0) for context in CONTEXTS}
        print(f"saved model in {name}: {accuracies[name]}", flush=True)
    return accuracies


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train the needle model.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=300, help="longest training time; it stops early when the model is perfect"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--experts", type=int, default=4, help="routed experts in the second layer; 0: all layers dense"
    )
    parser.add_argument("--q-lora-rank", type=int, default=128, help="rank of the query projection; 0: full")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "model", help="folder to write")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse_options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    num_sequences = 64 if device == "cuda" else 1
    torch.manual_seed(options.seed)
    model = build_model(build_config(options.experts, options.q_lora_rank), device)
    run = train(model, options.seconds, options.seed, num_sequences)
    to_bfloat16(model).save_pretrained(options.output)
    build_tokenizer().save_pretrained(options.output)
    report = {
        "accuracy": measure(options.output, device, num_sequences),
        "answers_per_accuracy": 16 * num_sequences,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bytes": (options.output / "model.safetensors").stat().st_size,
        "training": run,
        "options": {name: value for name, value in vars(options).items() if name != "output"},
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    (options.output / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
