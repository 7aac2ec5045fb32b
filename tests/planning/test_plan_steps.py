"""Predicted decode steps, and what is recommended for a load."""

import random
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from dcpmla.integrations.model_size import read_model
from dcpmla.planning.deployment import Deployment, expected_experts
from dcpmla.planning.exchange import ExchangeCosts
from dcpmla.planning.machine import H200X8, Machine
from dcpmla.planning.recommend import Plan, make_plan, recommend
from dcpmla.planning.setting import Setting
from dcpmla.planning.weights import ModelSize
from tests.support.plan_cases import ALL_REDUCE, deployed, make_plans, read_glm5, read_v3, read_v32, setting_of, within


def test_expected_experts_are_those_of_a_simulation() -> None:
    rng = random.Random(0)
    for num_tokens in (1, 8, 64):
        hit = [len({e for _ in range(num_tokens) for e in rng.sample(range(256), 8)}) / 256 for _ in range(300)]
        assert expected_experts(256, 8, num_tokens) == pytest.approx(sum(hit) / len(hit), rel=0.02)


def test_drafts_by_hand(v3: ModelSize) -> None:
    """A step of 3 drafts takes what one of four times the requests takes, but for the cache, which is read once."""
    plain = setting_of(8, 2)
    drafted = replace(plain, num_speculative_tokens=3, acceptance_rate=0.5)
    assert drafted.tokens_a_step == 1 + 0.5 + 0.25 + 0.125
    long, wide = (Deployment(H200X8, v3, setting).step_us(4, 131072) for setting in (plain, drafted))
    four_times = Deployment(H200X8, v3, plain).step_us(16, 131072)
    for part in ("projections", "gather", "combine", "rest"):
        assert wide[part] == four_times[part] >= long[part]
    assert long["attention"] <= wide["attention"] < four_times["attention"]
    plans = [make_plan(Deployment(H200X8, v3, setting), 4, 131072) for setting in (plain, drafted)]
    assert plans[1].tokens_per_second == pytest.approx(4 * 1.875 / wide["total"] * 1e6, rel=1e-3)
    assert asdict(replace(drafted, num_gpus=8)).items() <= asdict(plans[1]).items()
    with pytest.raises(ValueError, match=r"acceptance_rate \(--acceptance-rate\) is 2"):
        replace(plain, acceptance_rate=2)


def test_the_floor_of_a_step_by_hand(v3: ModelSize) -> None:
    """DeepSeek-V3 on 8 ranks: a batch of one reads 8 of 256 experts, a huge one multiplies."""
    hidden, latents, routed = 7168, 7168 * (1536 + 576), 3 * 7168 * 2048
    attention = latents + (1536 * 24576 + 512 * 32768 + 16384 * hidden) / 8
    codes = 61 * attention + 3 * 3 * hidden * 18432 / 8 + 58 * 9 * routed / 8
    wide = 58 * 256 * hidden + 129280 * hidden / 8  # gates and the head, in bfloat16
    setting = setting_of(8, 1)
    cache_bytes = 61 * 4096 * 576 * 2
    reading = (codes * (1 + 4 / 128**2) + 2 * wide + cache_bytes) / H200X8.hbm_gb_per_s / 1e3
    assert Deployment(H200X8, v3, setting).floor_us(1, 4096) == pytest.approx(reading, rel=1e-3)
    assert Deployment(replace(H200X8, direct=None), v3, setting).floor_us(1, 4096) == pytest.approx(reading, rel=1e-3)
    batch, sharded = 1 << 17, replace(setting, dcp=8)
    products = batch * (codes + wide) / H200X8.matmul_tflops
    heads = batch * 61 * 128 * (576 + 512) / H200X8.attention_tflops  # over one of a request's 8 tokens
    assert Deployment(H200X8, v3, sharded).floor_us(batch, 8) == pytest.approx(2 * (products + heads) / 1e6, rel=1e-3)


