"""Divisions of GPUs between prefill and decode servers: cases with sums in their docstrings, and properties."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpmla.__main__ import main
from dcpmla.cli.plan_split import plan_server
from dcpmla.planning.machine import H200X8
from dcpmla.planning.recommend import make_plan
from dcpmla.planning.search import smallest
from dcpmla.planning.servers import Piece, Traffic
from dcpmla.planning.setting import Setting
from dcpmla.planning.split import MOST_BUSY, Split, predict_both, predict_split, transfer_bytes
from dcpmla.planning.split_choice import all_splits, recommend_split
from dcpmla.planning.weights import ModelSize
from tests.support.models import tiny_config
from tests.support.plan_cases import deployed, setting_of, write

MACHINE = replace(H200X8, nvlink_gb_per_s=100.0, transfer_gb_per_s=80.0, network_gb_per_s=8.0)
TP_DCP = [(tp, dcp) for tp in (1, 2, 3, 4, 6, 8) for dcp in range(1, tp + 1) if tp % dcp == 0]
TRAFFIC = Traffic(request_rate=2.0, input_len=1000, output_len=101)


@dataclass(frozen=True)
class FakeServer:
    """A server whose decode step takes base_us, and request_us for each request; a prompt has pieces of 500 tokens."""

    tp: int = 1
    dcp: int = 1
    kv_cache_dtype: str = "bf16"
    base_us: float = 1000.0
    request_us: float = 100.0
    piece_us: float = 50_000.0
    num_pieces: int = 2
    num_prompts: int = 10
    num_requests: int = 1000
    num_decodes: int = 1000
    bytes_per_token: int = 80_000
    bytes_per_state: int = 0
    num_drafts: int = 0

    @property
    def setting(self) -> Setting:
        sizes = self.tp, self.dcp, self.kv_cache_dtype
        return setting_of(*sizes, num_speculative_tokens=self.num_drafts, acceptance_rate=1.0)

    def pieces(self, num_decodes: int) -> list[Piece]:
        return [Piece(500, self.piece_us + self.request_us * num_decodes) for _ in range(self.num_pieces)]

    def decode_us(self, num_decodes: int) -> float:
        return self.base_us + self.request_us * num_decodes


def test_servers_apart_by_hand() -> None:
    """2 prompts a second of 100 ms: the server works a fifth of its time, and a prompt waits 0.2 x 100 / (2 x 0.8) ms.

    A prompt has 80 MB, which take 1 ms at 80 GB/s; half of that is sent while the second piece is computed. With N
    requests, 1e6 N / (1000 + 100 N) tokens a second must be 2 x 100: one request is enough. 4 = 1 + 2.33, rounded up.
    """
    split = predict_split(MACHINE, TRAFFIC, FakeServer(), 1, FakeServer(), 1)
    assert split.keeps_up
    assert split.num_gpus == 2
    assert split.busy == pytest.approx(0.2)
    assert split.queue_us == pytest.approx(12_500)
    assert split.time_to_first_token_us == pytest.approx(112_500)
    assert split.link_busy == pytest.approx(2 * 1e-3)
    assert split.transfer_us == pytest.approx(500)
    assert split.num_running == 1
    assert split.time_per_token_us == pytest.approx(1100)
    assert split.time_per_token_p99_us == pytest.approx(1400)


def test_more_requests_run_where_more_tokens_are_asked_for() -> None:
    """Each of 2 servers makes 4,000 tokens a second: 1e6 N >= 4000 (1000 + 100 N) from N = 6.67 on."""
    traffic = replace(TRAFFIC, request_rate=4.0, output_len=2001)
    split = predict_split(MACHINE, traffic, FakeServer(), 1, FakeServer(), 2)
    assert split.num_running == 7
    assert split.time_per_token_us == pytest.approx(1700)
    high = math.ceil(7 + 2.33 * math.sqrt(7))
    assert split.time_per_token_p99_us == pytest.approx(1000 + 100 * high)
    drafting = predict_split(MACHINE, traffic, FakeServer(), 1, FakeServer(num_drafts=1), 2)
    assert drafting.num_running == 3  # 1e6 N >= 2000 (1000 + 100 N) from N = 2.5 on
    assert drafting.time_per_token_us == pytest.approx(1300 / 2)


def test_servers_that_do_both_by_hand() -> None:
    """With one decode a prompt takes 2 x 50.1 ms; in a second there are 4 steps with pieces and 799.6 / 1.1 others.

    More than a hundredth of the steps would have to be as long: 4 of 731 are not, so the percentile is a decode's.
    """
    both = predict_both(TRAFFIC, FakeServer(), 1)
    steps = 4 + 799_600 / 1100
    assert both.num_running == 1
    assert both.busy == pytest.approx(0.2004)
    assert both.time_to_first_token_us == pytest.approx(100_200 * (1 + 0.2004 / (2 * 0.7996)))
    assert both.prompt_step_share == pytest.approx(4 / steps)
    assert both.time_per_token_us == pytest.approx(1e6 / steps)
    assert both.time_per_token_p99_us == pytest.approx(1400)
    often = predict_both(replace(TRAFFIC, request_rate=7.0), FakeServer(), 1)
    assert often.prompt_step_share > 0.01
    high = math.ceil(often.num_running + 2.33 * math.sqrt(often.num_running))
    assert often.time_per_token_p99_us == pytest.approx(50_000 + 100 * high)


@given(source=st.sampled_from(TP_DCP), target=st.sampled_from(TP_DCP))
def test_the_busiest_sender(source: tuple[int, int], target: tuple[int, int]) -> None:
    """A rank t of T reads from replica t x replicas // T, from all its ranks alike."""
    servers = [FakeServer(tp=tp, dcp=dcp) for tp, dcp in (source, target)]
    num_replicas, sent = source[0] // source[1], dict.fromkeys(range(source[0]), 0.0)
    for rank in range(target[0]):
        replica = rank * num_replicas // target[0]
        for sender in range(replica * source[1], (replica + 1) * source[1]):
            sent[sender] += 80e6 / target[1] / source[1]
    assert transfer_bytes(*servers, 1000) == (pytest.approx(max(sent.values())), 80e6 / target[1])


