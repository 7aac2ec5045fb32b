"""Kimi-K3 inside vLLM, on CPUs: its MLA layers have a class of their own, next to linear attention."""

from pathlib import Path

from tests.engines.forked import report_of
from tests.engines.vllm_kimi import save_text_model


def test_decodes_and_exchanges_are_this_packages(tmp_path: Path) -> None:
    """TP 2 x DCP 2 in groups of 4 tokens: logprobs of prompts of 1 to 300 tokens, in chunks of at most 100, as a model
    in float64 computes them, with a request aborted and without. Chunks of at most 32 tokens are decodes; longer ones
    attend by vLLM's own code.
    """
    model = save_text_model(tmp_path / "model")
    variables = {"DCPMLA_VLLM": "default", "VLLM_KIMI_K3_GEMM_AR": "0"}
    layout = {"decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": 4}
    report, _ = report_of("vllm_kimi_cases.py", 2, model, layout, **variables)
    linear, dense = ["KimiK3DeltaAttention", "NoneType"], ["MultiHeadLatentAttention", "DCPMLAImpl"]
    assert report["layers"] == [linear, dense, linear, dense]
    for turn, lost in (("first", 0), ("aborted", 1)):
        assert report[turn]["ended"] == report[turn]["of"] - lost
        assert report[turn]["error"] < 1e-4, turn
    calls = report["calls"]
    assert calls["dcp_mla_decode"] == calls["combine"] == calls["gather_heads"] > 40
    assert calls["pieces"] > 10, "no short prefills"
    assert report["warm-up"]["dcp_mla_decode"] >= 9
    for counted in (calls, report["warm-up"]):
        assert "dcp_mla_prefill" not in counted
    assert report["without merge"] > 0.1, "the merge decides nothing: the test would not see that it is wrong"