@given(
    dcp=st.sampled_from([2, 4, 8]),
    kv_cache_dtype=st.sampled_from(["bf16", "fp8"]),
    batch=st.integers(1, 64),
    context=st.integers(1, 300_000),
)
def test_crossover_is_where_dcp_starts_to_win(dcp: int, kv_cache_dtype: str, batch: int, context: int) -> None:
    model = read_v3()
    sharded, plain = (setting_of(8, size, kv_cache_dtype) for size in (dcp, 1))

    def gain(batch: int, context: int) -> float:
        times = [Deployment(H200X8, model, each).step_us(batch, context)["total"] for each in (plain, sharded)]
        return times[0] - times[1]

    roomy = replace(H200X8, memory_bytes=1 << 50)  # A load that does not fit has no times.
    crossover = make_plan(Deployment(roomy, model, sharded), batch, context).crossover
    first = crossover["context_at_batch"]
    assert first is not None
    assert gain(batch, first) > 0
    assert first == 1 or gain(batch, first - 1) <= 0
    first = crossover["batch_at_context"]
    assert first is None or (gain(first, context) > 0 and (first == 1 or gain(first - 1, context) <= 0))


def test_a_tied_head_is_held_and_multiplied_like_another() -> None:
    sizes = {"num_hidden_layers": 1, "first_k_dense_replace": 1, "dtype": "bfloat16"}
    tied, untied = (
        read_model(transformers.DeepseekV3Config(**sizes, tie_word_embeddings=tie)) for tie in (True, False)
    )
    assert untied.weight_bytes(1) == tied.weight_bytes(1)
    steps = [deployed(model, 8, 1).step_us(8, 64) for model in (tied, untied)]
    assert steps[0]["rest"] == pytest.approx(steps[1]["rest"])


def test_all_reduce_is_near_what_we_measured() -> None:
    """Over 2 and 4 ranks, 1 to 128 rows of 7168."""
    for (num_ranks, num_rows), time in ALL_REDUCE.items():
        assert within(H200X8.all_reduce_us(num_rows * 7168 * 2, num_ranks), time, 1.4)
    assert H200X8.all_reduce_us(8 << 20, 1) == 0


def test_output_projections_are_projections_and_their_all_reduce_is_rest(v3: ModelSize) -> None:
    """Of the attention layers alone; one request reads weights, so their bytes tell the time."""
    stack = v3.attention_stack
    assert stack is not None
    step = deployed(stack, 8, 1).step_us(1, 64)
    assert step["rest"] == pytest.approx(61 * H200X8.all_reduce_us(7168 * 2, 8))
    matrices = (
        7168 * (1536 + 576) + (1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168) // 8
    )  # q_a, kv_a; q_b, W_UK and W_UV, o
    kernels = 61 * (H200X8.layer_us + 6 * H200X8.product_us + 2 * H200X8.kernel_us)  # the two are norms
    rate = H200X8.product_read_share * H200X8.hbm_gb_per_s
    assert step["projections"] - kernels == pytest.approx(61 * 2 * matrices / rate / 1e3)


def test_latency_over_nodes_grows_with_their_logarithm() -> None:
    """A small all-reduce over 1, 2, 4, ... nodes: twice the nodes, one step of a tree more in either half."""
    times = [H200X8.all_reduce_us(7168 * 2, 8 * nodes, nodes) for nodes in (1, 2, 4, 8, 16, 512)]
    steps = [late - early for early, late in zip(times, times[1:], strict=False)]
    assert steps[:4] == pytest.approx([2 * H200X8.network_us] * 4, rel=0.1)
    assert steps[4] == pytest.approx(5 * 2 * H200X8.network_us, rel=0.2)
    assert H200X8.collective_us("all_gather", 512, 8, 1) == pytest.approx(7.5 + 7 * 1.5 + 8 * 512 / 270e3)


def test_large_collectives_over_nodes_are_bound_by_the_network() -> None:
    """Every chunk enters a node once, through its adapters together; of an all-to-all a rank's own adapter brings all
    that is not local.
    """
    slow, chunk = replace(H200X8, network_gb_per_s=1.0), 16 << 20
    assert slow.collective_us("all_gather", chunk, 32, 4) == pytest.approx(
        7.5 + 7 * 1.5 + 3 * 8 + 3 * chunk / 1e3
    )  # a ring
    assert slow.collective_us("all_to_all", chunk, 32, 4) == pytest.approx(24 * chunk / 1e3, rel=0.01)


def test_groups_that_do_not_line_up_with_nodes_cross_them() -> None:
    assert H200X8.num_nodes(3, 6) == 1
    assert H200X8.num_nodes(3, 12) == 2
    assert H200X8.num_nodes(4, 12) == 1
    assert H200X8.num_nodes(12, 24) == 3
    assert H200X8.num_nodes(16, 32) == 2