def test_states_are_sent_to_every_rank() -> None:
    assert transfer_bytes(FakeServer(), FakeServer(tp=2, bytes_per_state=7), 1) == (160_014, 80_007)


def test_a_slow_link_delays_the_last_rows() -> None:
    """80 MB take 10 ms over 8 GB/s, and pieces 4 ms: the last one's rows arrive 10 - 4 ms after it."""
    source = FakeServer(tp=8, dcp=1, piece_us=4000)
    split = predict_split(MACHINE, TRAFFIC, source, 1, FakeServer(), 1)
    assert split.num_gpus == 9  # they are on two nodes
    assert split.transfer_us == pytest.approx(4000 + 10_000 - 8000)


def test_obstacles_are_named() -> None:
    def obstacle(prefill: FakeServer, decode: FakeServer, rate: float = 2.0) -> str:
        return predict_split(MACHINE, replace(TRAFFIC, request_rate=rate), prefill, 1, decode, 1).obstacle

    assert obstacle(FakeServer(num_prompts=1), FakeServer()).startswith("a prefill server holds 1 of 2 prompts")
    assert obstacle(FakeServer(), FakeServer(), 9.0) == "prompts need 90% of the prefill servers' time"
    assert obstacle(FakeServer(piece_us=1), FakeServer(), 900.0) == "transfers need 90% of a link's time"
    few = "more requests decode at once than fit: 3 at most on a server of tp 1, dcp 1, bf16"
    assert obstacle(FakeServer(), FakeServer(num_decodes=3)) == few  # 1 on average, up to 4
    endless = predict_split(MACHINE, replace(TRAFFIC, request_rate=11.0), FakeServer(), 1, FakeServer(), 1)
    assert (endless.queue_us, endless.time_to_first_token_us) == (None, None)
    both = predict_both(replace(TRAFFIC, request_rate=9.0), FakeServer(), 1)
    assert both.obstacle == "prompts need 90% of the servers' time, without decodes"
    assert predict_both(TRAFFIC, FakeServer(num_requests=3), 1).obstacle == few


