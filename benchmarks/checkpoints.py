"""Random weights with published layer sizes: `python benchmarks/checkpoints.py --geometry deepseek-v3 --layers 4
--experts 16 DIR`.

bfloat16, in the names that published checkpoints have, a shard for each layer; on a GPU if there is one, so that it
takes seconds. Only the number of layers, of experts and of words is smaller than the published models'.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from dcpmla.bench.geometries import config_of

# All experts of a layer in one tensor, as transformers holds them.
_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")


def v2_lite(num_layers: int, num_experts: int) -> Any:
    """Return DeepSeek-V2-Lite's config with fewer layers, experts and words."""
    return _smaller("v2-lite", num_layers, num_experts, vocab_size=8192, initializer_range=0.05)


def deepseek_v3(num_layers: int, num_experts: int) -> Any:
    """Return DeepSeek-V3's config with fewer layers, experts and words; only the first layer is dense."""
    return _smaller("deepseek-v3", num_layers, num_experts, vocab_size=16384, first_k_dense_replace=1)


def _smaller(geometry: str, num_layers: int, num_experts: int, **changes: Any) -> Any:
    sizes = {"num_hidden_layers": num_layers, "n_routed_experts": num_experts, "max_position_embeddings": 131072}
    return config_of(geometry, **sizes, eos_token_id=None, **changes)


_GEOMETRIES: dict[str, Callable[[int, int], Any]] = {"v2-lite": v2_lite, "deepseek-v3": deepseek_v3}


def save_random(config: Any, directory: Path, seed: int = 0) -> int:
    """Write a checkpoint for a transformers config of DeepSeek's families; returns its bytes."""
    generator = torch.Generator("cuda" if torch.cuda.is_available() else "cpu").manual_seed(seed)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    config.architectures, config.dtype = [type(model).__name__], torch.bfloat16
    directory.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(directory)
    shards: dict[str, dict[str, Tensor]] = {}
    for name, tensor in model.state_dict().items():
        layer = re.search(r"\.layers\.(\d+)\.", name)
        shards.setdefault(f"model-layer-{int(layer[1]):03}.safetensors" if layer else "model-rest.safetensors", {})[
            name
        ] = tensor
    weight_map, num_bytes = {}, 0
    for file, tensors in shards.items():
        weights = {
            published: _draw(published, shape, config.initializer_range, generator)
            for name, tensor in tensors.items()
            for published, shape in _published(name, tuple(tensor.shape))
        }
        save_file(weights, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(weights, file)
        num_bytes += sum(weight.nbytes for weight in weights.values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return num_bytes


def _published(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the published names and shapes of a parameter: a matrix for each expert and projection."""
    experts = _EXPERTS.fullmatch(name)
    if experts is None:
        yield name, shape
        return
    num_experts, rows, columns = shape
    projections = ["gate_proj", "up_proj"] if experts[2] == "gate_up_proj" else ["down_proj"]
    for expert in range(num_experts):
        for projection in projections:
            yield f"{experts[1]}.{expert}.{projection}.weight", (rows // len(projections), columns)


def _draw(name: str, shape: tuple[int, ...], std: float, generator: torch.Generator) -> Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.bfloat16)
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=torch.float32 if name.endswith("correction_bias") else torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16, device=generator.device).normal_(std=std, generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--geometry", choices=tuple(_GEOMETRIES), required=True)
    parser.add_argument(
        "--layers", type=int, default=4, metavar="L", help="the first is dense, the others have experts"
    )
    parser.add_argument("--experts", type=int, default=16, metavar="E", help="routed experts of a layer")
    args = parser.parse_args()
    if args.layers < 1 or args.experts < 16 or args.experts % 16:  # V3's router wants two or more in each of 8 groups
        parser.error(f"--layers is {args.layers} and --experts {args.experts}; give at least 1, and a multiple of 16")
    num_bytes = save_random(_GEOMETRIES[args.geometry](args.layers, args.experts), args.directory)
    print(f"{args.directory}: {num_bytes / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
