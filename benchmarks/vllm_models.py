"""The models that `in_vllm.py` measures inside vLLM, and the options of their engines. Nothing here imports vLLM."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from dcpmla.bench.geometries import config_of

OURS = "CUSTOM"  # vLLM's name of this package's backend
VOCAB_SIZE = 16384
LOADS = ((1, 65536), (8, 65536), (32, 8192), (128, 8192))  # requests, cached tokens of each
LONG_LOADS = (*LOADS, (64, 131072))
# New tokens of one request, and its cached ones.
SHORT_PREFILLS = tuple((num_new, context) for context in (3584, 65536) for num_new in (1, 8, 64, 512))
PREFILLS = (*SHORT_PREFILLS, (1024, 3072), (8192, 0), (2048, 63488), (8192, 57344))
_V32_FIELDS = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
_FEW_EXPERTS = {"n_routed_experts": 16, "moe_intermediate_size": 512}  # The benchmark times attention alone.


class Variant(NamedTuple):
    """An engine, by vLLM's options.

    Attributes:
        backend: --attention-backend.
        exchange: --dcp-comm-backend, where ranks share a cache by vLLM's exchange.
        kv_cache_dtype: --kv-cache-dtype.
        shares: Whether ranks share a cache: --decode-context-parallel-size is their number, not 1.
    """

    backend: str
    exchange: str | None = None
    kv_cache_dtype: str = "auto"
    shares: bool = True


@dataclass(frozen=True)
class Model:
    """A model of published layer sizes with few layers and random weights.

    Attributes:
        name: Name in rows, and of --model.
        geometry: One of `dcpmla.bench.geometries`, whose fields it has.
        model_type, architecture: Names by which vLLM finds its class.
        num_layers: Layers of the stack.
        bytes_per_token: Bound on the bytes of a layer's cache for a token.
        whole, shared: Variants on one GPU and on several.
        fields: Fields of config.json that differ from the geometry's.
        loads: Decodes that are measured.
        block_size: --block-size.
        in_parts: Whether vLLM's layer is timed from queries to outputs; else its module, projections included.
    """

    name: str
    geometry: str
    model_type: str
    architecture: str
    num_layers: int
    bytes_per_token: int
    whole: tuple[Variant, ...]
    shared: tuple[Variant, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)
    loads: tuple[tuple[int, int], ...] = LOADS
    block_size: int = 64
    in_parts: bool = False

    def variants(self, num_ranks: int, backends: list[str] | None) -> list[Variant]:
        """Return the variants on so many GPUs, of some backends alone if they are listed."""
        variants = self.whole if num_ranks == 1 else self.shared
        return [variant for variant in variants if backends is None or variant.backend in backends]

    def save_config(self, directory: str) -> None:
        """Write config.json; transformers need not have a class for the model's type."""
        shared = {"num_hidden_layers": self.num_layers, "vocab_size": VOCAB_SIZE}
        fields = config_of(self.geometry, **shared, **self.fields).to_dict()
        fields |= {"model_type": self.model_type, "architectures": [self.architecture], "dtype": "bfloat16"}
        (Path(directory) / "config.json").write_text(json.dumps(fields))

    def engine_arguments(self, variant: Variant, num_ranks: int, directory: str) -> dict[str, Any]:
        """Return the arguments of vLLM's `LLM`."""
        batches = [batch for batch, _ in self.loads]
        longest = max(*(context for _, context in self.loads), *(num_new + context for num_new, context in PREFILLS))
        dcp_size = num_ranks if variant.shares else 1
        num_cached = max(batch * context for batch, context in self.loads) // dcp_size
        num_cached += 2 * self.block_size * max(batches)
        return {
            "model": directory,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "tensor_parallel_size": num_ranks,
            "decode_context_parallel_size": dcp_size,
            "distributed_executor_backend": "external_launcher",
            "attention_backend": variant.backend,
            "kv_cache_dtype": variant.kv_cache_dtype,
            "block_size": self.block_size,
            "max_model_len": longest + 4 * self.block_size,
            "max_num_seqs": max(batches),
            "max_num_batched_tokens": max(num_new for num_new, _ in PREFILLS),
            "kv_cache_memory_bytes": num_cached * self.num_layers * self.bytes_per_token,
            "gpu_memory_utilization": 0.1,  # has no effect, but this much must be free
            "enable_prefix_caching": False,
            "disable_custom_all_reduce": True,
            "compilation_config": {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": sorted(set(batches)),
            },
            "kernel_config": {"enable_jit_warmup": False},  # Calls that are not timed compile what the loads need.
            **({"dcp_comm_backend": variant.exchange} if variant.exchange else {}),
        }


