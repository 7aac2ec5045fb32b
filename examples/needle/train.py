"""Train the needle model: a DeepSeek-V3-architecture transformer of 2 layers that answers questions over thousands of facts.

    python examples/needle/train.py --seconds 300

One GPU; on a CPU it only shows that it runs. Writes config.json, model.safetensors (bfloat16), generation_config.json, the
tokenizer and training.json (what was measured, with what) into --output.

A training sequence is "<bos>", facts "key number ;" and questions "key ? number ;"; the loss is on the numbers that answer.
It starts with 24 tokens and questions without the "?", which this model learns to answer in 3,000 steps; with the "?" from the start it
sits at "some number of this sequence" for 10,000 and more. Whenever more than 90 % of
a batch are right the longest length doubles, up to 6,144; every other batch is shorter, or the model forgets short contexts.
"""

import argparse
import copy
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from prompts import BOS, EOS, FIRST_KEY, FIRST_NUMBER, NUM_KEYS, NUM_NUMBERS, PAD, QUESTION, SEPARATOR, build_tokenizer, build_vocabulary
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

FIRST_LENGTH, LAST_LENGTH = 24, 6144  # tokens of a training sequence
CONTEXTS = (256, 1024, 2048, 4096, 4800)  # tokens of facts in a held-out sequence
TOKENS_PER_STEP, STEPS_PER_CHECK = 16384, 100
LEARNING_RATE, WARMUP_STEPS = 1e-3, 500


def build_config() -> DeepseekV3Config:
    """The architecture: two layers with dense MLPs (first_k_dense_replace) and full-rank queries."""
    return DeepseekV3Config(
        vocab_size=len(build_vocabulary()),
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=None,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
        intermediate_size=512,
        moe_intermediate_size=128,
        first_k_dense_replace=2,
        n_routed_experts=2,  # no layer has experts, but the field takes no zero
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
    )


def build_model(config: DeepseekV3Config, device: str) -> DeepseekV3ForCausalLM:
    """A fresh float32 model whose embeddings share a direction.

    The direction is essential: k_pe comes from the hidden state by a projection without bias, so with embeddings of mean zero
    the rotary logits say nothing about position, no head learns to look at the previous token, and accuracy stays at chance. Of the scales
    tried (0.1, 0.4, 0.5, 1) the largest was the fastest.
    """
    model = DeepseekV3ForCausalLM(config).to(device)
    with torch.no_grad():
        model.model.embed_tokens.weight.add_(torch.randn(config.hidden_size).to(device))
    return model


def make_batch(
    num_sequences: int, num_facts: int, num_queries: int, generator: torch.Generator, question_marks: bool = True
) -> tuple[Tensor, Tensor]:
    """Random sequences of facts followed by questions about them.

    Returns:
        ids [num_sequences, 1 + 3 num_facts + Q num_queries] int64 with Q = 4 tokens a question, 3 without its "?", and the positions
        [num_queries] int64 of the tokens that an answer follows, both on the generator's device.
    """
    device = generator.device
    # Distinct keys make the answer unique.
    keys = FIRST_KEY + torch.rand(num_sequences, NUM_KEYS, generator=generator, device=device).argsort(1)[:, :num_facts]
    numbers = FIRST_NUMBER + torch.randint(NUM_NUMBERS, keys.shape, generator=generator, device=device)
    asked = torch.randint(num_facts, (num_sequences, num_queries), generator=generator, device=device)
    key, number = keys.gather(1, asked), numbers.gather(1, asked)
    facts = torch.stack([keys, numbers, torch.full_like(keys, SEPARATOR)], -1)
    question = [key, torch.full_like(key, QUESTION)] if question_marks else [key]
    queries = torch.stack([*question, number, torch.full_like(key, SEPARATOR)], -1)
    bos = torch.full((num_sequences, 1), BOS, device=device)
    asked_at = 3 * num_facts + len(question) + queries.shape[-1] * torch.arange(num_queries, device=device)
    return torch.cat([bos, facts.flatten(1), queries.flatten(1)], 1), asked_at


