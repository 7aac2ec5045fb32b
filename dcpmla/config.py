"""The geometry of a model's attention (`MLAConfig`) and its distribution over ranks (`DCPConfig`)."""

import math
from dataclasses import dataclass

from dcpmla.fields import FLAG, TEXT, Rule, check_fields, even, number, one_of, option_label, optional, whole
from dcpmla.ownership import check_block_size

DCP_COMM_BACKENDS = ("auto", "ag_rs", "a2a", "direct")
DCP_EXCHANGE_DTYPES = ("auto", "fp8")
KV_CACHE_DTYPES = ("auto", "bf16", "fp8", "fp8_ds_mla")
DECODE_QUERY_DTYPES = ("auto", "fp8")
INDEX_CACHE_DTYPES = ("auto", "fp8")
MODEL_DTYPES = ("auto", "float32", "bfloat16", "float16")  # to compute in

LARGEST_SIZE = 1 << 24  # bound on any dim, vocabulary or block; more is a mistake that would run out of memory
_MOST_RANKS = 1 << 16
_SIZE = whole(1, LARGEST_SIZE)
_INDEXER_RULES = {"num_heads": _SIZE, "head_dim": _SIZE, "topk": _SIZE, "rope_interleaved": FLAG}
_MLA_RULES = {
    "hidden_size": _SIZE,
    "num_heads": _SIZE,
    "q_lora_rank": optional(_SIZE),
    "kv_lora_rank": _SIZE,
    "qk_nope_head_dim": _SIZE,
    "qk_rope_head_dim": even(LARGEST_SIZE),
    "v_head_dim": _SIZE,
    "scale": number(0, above=True),
    "rms_norm_eps": number(0),
    "rope_interleaved": FLAG,
    "use_rope": FLAG,
    "attention_bias": FLAG,
    "kv_lora_scale": number(0, above=True),
    "llama_4_scaling": optional(
        Rule(
            "a pair of a finite number of at least 0 and a whole number of at least 1",
            lambda value: (
                isinstance(value, tuple) and len(value) == 2 and number(0).holds(value[0]) and whole(1).holds(value[1])
            ),
        )
    ),
    "indexer": optional(Rule("an IndexerConfig", lambda value: isinstance(value, IndexerConfig))),
}