def _v4(geometry: str, ratios: list[int]) -> Model:
    """Return a DeepSeek-V4 whose layers compress so many tokens each; vLLM has no DCP for it."""
    flash_mla = Variant("FLASHMLA_SPARSE_DSV4", kv_cache_dtype="fp8")
    return Model(
        geometry,
        geometry,
        "deepseek_v4",
        "DeepseekV4ForCausalLM",
        num_layers=len(ratios),
        bytes_per_token=320,
        whole=(Variant(OURS, kv_cache_dtype="fp8"), flash_mla),
        shared=(Variant(OURS, kv_cache_dtype="fp8"), flash_mla._replace(shares=False)),
        fields={"compress_ratios": ratios, "topk_method": "noaux_tc", **_FEW_EXPERTS},
        loads=LONG_LOADS,
        block_size=256,
    )


_DENSE = {
    "first_k_dense_replace": 4,
    "max_position_embeddings": 163840,
    "topk_method": "noaux_tc",  # vLLM asks for these two
    "scoring_func": "sigmoid",
}
_V32 = Model(
    "deepseek-v3.2",
    "deepseek-v3",
    "deepseek_v32",
    "DeepseekV32ForCausalLM",
    num_layers=4,
    bytes_per_token=1152 + 132 + 124,  # latents, keys of the index, what aligns pages
    whole=(
        *(Variant(name) for name in (OURS, "FLASH_ATTN_MLA_SPARSE", "FLASHMLA_SPARSE")),
        *(Variant(name, kv_cache_dtype="fp8_ds_mla") for name in (OURS, "FLASHMLA_SPARSE")),
    ),
    shared=(
        *(Variant(OURS, None, kind) for kind in ("auto", "fp8_ds_mla")),
        *(Variant("FLASHMLA_SPARSE", None, kind, shares=False) for kind in ("auto", "fp8_ds_mla")),
    ),
    fields=_DENSE | _V32_FIELDS,
)
_ALL = (
    Model(
        "deepseek-v3",
        "deepseek-v3",
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        num_layers=4,
        bytes_per_token=1152,
        whole=tuple(Variant(name) for name in (OURS, "FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA")),
        shared=(Variant(OURS), Variant("FLASH_ATTN_MLA", "ag_rs"), Variant("FLASH_ATTN_MLA", "a2a")),
        fields=_DENSE,
        in_parts=True,
    ),
    _V32,
    # A quarter of the heads: vLLM shares a cache of sparse MLA only where a rank has fewer than 32.
    replace(
        _V32,
        name="deepseek-v3.2-32-heads",
        whole=(),
        shared=(
            Variant(OURS, None, "fp8_ds_mla"),
            *(Variant("FLASHMLA_SPARSE", name, "fp8_ds_mla") for name in ("ag_rs", "a2a")),
            Variant("FLASHMLA_SPARSE", None, "fp8_ds_mla", shares=False),
        ),
        fields={**_V32.fields, "num_attention_heads": 32, "num_key_value_heads": 32},
    ),
    _v4("deepseek-v4-flash", [0, 0, 4, 128, 4, 128]),
    _v4("deepseek-v4-pro", [4, 128, 4, 128]),
)
MODELS = {model.name: model for model in _ALL}