def training_batch(length: int, rng: random.Random, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """make_batch with about TOKENS_PER_STEP tokens in sequences of at most length, 50-80 % of each in facts."""
    facts_share = rng.uniform(0.5, 0.8) if length > FIRST_LENGTH else 0.5
    num_facts = min(int(length * facts_share) // 3, NUM_KEYS)
    num_queries = (length - 1 - 3 * num_facts) // 4
    return make_batch(max(4, TOKENS_PER_STEP // length), num_facts, num_queries, generator, question_marks=length > FIRST_LENGTH)


def answer_logits(model: DeepseekV3ForCausalLM, ids: Tensor, asked_at: Tensor) -> Tensor:
    """Logits [B, Q, vocabulary] float32 at positions asked_at [Q] of ids [B, L]."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    return model.lm_head(hidden[:, asked_at]).float()


@torch.no_grad()
def accuracy(model: DeepseekV3ForCausalLM, context: int, num_sequences: int, seed: int) -> float:
    """Share of right answers over random sequences of context tokens of facts and 16 questions each, in the model's dtype."""
    generator = torch.Generator(model.device).manual_seed(seed)
    num_right = 0
    for _ in range(num_sequences):
        ids, asked_at = make_batch(1, context // 3, 16, generator)
        predicted = answer_logits(model, ids, asked_at).argmax(-1)
        num_right += int((predicted == ids[:, asked_at + 1]).sum())
    return num_right / (16 * num_sequences)


def to_bfloat16(model: DeepseekV3ForCausalLM) -> DeepseekV3ForCausalLM:
    """A copy with bfloat16 weights, as it will be saved; Module.to would round the rotary frequencies as well."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def train(model: DeepseekV3ForCausalLM, seconds: float, seed: int, num_sequences: int) -> dict[str, float]:
    """Train in place until the time is over or two checks in a row find every held-out answer right at all CONTEXTS.

    Returns:
        What it took: steps, seconds and the length of the last sequences.
    """
    device = model.device.type
    rng, generator = random.Random(seed), torch.Generator(device).manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    start, step, length, num_perfect = time.time(), 0, FIRST_LENGTH, 0
    while (elapsed := time.time() - start) < seconds and num_perfect < 2:
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1, (step + 1) / WARMUP_STEPS) * (1 if elapsed < 0.8 * seconds else 0.1)
        shorter = length if length == FIRST_LENGTH else round(max(2 * FIRST_LENGTH, FIRST_LENGTH * (length / FIRST_LENGTH) ** rng.random()))
        ids, asked_at = training_batch(length if step % 2 else shorter, rng, generator)
        targets = ids[:, asked_at + 1]
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = answer_logits(model, ids, asked_at)
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % STEPS_PER_CHECK:
            continue
        right = (logits.argmax(-1) == targets).float().mean().item()
        print(f"{time.time() - start:4.0f} s  step {step}  length {length}  loss {loss.item():.3f}  accuracy {right:.3f}", flush=True)
        if right > 0.9 and length < LAST_LENGTH:
            length *= 2
        elif right > 0.9:
            # Fresh sequences at each check: two perfect ones are twice the evidence.
            saved = to_bfloat16(model)
            held_out = [accuracy(saved, context, num_sequences, seed + step) for context in CONTEXTS]
            print(f"        held out {dict(zip(CONTEXTS, held_out, strict=True))}", flush=True)
            num_perfect = num_perfect + 1 if min(held_out) == 1 else 0
    return {"steps": step, "seconds": round(time.time() - start, 1), "last_length": length}


def measure(folder: Path, device: str, num_sequences: int) -> dict[str, dict[str, float]]:
    """Accuracy of the saved model at each of CONTEXTS, computing in bfloat16 and in float32."""
    accuracies: dict[str, dict[str, float]] = {}
    for name in ("bfloat16", "float32"):
        model = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=name).to(device).eval()
        accuracies[name] = {str(context): accuracy(model, context, num_sequences, seed=0) for context in CONTEXTS}
        print(f"saved model in {name}: {accuracies[name]}", flush=True)
    return accuracies


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the needle model.", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300, help="longest training time; it stops early when the model is perfect")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "model", help="folder to write")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse_options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    num_sequences = 64 if device == "cuda" else 1
    torch.manual_seed(options.seed)
    model = build_model(build_config(), device)
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