@dataclass(frozen=True, kw_only=True)
class IndexerConfig:
    """The geometry of the indexer, which selects the tokens that each token attends to in sparse MLA.

    Attributes:
        num_heads, head_dim: Sizes of the indexer's queries; its keys have one head.
        topk: Number of tokens selected, where more exist.
        rope_interleaved: Whether to rotate pairs (2i, 2i+1) (GLM-5) instead of halves (DeepSeek-V3.2) of the first
            qk_rope_head_dim dims.
    """

    num_heads: int
    head_dim: int
    topk: int
    rope_interleaved: bool

    def __post_init__(self) -> None:
        check_fields(_INDEXER_RULES, vars(self), "indexer.{}".format)


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Geometry and constants of one MLA layer, before any sharding.

    Attributes:
        scale: Factor of the attention scores; YaRN's mscale^2 and LongCat's query factor are folded in.
        rms_norm_eps: Epsilon of the norms of both latents (q_c, kv_c); other norms have their own.
        rope_interleaved: Whether to rotate pairs (2i, 2i+1) (GPT-J, DeepSeek) instead of halves (i, i + R/2) (NeoX).
        use_rope: False for a layer without positions (NoPE), which leaves q_pe and k_pe as they are projected.
        attention_bias: Whether q_a, kv_a and o projections have a bias.
        kv_lora_scale: Factor of kv_c after its norm (LongCat).
        llama_4_scaling: (beta, original_max_position) of the position-dependent query factor (Mistral 4), or None.
        indexer: Indexer of sparse MLA; None for dense MLA.
    """

    hidden_size: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    scale: float
    rms_norm_eps: float = 1e-6
    rope_interleaved: bool = True
    use_rope: bool = True
    attention_bias: bool = False
    kv_lora_scale: float = 1.0
    llama_4_scaling: tuple[float, int] | None = None
    indexer: IndexerConfig | None = None

    def __post_init__(self) -> None:
        check_fields(_MLA_RULES, vars(self))
        if self.indexer is not None and self.indexer.head_dim < self.qk_rope_head_dim:
            raise ValueError(
                f"indexer.head_dim is {self.indexer.head_dim}; it must be at least qk_rope_head_dim "
                f"{self.qk_rope_head_dim}"
            )

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def rope_dim(self) -> int:
        return self.qk_rope_head_dim

    @property
    def row_tokens(self) -> int:
        """1: a row of the cache is a token's."""
        return 1

    @property
    def latent_dim(self) -> int:
        """Width of a cache row: the latent and the rotated shared key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def heads_per_rank(self, tensor_parallel_size: int) -> int:
        """Return the number of heads of one TP rank.

        Raises:
            ValueError: The heads do not divide; the message lists sizes that do.
        """
        if tensor_parallel_size < 1 or self.num_heads % tensor_parallel_size:
            raise ValueError(
                f"tensor_parallel_size (-tp) is {tensor_parallel_size}; it must divide the model's "
                f"{self.num_heads} attention heads: "
                f"{choices(divisors(self.num_heads))}"
            )
        return self.num_heads // tensor_parallel_size


_DCP_RULES = {
    "tensor_parallel_size": whole(1, _MOST_RANKS),
    "decode_context_parallel_size": whole(1, _MOST_RANKS),
    "cp_kv_cache_interleave_size": whole(1, LARGEST_SIZE),
    "dcp_comm_backend": one_of(DCP_COMM_BACKENDS),
    "exchange_timeout": Rule("a finite number above 0, in seconds", number(0, above=True).holds),
    "check_exchange": FLAG,
    "dcp_exchange_dtype": one_of(DCP_EXCHANGE_DTYPES),
    "block_size": whole(1, LARGEST_SIZE),
    "kv_cache_dtype": one_of(KV_CACHE_DTYPES),
    "kv_cache_scale": optional(Rule("a normal float32 above 0", number(1e-37, 1e38).holds)),
    "calculate_kv_scales": FLAG,
    "decode_query_dtype": one_of(DECODE_QUERY_DTYPES),
    "index_cache_dtype": one_of(INDEX_CACHE_DTYPES),
    "index_hadamard": FLAG,
    "attention_backend": TEXT,
    "prefill_backend": TEXT,
    "context_workspace_tokens": whole(1),
    "dcp_q_replicate": FLAG,
    "dcp_project_before_merge": FLAG,
}
_OPTIONS = {
    "tensor_parallel_size": "-tp",
    "decode_context_parallel_size": "-dcp",
    "exchange_timeout": "--dcp-exchange-timeout",
}


def _dcp_label(name: str) -> str:
    """Return a field's name with the option that sets it; the workspace has no option."""
    if name == "context_workspace_tokens":
        return name
    return f"{name} ({_OPTIONS[name]})" if name in _OPTIONS else option_label(name)


