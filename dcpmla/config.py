"""The geometry of a model's attention (`MLAConfig`) and its distribution over ranks (`DCPConfig`)."""

import math
from dataclasses import dataclass
from typing import Annotated

from dcpmla.fields import (
    EVEN_SIZE,
    SIZE,
    TEXT,
    Flag,
    Rule,
    Size,
    check_fields,
    check_tp_size,
    choices,
    divisors,
    instance_of,
    number,
    one_of,
    option_label,
    optional,
    rules_of,
    whole,
)
from dcpmla.indexer_config import IndexerConfig
from dcpmla.ownership import NUM_TILE_LANES, TILE, Owner, check_block_size

DCP_COMM_BACKENDS = ("auto", "ag_rs", "a2a", "direct")
DCP_EXCHANGE_DTYPES = ("auto", "fp8")
KV_CACHE_DTYPES = ("auto", "bf16", "fp8", "fp8_ds_mla")
KV_CACHE_ALIASES = {"bfloat16": "bf16", "fp8_e4m3": "fp8"}  # vLLM's names
DECODE_QUERY_DTYPES = ("auto", "fp8")
INDEX_CACHE_DTYPES = ("auto", "fp8")
MODEL_DTYPES = ("auto", "float32", "bfloat16", "float16")  # to compute in

