"""Train an EAGLE3 head for the chat model: one layer with MLA that drafts from three of the model's layers.

    python examples/chat/train_eagle3.py

On one CPU core, in minutes. Writes config.json, model.safetensors (bfloat16, in the names of published heads) and
training.json (what was measured, with what) into --output. Measured is how many drafts in a row the model would take,
by the head and by the lookup of n-grams, in conversations of words that training leaves out.

The head learns the model's own best tokens after conversations like those of the model's training. As in EAGLE-3's
training-time test it also learns the drafts after its own drafts: pass j of a batch takes its hidden states from pass
j - 1, and each position attends to the first pass up to the draft's beginning, and to the passes in between.
"""

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from conversations import conversations
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from train_chat import Batch, batches, encode
from transformers import DeepseekV3ForCausalLM
from words import Words

HERE = Path(__file__).parent
INPUTS = 2, 4, 5  # layers whose inputs the head takes
NUM_DRAFTS = 3
DRAFT_VOCAB = 1024
LEARNING_RATE, WARMUP_STEPS = 3e-3, 50
DECAY = 0.8  # of the loss, from a draft to the next
OTHERS_SHARE = 0.1  # tokens that are not the assistant's: how many count
STEPS_PER_REPORT = 50


class Head(nn.Module):
    """The head in float32, whose parameters have the names of published heads.

    Args:
        model: Model that it drafts for, whose sizes it has.
        tokens: Tokens of the draft's vocabulary, ascending.
    """

    def __init__(self, model: DeepseekV3ForCausalLM, tokens: Tensor) -> None:
        super().__init__()
        config = self.config = model.config
        size, heads = config.hidden_size, config.num_attention_heads
        self.embedding, self.rotary = model.model.embed_tokens.weight.detach(), model.model.rotary_emb
        self.tokens, self.numbers = tokens, torch.full((config.vocab_size,), -100)
        self.numbers[tokens] = torch.arange(len(tokens))
        self.fc = nn.Linear(len(INPUTS) * size, size, bias=False)
        self.midlayer: Any = nn.ModuleDict({name: nn.RMSNorm(size, eps=config.rms_norm_eps) for name in _NORMS})
        self.midlayer["self_attn"] = nn.ModuleDict(
            {
                "q_proj": nn.Linear(2 * size, heads * config.qk_head_dim, bias=False),
                "kv_a_proj_with_mqa": nn.Linear(2 * size, config.kv_lora_rank + config.qk_rope_head_dim, bias=False),
                "kv_a_layernorm": nn.RMSNorm(config.kv_lora_rank, eps=1e-6),
                "kv_b_proj": nn.Linear(
                    config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim), bias=False
                ),
                "o_proj": nn.Linear(heads * config.v_head_dim, size, bias=False),
            }
        )
        sizes = {"gate_proj": (size, 2 * size), "up_proj": (size, 2 * size), "down_proj": (2 * size, size)}
        self.midlayer["mlp"] = nn.ModuleDict({name: nn.Linear(*shape, bias=False) for name, shape in sizes.items()})
        self.norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(size, len(tokens), bias=False)
        self.lm_head.weight.data = model.lm_head.weight.data[tokens].clone()

    def forward(self, ids: Tensor, layers: Tensor) -> list[Tensor]:
        """Return the logits [B, T - 1, draft vocab] of each pass: at position p of token p + 2.

        Args:
            ids: [B, T] int64.
            layers: Hidden states of the model's layers side by side [B, T, 3 hidden].
        """
        embedded = self.midlayer["input_layernorm"](F.embedding(ids[:, 1:], self.embedding))
        states, passes, logits = self.fc(layers[:, :-1]), list[tuple[Tensor, Tensor]](), list[Tensor]()
        cos, sin = self.rotary(states, torch.arange(states.shape[1])[None])
        for _ in range(NUM_DRAFTS):
            x = torch.cat([embedded, self.midlayer["hidden_norm"](states)], -1)
            states = states + self._attend(x, cos, sin, passes)
            states = states + self._mlp(self.midlayer["post_attention_layernorm"](states))
            logits.append(self.lm_head(self.norm(states)))
            states = F.pad(states, (0, 0, 1, 0))[:, :-1]  # of the position before
        return logits

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor, passes: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Attend to the first pass up to the draft's beginning, and to one position of each later pass."""
        attention, config, number = self.midlayer["self_attn"], self.config, len(passes)
        nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        q = attention["q_proj"](x).unflatten(-1, (-1, nope + rope)).transpose(1, 2)
        latent, k_pe = attention["kv_a_proj_with_mqa"](x).split([config.kv_lora_rank, rope], -1)
        kv = attention["kv_b_proj"](attention["kv_a_layernorm"](latent)).unflatten(-1, (q.shape[1], -1)).transpose(1, 2)
        k_pe = _rotate(k_pe[:, None], cos, sin).expand(-1, q.shape[1], -1, -1)
        q = torch.cat([q[..., :nope], _rotate(q[..., nope:], cos, sin)], -1)
        passes.append((torch.cat([kv[..., :nope], k_pe], -1), kv[..., nope:]))
        length = q.shape[2]
        (keys, values), later = passes[0], [_shifted(each, number - 1 - at) for at, each in enumerate(passes[1:])]
        is_hidden = torch.ones(length, length, dtype=torch.bool).triu(1 - number)
        scores = [(q @ keys.mT).masked_fill(is_hidden, -1e9), *((q * key).sum(-1, keepdim=True) for key, _ in later)]
        weights = (torch.cat(scores, -1) * (nope + rope) ** -0.5).softmax(-1)
        out = weights[..., :length] @ values
        for at, (_, value) in enumerate(later):
            out = out + weights[..., length + at, None] * value
        attended: Tensor = attention["o_proj"](out.transpose(1, 2).flatten(2))
        return attended

    def _mlp(self, x: Tensor) -> Tensor:
        mlp = self.midlayer["mlp"]
        out: Tensor = mlp["down_proj"](F.silu(mlp["gate_proj"](x)) * mlp["up_proj"](x))
        return out

    def save(self, folder: Path) -> None:
        """Write the head as heads are published, with the model's embedding."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {name: getattr(self.config, name) for name in _FIELDS}
        config |= {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "num_hidden_layers": 1, "dtype": "bfloat16"}
        config |= {"intermediate_size": 2 * self.config.hidden_size, "draft_vocab_size": len(self.tokens)}
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(INPUTS)}
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        tensors = {name: parameter.detach().bfloat16() for name, parameter in self.named_parameters()}
        tensors["d2t"] = self.tokens - torch.arange(len(self.tokens))
        tensors["t2d"] = self.numbers >= 0
        save_file(tensors, folder / "model.safetensors")


_NORMS = "input_layernorm", "hidden_norm", "post_attention_layernorm"
_FIELDS = (  # of the model's config, which the head's has, too
    *("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
    *("v_head_dim", "rms_norm_eps", "vocab_size", "max_position_embeddings", "rope_parameters", "model_type"),
    "hidden_act",
)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of neighbours [..., T, R] by angles [1, T, R], whose second half repeats the first."""
    half = x.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., :half]
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)


