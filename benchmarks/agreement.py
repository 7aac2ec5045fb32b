"""Agreement of `dcpmla generate` in bfloat16 with the unsharded model, per DCP size and exchange.

Two models: the needle model (does it still answer right?), and DeepSeek-V2-Lite's geometry with random weights in a
few layers (do logits and greedy tokens stay?). The unsharded model is transformers' own in bfloat16 on one GPU, fed
with the same tokens; its distance from float32 is the yardstick. Random weights make near-ties, so tokens may differ
there without anything being wrong.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

ROOT = Path(__file__).parents[1]
NEEDLE = ROOT / "examples" / "needle"
sys.path[:0] = [str(ROOT), str(NEEDLE)]
from checkpoints import save_random, v2_lite  # noqa: E402
from prompts import make_prompt  # noqa: E402

from dcpmla.bench.results import add_commit_argument, write_results  # noqa: E402


def needle_prompts(num_prompts: int) -> tuple[list[list[int]], list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(NEEDLE / "model")
    rng = random.Random(1)
    pairs = [make_prompt(rng.randrange(2000, 4801), index / (num_prompts - 1), rng) for index in range(num_prompts)]
    return [tokenizer(prompt)["input_ids"] for prompt, _ in pairs], [
        tokenizer(answer)["input_ids"][1] for _, answer in pairs
    ]


def random_prompts(num_prompts: int) -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(1, 8192) for _ in range(rng.randrange(500, 3000))] for _ in range(num_prompts)]


def generate(
    model: Path, prompts: list[list[int]], num_new: int, num_ranks: int, dcp: int, backend: str
) -> tuple[list[list[int]], list[Any]]:
    """Return the new tokens and their logits [num_new, vocab] of each prompt, by the command line in bfloat16."""
    with tempfile.TemporaryDirectory() as directory:
        out, logits = Path(directory) / "out.json", Path(directory) / "out.npz"
        launch = f"-m torch.distributed.run --standalone --nproc-per-node {num_ranks} -m dcpmla generate"
        layout = f"-tp {num_ranks} -dcp {dcp} --dcp-comm-backend {backend} --dtype bfloat16 --device cuda"
        command = [sys.executable, *launch.split(), *layout.split(), "--model", str(model)]
        command += ["--max-new-tokens", str(num_new), "--json", str(out), "--logits", str(logits)]
        command += [option for prompt in prompts for option in ("--prompt-ids", ",".join(map(str, prompt)))]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        arrays = np.load(logits)
        tokens = [output["token_ids"] for output in json.loads(out.read_text())["outputs"]]
        return tokens, [torch.from_numpy(arrays[f"logits_{index}"]) for index in range(len(prompts))]


@torch.inference_mode()
def unsharded(model: Path, prompts: list[list[int]], tokens: list[list[int]], dtype: torch.dtype) -> list[Any]:
    """Return transformers' logits [num_new, vocab] at the positions of the new tokens, which it is fed as well."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype, device_map="cuda").eval()
    logits = []
    for prompt, new in zip(prompts, tokens, strict=True):
        ids = torch.tensor([prompt + new[:-1]], device="cuda")
        logits.append(reference(ids, logits_to_keep=len(new), use_cache=False).logits[0].float().cpu())
    return logits


def compare(ours: list[Any], tokens: list[list[int]], bf16: list[Any], fp32: list[Any]) -> dict[str, float]:
    """Return the agreement of greedy tokens with the unsharded runs, and distances of logits: root mean squares over
    that of the float32 logits.
    """

    def distance(left: list[Any], right: list[Any]) -> float:
        return float((torch.cat(left) - torch.cat(right)).norm() / torch.cat(fp32).norm())

    def agreement(logits: list[Any], expected: Any) -> float:
        return float((torch.cat(logits).argmax(-1) == expected).float().mean())

    new = torch.tensor([token for each in tokens for token in each])
    return {
        "tokens_as_unsharded_bf16": agreement(bf16, new),
        "tokens_as_unsharded_fp32": agreement(fp32, new),
        "unsharded_bf16_tokens_as_fp32": agreement(bf16, torch.cat(fp32).argmax(-1)),
        "logits_from_fp32": distance(ours, fp32),
        "unsharded_bf16_logits_from_fp32": distance(bf16, fp32),
        "logits_from_unsharded_bf16": distance(ours, bf16),
    }


def measure(
    name: str, model: Path, prompts: list[list[int]], num_new: int, num_gpus: int, answers: list[int] | None
) -> list[dict[str, Any]]:
    rows = []
    for dcp, backend in [(1, "auto"), *((num_gpus, backend) for backend in ("ag_rs", "a2a"))]:
        tokens, logits = generate(model, prompts, num_new, num_gpus, dcp, backend)
        row: dict[str, Any] = {"model": name, "tp": num_gpus, "dcp": dcp, "exchange": backend}
        row |= {"num_prompts": len(prompts), "tokens": sum(map(len, tokens))}
        if answers is not None:
            row["accuracy"] = sum(new[0] == answer for new, answer in zip(tokens, answers, strict=True)) / len(answers)
        bf16, fp32 = (unsharded(model, prompts, tokens, dtype) for dtype in (torch.bfloat16, torch.float32))
        rows.append(row | compare(logits, tokens, bf16, fp32))
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-gpus", type=int, required=True)
    add_commit_argument(parser)
    parser.add_argument("--output", type=Path, default=None, help="default: benchmarks/results/h200xN/agreement.json")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    prompts, answers = needle_prompts(64)
    rows = measure("needle", NEEDLE / "model", prompts, 1, args.num_gpus, answers)
    with tempfile.TemporaryDirectory() as directory:
        save_random(v2_lite(num_layers=4, num_experts=16), Path(directory))
        rows += measure(
            "v2-lite geometry, 4 layers, random", Path(directory), random_prompts(8), 32, args.num_gpus, None
        )
    output = args.output or ROOT / "benchmarks" / "results" / f"h200x{args.num_gpus}" / "agreement.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    write_results(output, rows, args.num_gpus, torch.device("cuda"), args.commit)


if __name__ == "__main__":
    main()