_OptionalSize = Annotated[int | None, optional(SIZE)]
_Ranks = Annotated[int, whole(1, 1 << 16)]
_Text = Annotated[str, TEXT]
_Factor = Annotated[float, number(0, above=True)]
_Seconds = Annotated[float, Rule("a finite number above 0, in seconds", number(0, above=True).holds)]
_Scale = Annotated[float | None, optional(Rule("a normal float32 above 0", number(1e-37, 1e38).holds))]
_SCALING = Rule(
    "a pair of a finite number of at least 0 and a whole number of at least 1",
    lambda value: (
        isinstance(value, tuple) and len(value) == 2 and number(0).holds(value[0]) and whole(1).holds(value[1])
    ),
)


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Geometry and constants of one MLA layer, before any sharding.

    Attributes:
        softmax_scale: Factor of the attention scores. It includes YaRN's mscale^2 and LongCat's factor of queries.
        rms_norm_eps: Epsilon of the norms of both latents (q_c, kv_c); other norms have their own.
        rope_interleaved: Whether to rotate pairs (2i, 2i+1) (GPT-J, DeepSeek) instead of halves (i, i + R/2) (NeoX).
        use_rope: False for a layer without positions (NoPE), which leaves q_pe and k_pe as they are projected.
        projects_pe: False for a layer without q_pe and k_pe (NoPE in Mistral Large 4): both are zeros in cached rows.
        attention_bias: Whether q_a, kv_a and o projections have a bias.
        kv_lora_scale: Factor of kv_c after its norm; 1 except in LongCat.
        llama_4_scaling: (beta, original_max_position): queries at position p are multiplied by
            1 + beta ln(1 + floor(p / original_max_position)) (Mistral 4, after Llama 4); None for no such factor.
        has_query_factors: Whether queries at position p, an indexer's too, are multiplied by
            scale * ln(p + 1) + bias, two numbers learned for each head (Mistral Large 4).
        indexer: Indexer of sparse MLA; None for dense MLA.
        has_sinks: Whether each head has a learned sink (`dcpmla.attention.output.sinks`).
        window: Number of tokens that a token attends to, the last ones, in a layer without an indexer; None for all.
        norms_k_pe: Whether k_pe is normalized before RoPE, as kv_c is (dots3).
        num_gates: Number of gates that hidden states give for a head's output: none, one, or one for each column.
        query_gates: Whether the query projection also makes a gate's logit for each column of the output (A.X-K2). Its
            input then has 2 Lq columns: the query latent after its norm, beside the query latent before the norm.
        input_parts: Number of hidden states, side by side, that a token's input consists of: 2 in EAGLE3 heads.
    """

    hidden_size: Size
    num_heads: Size
    q_lora_rank: _OptionalSize
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Annotated[int, EVEN_SIZE]
    v_head_dim: Size
    softmax_scale: _Factor
    rms_norm_eps: Annotated[float, number(0)] = 1e-6
    rope_interleaved: Flag = True
    use_rope: Flag = True
    projects_pe: Flag = True
    attention_bias: Flag = False
    kv_lora_scale: _Factor = 1.0
    llama_4_scaling: Annotated[tuple[float, int] | None, optional(_SCALING)] = None
    has_query_factors: Flag = False
    indexer: Annotated[IndexerConfig | None, optional(instance_of(IndexerConfig))] = None
    has_sinks: Flag = False
    window: _OptionalSize = None
    norms_k_pe: Flag = False
    num_gates: Annotated[int, whole(0)] = 0
    query_gates: Flag = False
    input_parts: Size = 1

    def __post_init__(self) -> None:
        check_fields(rules_of(MLAConfig), vars(self))
        if self.num_gates not in (0, 1, self.v_head_dim) or (self.num_gates and self.query_gates):
            raise ValueError(
                f"num_gates is {self.num_gates} with query_gates {self.query_gates}; it must be 0, or without them 1 "
                f"or v_head_dim {self.v_head_dim}"
            )
        if self.window is not None and self.indexer is not None:
            raise ValueError(f"window is {self.window}; it must be None in a layer with an indexer")
        if self.query_gates:
            self._check_gates()
        if self.indexer is not None and self.use_rope and self.indexer.head_dim < self.qk_rope_head_dim:
            raise ValueError(
                f"indexer.head_dim is {self.indexer.head_dim}; it must be at least qk_rope_head_dim "
                f"{self.qk_rope_head_dim}"
            )

    def _check_gates(self) -> None:
        if self.q_lora_rank is None or self.llama_4_scaling is not None or self.has_query_factors:
            raise ValueError(
                f"query_gates is True, which needs a q_lora_rank, llama_4_scaling None and has_query_factors False; "
                f"they are {self.q_lora_rank}, {self.llama_4_scaling} and {self.has_query_factors}"
            )

    @property
    def qk_head_dim(self) -> int:
        """Return the width P + R of a query or key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def query_width(self) -> int:
        """Return the rows of the query projection for a head: P, plus R with projects_pe, plus V with query_gates."""
        width = self.qk_head_dim if self.projects_pe else self.qk_nope_head_dim
        return width + self.v_head_dim * self.query_gates

    @property
    def down_width(self) -> int:
        """Return the width of kv_c and k_pe as they are projected: without k_pe if the layer projects none."""
        return self.latent_dim if self.projects_pe else self.kv_lora_rank

    @property
    def has_gates(self) -> bool:
        """Return whether heads' outputs are multiplied by gates."""
        return self.query_gates or self.num_gates > 0

    @property
    def topk(self) -> int | None:
        """Return the maximum number of tokens that a token attends to; None for all up to itself."""
        return self.window if self.indexer is None else self.indexer.topk

    @property
    def rope_dim(self) -> int:
        """Return the width R of the part that RoPE rotates."""
        return self.qk_rope_head_dim

    @property
    def row_tokens(self) -> int:
        """Return the number of tokens that one row of the cache stores: 1 in MLA, several in DeepSeek-V4."""
        return 1

    @property
    def latent_dim(self) -> int:
        """Return L + R, the width of kv_c and k_pe together; `formats.row_width` gives the width of a cache row."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def heads_per_rank(self, tensor_parallel_size: int) -> int:
        """Return the number of heads of one TP rank.

        Raises:
            ValueError: The heads do not divide; the message lists sizes that do.
        """
        check_tp_size(tensor_parallel_size, self.num_heads, f"the model's {self.num_heads} attention heads")
        return self.num_heads // tensor_parallel_size


# What errors call a field that has no option, or whose option is another than `option_label` makes from its name.
_LABELS = {
    "tensor_parallel_size": "tensor_parallel_size (-tp)",
    "decode_context_parallel_size": "decode_context_parallel_size (-dcp)",
    "exchange_timeout": "exchange_timeout (--dcp-exchange-timeout)",
    "context_workspace_tokens": "context_workspace_tokens",
}


@dataclass(frozen=True, kw_only=True)
class DCPConfig:
    """How the latent cache is spread over the ranks of a TP group. Options that vLLM has, too, have vLLM's names.

    Attributes:
        cp_kv_cache_interleave_size: I, consecutive tokens on one rank; --deterministic over several ranks makes it 64.
        dcp_comm_backend: "ag_rs" (all-gather, then reduce-scatter), "a2a" (all-to-all), "direct" (stores over NVLink),
            or "auto" to choose.
        exchange_timeout: Seconds that `direct` waits on the device for rows of another rank.
        check_exchange: Whether to compare the ranks' calls of the exchange before they are made: slow, to find bugs.
        dcp_exchange_dtype: Format in which decode's queries and partial outputs travel between ranks: "auto" unchanged,
            "fp8" e4m3 with scales (`direct` alone).
        block_size: Tokens of one cache block on one rank.
        kv_cache_dtype: Format of the cache (`dcpmla.cache.formats`): "auto" is the model's dtype, "bf16" the same
            for models in bfloat16; "bfloat16" is another name of "bf16", "fp8_e4m3" of "fp8".
        kv_cache_scale: Scale of an fp8 cache: latent = scale x cached value. None takes the checkpoint's, or else 1.
        calculate_kv_scales: Whether to calculate scales of an fp8 cache and fp8 queries from the first prompt, instead
            of taking them from kv_cache_scale or the checkpoint.
        index_cache_dtype: Format of the index cache of sparse MLA (`dcpmla.cache.index_keys`): "auto" is the
            model's dtype; "fp8" takes half the memory, and rounds the indexer's queries, too.
        index_hadamard: Whether to apply a Hadamard transform to the indexer's keys and queries before they are
            rounded.
        decode_query_dtype: "fp8" rounds decode's queries to e4m3 before they are gathered, so that
            attention over an fp8 cache multiplies in fp8; "auto" leaves them in the model's dtype.
        attention_backend, prefill_backend: Names of the backends that run decode's and prefill's attention
            (`dcpmla.attention.backends.choice`); "auto" takes the first that can.
        kv_hot_tokens: Number of tokens whose latents are on the GPUs of a DCP group, in each layer, while all latents
            are in host memory (docs/hot_tokens.md); None keeps all on the GPUs. For models in which every layer attends
            to tokens that an indexer selects. It needs kv_offloading_size.
        context_workspace_tokens: Upper bound on the cached tokens of one context chunk, over all requests. In
            DeepSeek-V4 it bounds entries instead, each the compressed form of several tokens.
        dcp_q_replicate: Whether each rank holds the query projection of all its DCP group's heads, so that decode
            gathers no queries. Costs memory, and dcp times the query's arithmetic in decode.
        dcp_project_before_merge: Whether decode applies W_UV before the merge, so that exchanged rows have v_head_dim
            columns, not kv_lora_rank. Only calls with at least 64 decode tokens do so: there the narrower rows save
            more time than each rank needs to read W_UV of all the group's heads. Costs memory.
        deterministic: Whether a request's logits have the same bits whatever else the step computes, however its prompt
            is cut, and for every dcp at the same tp (docs/determinism.md). More than one rank then need an interleave
            of 64 and divide 8.
    Raises:
        ValueError: A field has another type or is outside its range, sizes do not divide, options exclude each other,
            or context_workspace_tokens is below chunk_alignment.
    """

    tensor_parallel_size: _Ranks = 1
    decode_context_parallel_size: _Ranks = 1
    cp_kv_cache_interleave_size: Size = 1
    dcp_comm_backend: Annotated[str, one_of(DCP_COMM_BACKENDS)] = "auto"
    exchange_timeout: _Seconds = 60.0
    check_exchange: Flag = False
    dcp_exchange_dtype: Annotated[str, one_of(DCP_EXCHANGE_DTYPES)] = "auto"
    block_size: Size = 64
    kv_cache_dtype: Annotated[str, one_of(KV_CACHE_DTYPES)] = "auto"
    kv_cache_scale: _Scale = None
    calculate_kv_scales: Flag = False
    decode_query_dtype: Annotated[str, one_of(DECODE_QUERY_DTYPES)] = "auto"
    index_cache_dtype: Annotated[str, one_of(INDEX_CACHE_DTYPES)] = "auto"
    index_hadamard: Flag = False
    attention_backend: _Text = "auto"
    prefill_backend: _Text = "auto"
    kv_hot_tokens: Annotated[int | None, optional(whole(1))] = None
    context_workspace_tokens: Annotated[int, whole(1)] = 65536
    dcp_q_replicate: Flag = False
    dcp_project_before_merge: Flag = False
    deterministic: Flag = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_cache_dtype", KV_CACHE_ALIASES.get(str(self.kv_cache_dtype), self.kv_cache_dtype))
        check_fields(rules_of(DCPConfig), vars(self), lambda name: _LABELS.get(name) or option_label(name))
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
                f"{self.dcp_comm_backend!r} carries rows as they are; choose auto or direct"
            )
        if self.kv_cache_scale is not None and self.calculate_kv_scales:
            raise ValueError(
                f"kv_cache_scale (--kv-cache-scale) is {self.kv_cache_scale}, but calculate_kv_scales "
                "(--calculate-kv-scales) asks to find one; give one of them"
            )
        asked = {
            "kv_cache_scale (--kv-cache-scale)": self.kv_cache_scale is not None,
            "calculate_kv_scales (--calculate-kv-scales)": self.calculate_kv_scales,
            "decode_query_dtype (--decode-query-dtype) fp8": self.decode_query_dtype == "fp8",
        }
        if self.kv_cache_dtype != "fp8" and (name := next((name for name in asked if asked[name]), "")):
            raise ValueError(
                f"{name} goes with kv_cache_dtype (--kv-cache-dtype) fp8, not with {self.kv_cache_dtype!r}"
            )
        if self.context_workspace_tokens < self.chunk_alignment:
            raise ValueError(
                f"context_workspace_tokens is {self.context_workspace_tokens}; "
                f"a context chunk needs at least lcm(block_size, dcp x interleave) = {self.chunk_alignment}"
            )
        if self.deterministic:
            self._check_deterministic()

    def _check_deterministic(self) -> None:
        """Raise ValueError for options with which results depend on the step or on dcp."""
        dcp, interleave = self.decode_context_parallel_size, self.cp_kv_cache_interleave_size
        refused = {
            "calculate_kv_scales (--calculate-kv-scales)": self.calculate_kv_scales,
            "dcp_exchange_dtype (--dcp-exchange-dtype) fp8": self.dcp_exchange_dtype == "fp8",
            "decode_query_dtype (--decode-query-dtype) fp8": self.decode_query_dtype == "fp8",
            "dcp_project_before_merge (--dcp-project-before-merge)": self.dcp_project_before_merge,
            "attention_backend (--attention-backend)": self.attention_backend != "auto",
            "prefill_backend (--prefill-backend)": self.prefill_backend != "auto",
        }
        for name, is_asked in refused.items():
            if is_asked:
                raise ValueError(f"deterministic (--deterministic) does not support {name}; leave it out")
        if dcp > 1 and (interleave != TILE or NUM_TILE_LANES % dcp):
            raise ValueError(
                f"deterministic (--deterministic) with decode_context_parallel_size (-dcp) {dcp} and "
                f"cp_kv_cache_interleave_size (--cp-kv-cache-interleave-size) {interleave}; it needs dcp 1, or dcp "
                f"{choices(divisors(NUM_TILE_LANES)[1:])} and an interleave of {TILE}"
            )

    @property
    def chunk_alignment(self) -> int:
        """Return a number of tokens; each request's part of a chunk begins at a multiple of it. With multiples of W I a
        chunk begins at the same local index on all ranks; the lcm with block_size follows vLLM. Deterministic prefill
        takes whole pairs of tiles.
        """
        tiles = 2 * TILE if self.deterministic else 1
        return math.lcm(self.block_size, self.decode_context_parallel_size * self.cp_kv_cache_interleave_size, tiles)

    @property
    def num_own_lanes(self) -> int | None:
        """Return the number of lanes of tiles that one rank caches; None if sums have any order."""
        return NUM_TILE_LANES // self.decode_context_parallel_size if self.deterministic else None

    @property
    def virtual_block_size(self) -> int:
        """Return the number of positions that one block id covers: block_size on each of the DCP ranks."""
        return self.block_size * self.decode_context_parallel_size

    def owner(self, dcp_rank: int) -> Owner:
        """Return a rank of the DCP group as the owner of tokens."""
        return Owner(dcp_rank, self.decode_context_parallel_size, self.cp_kv_cache_interleave_size)