def test_recommendation_fits_and_is_the_fastest(v3: ModelSize) -> None:
    plans = make_plans(v3, 8, (1, 2, 4, 8), 32, 131072)
    best, reason = recommend(H200X8, plans, 32, 131072)
    assert (best.dcp, [plan.fits for plan in plans]) == (8, [False, False, False, True])
    assert "676,800 tokens only" in reason
    plans = make_plans(v3, 8, (1, 2, 4, 8), 1, 256)
    best, reason = recommend(H200X8, plans, 1, 256)
    assert best.dcp == 1, "a short context is not worth an exchange"


def test_recommendation_when_nothing_fits(v3: ModelSize) -> None:
    plans = make_plans(v3, 8, (1, 8), 32, 10_000_000)
    best, reason = recommend(H200X8, plans, 32, 10_000_000)
    assert (best, [plan.tokens_per_second for plan in plans]) == (None, [None, None])
    assert f"{plans[1]} holds most" in reason
    assert f"32 requests of {plans[1].longest_context:,}" in reason
    best, reason = recommend(H200X8, make_plans(v3, 1, (1,), 1, 1), 1, 1)
    assert best is None
    assert "more ranks (-tp)" in reason


def crossing(plans: list[Plan], batch: int, context: int) -> tuple[int, str]:
    """Return the DCP size recommended, and what is said of nodes after the reason."""
    best, reason = recommend(H200X8, plans, batch, context)
    return best.dcp, reason.partition("). ")[2]


def exchange_ms(plan: Plan) -> str:
    return f"{(plan.step_us['gather'] + plan.step_us['combine']) / 1e3:.2f} ms of"


def test_dcp_stays_inside_a_node_where_that_holds_the_load(v3: ModelSize) -> None:
    """128 ranks on 16 nodes; neighbours fill nodes, so groups of up to 8 stay inside."""
    plans = {plan.dcp: plan for plan in make_plans(v3, 128, (1, 2, 4, 8, 16, 32, 128), 64, 16384)}
    assert [plan.dcp_num_nodes for plan in plans.values()] == [1, 1, 1, 1, 2, 4, 16]
    exchange = {dcp: plan.step_us["gather"] + plan.step_us["combine"] for dcp, plan in plans.items()}
    assert exchange[16] > 1.5 * exchange[8]
    dcp, said = crossing(list(plans.values()), 64, 16384)
    assert dcp == 8
    assert said.startswith(f"Keep DCP inside a node of 8 GPUs: tp 128, dcp 8 pays {exchange_ms(plans[8])}")
    assert said.endswith(
        f"tp 128, dcp 16 pays {exchange_ms(plans[16])} {plans[16].step_us['total'] / 1e3:.2f} ms "
        "for its exchange over 2 nodes."
    )


def test_only_dcp_across_nodes_holds_the_load(v3: ModelSize) -> None:
    plans = make_plans(v3, 32, (1, 8, 16, 32), 256, 131072)
    assert [plan.fits for plan in plans] == [False, False, False, True]
    dcp, said = crossing(plans, 256, 131072)
    assert dcp == 32
    assert said.startswith(f"Only DCP across nodes holds the load: tp 32, dcp 32 pays {exchange_ms(plans[3])}")


def test_dcp_across_nodes_can_be_worth_it(v3: ModelSize) -> None:
    """One request of 4 Mi tokens: reading it takes longer than the network."""
    plans = make_plans(v3, 32, (1, 8, 32), 1, 1 << 22)
    assert [plan.fits for plan in plans] == [False, True, True]
    dcp, said = crossing(plans, 1, 1 << 22)
    assert dcp == 32
    assert said.startswith(f"DCP across nodes is worth it here: tp 32, dcp 32 pays {exchange_ms(plans[2])}")
    assert "inside a node tp 32, dcp 8 pays" in said
    plain, *_ = plans = make_plans(v3, 32, (1, 32), 1, 1 << 20)
    assert plain.fits
    assert crossing(plans, 1, 1 << 20)[1].endswith(f"tp 32 without DCP takes {plain.step_us['total'] / 1e3:.2f} ms.")


def test_nothing_is_said_of_nodes_that_does_not_matter(v3: ModelSize) -> None:
    assert crossing(make_plans(v3, 16, (1, 2, 4, 8, 16), 1, 512), 1, 512) == (1, "")  # plain TP
    assert crossing(make_plans(v3, 8, (1, 8), 32, 131072), 32, 131072) == (8, "")  # one node