@dataclass(frozen=True, kw_only=True)
class DCPConfig:
    """How the latent cache is spread over the ranks of a TP group. Field names are vLLM's option names.

    Attributes:
        cp_kv_cache_interleave_size: I, number of consecutive tokens on one rank before the next rank's.
        dcp_comm_backend: "ag_rs" or "a2a" (collectives), "direct" (stores over NVLink), or "auto" to choose.
        exchange_timeout: Seconds that `direct` waits on the device for a rank's part of an exchange.
        check_exchange: Whether to compare the ranks' calls of the exchange before they are made (`CheckedExchange`):
            slow, for finding bugs.
        dcp_exchange_dtype: Format of decode's rows in transit: "auto" unchanged, "fp8" e4m3 with scales (`direct`).
        block_size: Tokens of one cache block on one rank.
        kv_cache_dtype: Format of the cache (`dcpmla.cache.formats`): "auto" is the model's dtype, "bf16" the same
            for models in bfloat16; "fp8_e4m3" is another name of "fp8".
        kv_cache_scale: Scale of an fp8 cache, latents over cached values; None takes the checkpoint's, or else 1.
        calculate_kv_scales: Whether to calculate scales of an fp8 cache and fp8 queries from the first prompt instead.
        index_cache_dtype: Format of the index cache of sparse MLA (`dcpmla.cache.index_keys`): "auto" is the
            model's dtype; "fp8" takes half the memory, and rounds the indexer's queries, too.
        index_hadamard: Whether to apply a Hadamard transform to the indexer's keys and queries before they are
            rounded.
        decode_query_dtype: "fp8" rounds decode's queries to e4m3 before they are gathered, so that the products of
            attention over an fp8 cache are fp8's; "auto" leaves them in the model's dtype.
        attention_backend, prefill_backend: Names of the backends that run decode's and prefill's attention
            (`dcpmla.attention.backends`); "auto" takes the first that can.
        context_workspace_tokens: Upper bound on the cached tokens, or entries (DeepSeek-V4), that one step of chunked
            prefill gathers at a time.
        dcp_q_replicate: Whether each rank holds the query projection of all its DCP group's heads, so that decode
            gathers no queries. Costs memory, and dcp times the query's arithmetic in decode.
        dcp_project_before_merge: Whether decode applies W_UV before the merge, so that exchanged rows have v_head_dim
            columns, not kv_lora_rank, in steps with enough tokens to pay for W_UV of all the group's heads. Costs
            memory.
    Raises:
        ValueError: A field has another type or is outside its range, sizes do not divide, options exclude each other,
            or the workspace is smaller than one aligned chunk.
    """

    tensor_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    cp_kv_cache_interleave_size: int = 1
    dcp_comm_backend: str = "auto"
    exchange_timeout: float = 60.0
    check_exchange: bool = False
    dcp_exchange_dtype: str = "auto"
    block_size: int = 64
    kv_cache_dtype: str = "auto"
    kv_cache_scale: float | None = None
    calculate_kv_scales: bool = False
    decode_query_dtype: str = "auto"
    index_cache_dtype: str = "auto"
    index_hadamard: bool = False
    attention_backend: str = "auto"
    prefill_backend: str = "auto"
    context_workspace_tokens: int = 65536
    dcp_q_replicate: bool = False
    dcp_project_before_merge: bool = False

    def __post_init__(self) -> None:
        if self.kv_cache_dtype == "fp8_e4m3":
            object.__setattr__(self, "kv_cache_dtype", "fp8")
        check_fields(_DCP_RULES, vars(self), _dcp_label)
        tp, dcp = self.tensor_parallel_size, self.decode_context_parallel_size
        if tp % dcp:
            raise ValueError(
                f"decode_context_parallel_size (-dcp) is {dcp}; it must divide tensor_parallel_size (-tp) {tp}: "
                f"{choices(divisors(tp))}"
            )
        check_block_size(self.block_size, self.cp_kv_cache_interleave_size)
        if self.dcp_exchange_dtype == "fp8" and self.dcp_comm_backend not in ("auto", "direct"):
            raise ValueError(
                "dcp_exchange_dtype (--dcp-exchange-dtype) is 'fp8', but dcp_comm_backend (--dcp-comm-backend) "
                f"{self.dcp_comm_backend!r} "
                f"carries rows as they are; choose auto or direct"
            )
        self._check_cache_format()
        if self.context_workspace_tokens < self.chunk_alignment:
            raise ValueError(
                f"context_workspace_tokens is {self.context_workspace_tokens}; "
                f"a context chunk needs at least lcm(block_size, dcp x interleave) = {self.chunk_alignment}"
            )

    def _check_cache_format(self) -> None:
        if self.kv_cache_scale is not None and self.calculate_kv_scales:
            raise ValueError(
                f"kv_cache_scale (--kv-cache-scale) is {self.kv_cache_scale}, but calculate_kv_scales "
                "(--calculate-kv-scales) asks to find "
                f"one; give one of them"
            )
        asked = (
            ("kv_cache_scale (--kv-cache-scale)", self.kv_cache_scale is not None),
            ("calculate_kv_scales (--calculate-kv-scales)", self.calculate_kv_scales),
            ("decode_query_dtype (--decode-query-dtype) fp8", self.decode_query_dtype == "fp8"),
        )
        for name, is_asked in asked:
            if is_asked and self.kv_cache_dtype != "fp8":
                raise ValueError(
                    f"{name} goes with kv_cache_dtype (--kv-cache-dtype) fp8, not with {self.kv_cache_dtype!r}"
                )

    @property
    def chunk_alignment(self) -> int:
        """Context chunks are multiples of this, so that every rank's part of a chunk starts at the same local index."""
        return math.lcm(self.block_size, self.decode_context_parallel_size * self.cp_kv_cache_interleave_size)

    @property
    def virtual_block_size(self) -> int:
        """Positions that one block id covers: block_size on each of the DCP ranks."""
        return self.block_size * self.decode_context_parallel_size


def divisors(number: int) -> list[int]:
    """Return every size from 1 to `number` that divides it."""
    return [size for size in range(1, number + 1) if number % size == 0]


def choices(values: list[int] | tuple[str, ...]) -> str:
    """Return the words that offer values in an error message: "choose 1, 2 or 4"."""
    return (
        "choose " + ", ".join(map(str, values[:-1])) + f" or {values[-1]}" if len(values) > 1 else f"choose {values[0]}"
    )