SERVERS = st.builds(
    FakeServer,
    tp=st.sampled_from([1, 2, 4]),
    base_us=st.floats(100, 1e4),
    request_us=st.floats(0, 1e3),
    piece_us=st.floats(1e3, 1e6),
    num_pieces=st.integers(1, 8),
    num_prompts=st.integers(0, 4),
    num_requests=st.integers(0, 200),
    num_decodes=st.integers(0, 200),
)
TRAFFICS = st.builds(
    Traffic, request_rate=st.floats(0.01, 20), input_len=st.just(4000), output_len=st.integers(2, 2000)
)


@given(
    traffic=TRAFFICS,
    servers=st.lists(SERVERS, min_size=1, max_size=2),
    num_gpus=st.integers(1, 16),
    growth=st.floats(1, 3),
)
def test_what_keeps_up_with_a_load_keeps_up_with_less(
    traffic: Traffic, servers: list[FakeServer], num_gpus: int, growth: float
) -> None:
    """So more load never needs fewer GPUs."""
    heavier = replace(traffic, request_rate=traffic.request_rate * growth)
    splits, less = (all_splits(MACHINE, each, servers, num_gpus) for each in (heavier, traffic))
    assert [str(split) for split in splits] == [str(split) for split in less]
    assert all(light.keeps_up for heavy, light in zip(splits, less, strict=True) if heavy.keeps_up)


@given(traffic=TRAFFICS, servers=st.lists(SERVERS, min_size=1, max_size=3), num_gpus=st.integers(1, 16))
def test_only_what_keeps_up_is_recommended(traffic: Traffic, servers: list[FakeServer], num_gpus: int) -> None:
    splits = all_splits(MACHINE, traffic, servers, num_gpus)
    assert all(split.num_gpus <= num_gpus for split in splits)
    fitting = [split for split in splits if split.keeps_up]
    best, reason = recommend_split(splits) if splits else (None, "")
    assert (best is None) == (not fitting)
    if best is None:
        assert not splits or reason.startswith("No division keeps up: ")
        return
    assert best.keeps_up
    assert best.busy <= MOST_BUSY
    assert best.link_busy <= MOST_BUSY
    late = [split.time_per_token_p99_us for split in fitting]
    assert best.time_per_token_p99_us <= 1.02 * min(late)


def test_the_reason_is_named() -> None:
    """Long prompts make decodes wait; where prompts are rare, all GPUs decode."""
    often, short = replace(TRAFFIC, request_rate=6.0), FakeServer(num_pieces=8, piece_us=12_500)
    best, reason = recommend_split(all_splits(MACHINE, often, [short], 4))
    assert best is not None
    assert (best.num_prefill, best.num_decode) == (3, 1)  # one request decodes at once, whatever the number of servers
    assert "of the steps of servers that do both have a piece of a prompt, for which decodes wait." in reason
    servers = [FakeServer(), FakeServer(tp=4, base_us=300, request_us=30)]
    rare = replace(TRAFFIC, request_rate=0.1)
    best, reason = recommend_split(all_splits(MACHINE, rare, servers, 4))
    assert best is not None
    assert (best.num_prefill, best.num_decode, best.decode) == (0, 1, "tp 4, dcp 1, bf16")
    assert reason.endswith("of the steps of servers that do both have a piece of a prompt, and all GPUs decode.")
    best, reason = recommend_split(all_splits(MACHINE, rare, servers[1:], 4))
    assert best is not None
    assert reason.endswith("The GPUs are too few for two servers of the sizes in tensor_parallel_size (-tp).")