def _shifted(kv: tuple[Tensor, Tensor], distance: int) -> tuple[Tensor, Tensor]:
    """Return keys and values [B, h, T, D] of the positions `distance` earlier."""
    keys, values = (F.pad(part, (0, 0, distance, 0))[:, :, : part.shape[2]] for part in kv)
    return keys, values


@torch.no_grad()
def observe(model: DeepseekV3ForCausalLM, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inputs of the head [B, T, 3 hidden], and the model's best next tokens [B, T]."""
    output = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    return torch.cat([output.hidden_states[number] for number in INPUTS], -1).float(), output.logits.argmax(-1)


def loss_of(head: Head, model: DeepseekV3ForCausalLM, batch: Batch) -> tuple[Tensor, list[float]]:
    """Return the loss on a batch, and the share of each pass's drafts for the assistant's tokens that are right."""
    layers, best = observe(model, batch.ids)
    targets, answered = head.numbers[best[:, 1:]], F.pad(batch.answered[:, 1:], (0, 1))
    counted = answered | (torch.rand(answered.shape) < OTHERS_SHARE)
    loss, right = torch.zeros(()), []
    for number, logits in enumerate(head(batch.ids, layers)):
        chosen = counted.clone()
        chosen[:, :number] = False
        labels = targets[chosen]
        loss = loss + DECAY**number * F.cross_entropy(logits[chosen], labels, ignore_index=-100)
        right.append((logits.argmax(-1) == targets)[answered].float().mean().item())
    return loss, right


def frequent_tokens(tokenizer: Any, words: Words) -> Tensor:
    """Return the most frequent tokens of conversations, ascending."""
    counts = Counter(token for ids in encode(tokenizer, list(islice(conversations(words, 1.0), 2000))) for token in ids)
    others = (token for token in range(len(tokenizer)) if token not in counts)
    tokens = [token for token, _ in counts.most_common(DRAFT_VOCAB)]
    return torch.tensor(sorted([*tokens, *islice(others, DRAFT_VOCAB - len(tokens))]))


def train(model: DeepseekV3ForCausalLM, tokenizer: Any, num_steps: int, seed: int) -> Head:
    """Train a head for a number of steps of about 2,000 tokens."""
    words = Words(random.Random(seed))
    head = Head(model, frequent_tokens(tokenizer, words))
    optimizer = torch.optim.AdamW(head.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    step, start, shares = 0, time.time(), list[list[float]]()
    while step < num_steps:
        for batch in islice(batches(tokenizer, words, 1.0), num_steps - step):
            rate = LEARNING_RATE * min(1, (step + 1) / WARMUP_STEPS, 0.02 + 2 * (1 - step / num_steps))
            optimizer.param_groups[0]["lr"] = rate
            loss, right = loss_of(head, model, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step, shares = step + 1, [*shares, right]
            if step % STEPS_PER_REPORT == 0:
                means = [sum(column) / len(shares) for column in zip(*shares, strict=True)]
                right_drafts = ", ".join(f"{mean:.3f}" for mean in means)
                print(f"{time.time() - start:5.0f} s  step {step}  right drafts {right_drafts}", flush=True)
                shares = []
    return head


def held_out_prompts(tokenizer: Any, seed: int, num_prompts: int) -> list[list[int]]:
    """Return conversations of words that training leaves out, up to the assistant's last turn."""
    talks = list(islice(conversations(Words(random.Random(seed), held_out=True), 1.0), num_prompts))
    return [
        tokenizer.apply_chat_template(
            talk.messages[:-1], tools=talk.schemas(), add_generation_prompt=True, return_dict=False
        )
        for talk in talks
    ]


def measure(directory: Path, head: Path, prompts: Sequence[Sequence[int]], method: str) -> dict[str, Any]:
    """Return the tokens of a step with drafts, and the share of steps with drafts that take each of them."""
    from dcpmla import LLM, SamplingParams

    drafts: dict[str, Any] = {"speculative_method": method, "num_speculative_tokens": NUM_DRAFTS}
    drafts |= {"speculative_model": str(head)} if method == "eagle3" else {}
    with LLM(str(directory), dtype="float32", enable_prefix_caching=False, **drafts) as llm:
        llm.engine.speculation.drafter.drafts_always = True
        llm.generate([list(prompt) for prompt in prompts], SamplingParams(max_new_tokens=48))
        stats = llm.engine.stats
    shares = [round(number / stats.num_drafts, 3) for number in stats.num_accepted_at]
    return {
        "tokens_a_step": round(1 + stats.num_accepted_tokens / stats.num_drafts, 3),
        "accepted_at": shares,
        "steps_with_drafts": stats.num_drafts,
        "new_tokens": stats.num_new_tokens,
    }


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train an EAGLE3 head for the chat model.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="training steps of about 2,000 tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, default=HERE / "model", help="folder of the chat model")
    parser.add_argument("--output", type=Path, default=HERE / "eagle3", help="folder to write")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse_options()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    model = DeepseekV3ForCausalLM.from_pretrained(options.model, dtype="float32", attn_implementation="sdpa").eval()
    train(model, tokenizer, options.steps, options.seed).save(options.output)
    seconds = round(time.process_time())
    prompts = held_out_prompts(tokenizer, options.seed + 1, 200)
    measured = {method: measure(options.model, options.output, prompts, method) for method in ("eagle3", "ngram")}
    report = {
        "held out": measured,
        "options": {"steps": options.steps, "seed": options.seed},
        "cpu_seconds": seconds,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    (options.output / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
