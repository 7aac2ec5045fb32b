"""The demo: the same long prompts with the latent cache on 4 ranks and on one, side by side.

Runs `dcpmla generate` twice, as a user would, and compares what comes out.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from prompts import make_prompt

NUM_RANKS = 4
NUM_NEW_TOKENS = 8  # the first is the answer; the rest, which nobody trained, compares decode steps
TAIL = 36  # characters of a prompt shown


def make_prompts(num_prompts: int, seed: int) -> list[tuple[str, str]]:
    """Make prompts of 2,000 to 4,000 tokens with their answers, asking for facts from the first to the last."""
    rng = random.Random(seed)
    lengths = [rng.randrange(2000, 4001) for _ in range(num_prompts)]
    return [make_prompt(length, index / max(1, num_prompts - 1), rng) for index, length in enumerate(lengths)]


def generate(prompts: list[str], dcp_size: int, device: str) -> dict[str, Any]:
    """Answer prompts on NUM_RANKS ranks with the cache sharded dcp_size ways; returns the --json file's content."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "out.json"
        command = [sys.executable, "-m", "dcpmla", "generate", str(Path(__file__).parent / "model")]
        command += ["-tp", str(NUM_RANKS), "-dcp", str(dcp_size), "--max-new-tokens", str(NUM_NEW_TOKENS)]
        command += ["--timeout", "300"]  # the largest step takes most of a minute on two busy cores
        command += ["--dtype", "float32", "--device", device, "--json", str(output)]
        command += [option for prompt in prompts for option in ("--prompt", prompt)]
        print(f"\n=== tensor parallel {NUM_RANKS}, decode context parallel {dcp_size}", flush=True)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(output.read_text())


def report(prompts: list[tuple[str, str]], runs: dict[int, dict[str, Any]]) -> bool:
    """Print the comparison; returns whether every run gave the same answers."""
    texts = {size: [output["text"].split()[0] for output in run["outputs"]] for size, run in runs.items()}
    print(f"\n{'prompt':>{TAIL + 13}}   expected   " + "   ".join(f"DCP {size}" for size in runs))
    for index, (prompt, answer) in enumerate(prompts):
        num_tokens = len(next(iter(runs.values()))["outputs"][index]["prompt_token_ids"])
        answers = "     ".join(texts[size][index] for size in runs)
        print(f"{num_tokens} tokens ...{prompt[-TAIL:]}   {answer:>8}   {answers}")
    for size, run in runs.items():
        right = sum(text == answer for text, (_, answer) in zip(texts[size], prompts, strict=True))
        prefill, decode = (run[f"num_{step}_tokens"] / run[f"{step}_seconds"] for step in ("prefill", "decode"))
        print(f"\nDCP {size}: {right} of {len(prompts)} right; {NUM_RANKS} ranks on {run['device']}")
        print(f"  tokens/s: prefill {prefill:,.0f}, decode {decode:,.0f}")
        print(f"  KV tokens per rank: {run['kv_tokens_per_rank']}")
        print(f"  exchange backend: {run['dcp_comm_backend']} ({run['dcp_comm_backend_reason']})")
    tokens = [[output["token_ids"] for output in run["outputs"]] for run in runs.values()]
    same = all(other == tokens[0] for other in tokens)
    print(f"\nThe same {NUM_NEW_TOKENS} tokens for every prompt." if same else "\nThe tokens differ: this is a defect.")
    return same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="cpu", help="cuda needs 4 GPUs")
    args = parser.parse_args()
    prompts = make_prompts(args.num_prompts, args.seed)
    runs = {dcp_size: generate([prompt for prompt, _ in prompts], dcp_size, args.device) for dcp_size in (1, NUM_RANKS)}
    return 0 if report(prompts, runs) else 1


if __name__ == "__main__":
    sys.exit(main())