def test_replicas_share_the_load_of_a_cluster(v3: ModelSize) -> None:
    """512 replicas of 8 GPUs step as one of them does with its share; wider groups have fewer and larger shares."""
    (one,), (many,), (wide,) = (
        make_plans(v3, tp, (8,), batch, 131072, gpus)
        for tp, batch, gpus in ((8, 32, 8), (8, 16384, 4096), (16, 16384, 4096))
    )
    assert many.step_us == one.step_us
    assert many.crossover["context_at_batch"] == one.crossover["context_at_batch"]
    assert (many.num_gpus, many.num_replicas, many.num_nodes, wide.num_replicas) == (4096, 512, 512, 256)
    assert many.tokens_per_second == pytest.approx(512 * one.tokens_per_second, rel=1e-3)
    assert (many.max_num_seqs, many.longest_context) == (512 * one.max_num_seqs, one.longest_context)
    assert wide.step_us["attention"] > many.step_us["attention"]
    best, reason = recommend(H200X8, [many, wide, *make_plans(v3, 16, (16,), 16384, 131072, 4096)], 16384, 131072)
    assert (best.tp, best.dcp) == (8, 8)
    assert "Keep DCP inside a node of 8 GPUs: tp 8, dcp 8 pays" in reason
    assert "tp 16, dcp 16 pays" in reason


def test_a_group_of_a_larger_job_may_straddle_nodes(v3: ModelSize) -> None:
    nodes_of_six = replace(H200X8, gpus_per_node=6)
    alone, among = (setting_of(4, 4, num_gpus=gpus) for gpus in (4, 12))
    assert [make_plan(Deployment(nodes_of_six, v3, setting), 8, 1024).dcp_num_nodes for setting in (alone, among)] == [
        1,
        2,
    ]
    gathers = [Deployment(nodes_of_six, v3, setting).step_us(8, 1024)["gather"] for setting in (alone, among)]
    assert gathers[1] > gathers[0] + 61 * nodes_of_six.network_us / 2


@pytest.mark.parametrize("read", [read_v32, read_glm5])
def test_a_sparse_step_attends_to_what_it_selects(read: Callable[[], ModelSize]) -> None:
    """Beside a dense one of the same layers: equal but for projections up to topk tokens; beyond, attention stays and
    scores grow.
    """
    sparse = read()
    dense = replace(sparse, attention=sparse.attention.dense_stack())
    for dcp in (1, 8):
        setting = setting_of(8, dcp, index_cache_dtype="fp8")
        plain, few, more = (
            Deployment(H200X8, m, setting).step_us(32, s) for m, s in ((dense, 2048), (sparse, 2048), (sparse, 2049))
        )
        assert {**plain, "selection": 0} == few
        assert list(few) == ["total", "projections", "selection", "gather", "attention", "combine", "rest"]
        assert more["attention"] == few["attention"]
        assert 0 < 4 * H200X8.kernel_us < more["selection"] / sparse.attention.num_index_layers
        sent = ExchangeCosts(H200X8, dcp, backend="auto").candidates_us(32, min(2048, -(-2049 // dcp)))
        assert more["gather"] - few["gather"] == pytest.approx(sparse.attention.num_index_layers * sent)
        assert (sent > 0) == (dcp > 1)
        assert more["total"] == pytest.approx(sum(time for part, time in more.items() if part != "total"))


@pytest.mark.parametrize(("index_cache_dtype", "key_bytes"), [("auto", 256), ("fp8", 132)])
def test_scores_read_this_ranks_index_keys(index_cache_dtype: str, key_bytes: int) -> None:
    """By what a request more costs on machines that only read, or only multiply: 64 heads of 128 a key, two operations
    each.
    """
    reads, multiplies = replace(H200X8, attention_tflops=1e9), replace(H200X8, hbm_gb_per_s=1e9)
    for dcp in (1, 8):
        setting = setting_of(8, dcp, index_cache_dtype=index_cache_dtype)

        def key_us(machine: Machine, setting: Setting = setting) -> float:
            one, two = (
                Deployment(machine, read_v32(), setting).step_us(batch, 131072)["selection"] for batch in (1, 2)
            )
            return (two - one) / 61 / (131072 // setting.dcp)

        assert key_us(reads) * reads.attention_read_share * reads.hbm_gb_per_s * 1e3 == pytest.approx(key_bytes)
        assert key_us(multiplies) * multiplies.attention_tflops * 1e6 == pytest.approx(2 * 64 * 128)