def test_formats_of_the_cache_are_the_same_on_both_sides() -> None:
    splits = all_splits(MACHINE, TRAFFIC, [FakeServer(), FakeServer(kv_cache_dtype="fp8")], 2)
    assert [(split.prefill, split.decode) for split in splits if split.num_prefill] == [
        ("tp 1, dcp 1, bf16", "tp 1, dcp 1, bf16"),
        ("tp 1, dcp 1, fp8", "tp 1, dcp 1, fp8"),
    ]


@given(first=st.integers(1, 40), limit=st.integers(0, 40))
def test_the_smallest_number_up_to_a_limit(first: int, limit: int) -> None:
    assert smallest(lambda number: number >= first, limit) == (first if first <= limit else None)


def test_a_planned_server(v3: ModelSize) -> None:
    """A prompt of DeepSeek-V3 has 61 layers' rows; docs/planning.md has the sum of its steps. A step of 32
    decodes with a context of 32,768 tokens reads less than one of 131,072.
    """
    traffic = Traffic(request_rate=1.0, input_len=32_768, output_len=2)
    server = plan_server(deployed(v3, 8, 8, num_gpus=64), traffic, 8192, 64)
    assert server.bytes_per_token == 61 * 576 * 2
    assert sum(piece.time_us for piece in server.pieces(0)) == pytest.approx(1_475_640, rel=1e-3)
    assert [piece.num_tokens for piece in server.pieces(0)] == [8192] * 4
    assert sum(piece.num_tokens for piece in server.pieces(32)) == 32_768
    assert server.decode_us(32) < 35_610
    assert server.num_prompts >= server.num_requests > 100
    assert server.num_requests == server.num_decodes  # GPUs of several hosts: 128 MiB of slots are no request's


def test_staging_slots_take_room_from_the_cache(v3: ModelSize) -> None:
    """1 GiB on each of the 8 ranks of one host, of which a request of 131,080 tokens has 1.13 GB a rank."""
    traffic = Traffic(request_rate=1.0, input_len=131_072, output_len=8)
    server = plan_server(deployed(v3, 8, 8), traffic, 8192, 8)
    assert server.num_requests - server.num_decodes in (0, 1)
    apart = make_plan(deployed(v3, 8, 8), 1, 131_080, 1 << 30).kv_tokens_per_rank
    both = make_plan(deployed(v3, 8, 8), 1, 131_080).kv_tokens_per_rank
    assert both - apart == pytest.approx((1 << 30) / (61 * 576 * 2), rel=0.01)
    assert server.num_prompts == apart * 8 // 131_072


def test_command_prints_a_split(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config, out = write(tmp_path / "config.json", tiny_config("deepseek_v3").to_dict()), tmp_path / "plan.json"
    command = f"plan --model {config} -tp 1,2 -dcp 1,2 --num-gpus 4 --context 200 --batch 2 --json {out}"
    assert main([*command.split(), "--input-len", "100", "--output-len", "20", "--request-rate", "0.5"]) == 0
    content, printed = json.loads(out.read_text())["split"], capfd.readouterr().out
    assert (content["request_rate"], content["input_len"], content["output_len"]) == (0.5, 100, 20)
    splits = [
        Split(**{name: value for name, value in each.items() if name != "keeps_up"}) for each in content["splits"]
    ]
    assert {(split.num_prefill, split.num_decode) for split in splits if split.prefill == split.decode} >= {
        *((1, 3), (2, 2), (3, 1), (1, 1))
    }
    recommended = content["recommended"]
    assert recommended["keeps_up"]
    assert recommended in content["splits"]
    assert "4 GPUs as prefill and decode servers, and as servers that do both, under 0.5 requests a second" in printed
    assert f"for decode. {content['reason']}" in printed or f"for both. {content['reason']}" in printed


def test_a_rate_that_no_load_has(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = write(tmp_path / "config.json", tiny_config("deepseek_v3").to_dict())
    assert main(["plan", "--model", config, "-tp", "2", "--context", "200", "--request-rate", "-1"]) == 2
    assert "request_rate (--request-rate) is -1.0; it must be a number in (0, 1e+06]" in capfd.readouterr().err
