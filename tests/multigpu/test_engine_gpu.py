"""The engine on a GPU: launching and collecting steps waits for nothing but their tokens; draws as on the CPU."""

from pathlib import Path

import pytest
import torch

from dcpmla.config import DCPConfig
from dcpmla.runtime.capture import error_on_host_sync
from dcpmla.runtime.graph import StepGraph
from dcpmla.runtime.request import new_generator
from dcpmla.runtime.sampling import SamplingParams, sample
from tests.support.engines import new_engine
from tests.support.graph_checks import new_cache, open_model_on
from tests.support.models import save_tiny
from tests.support.ranks import run_ranks

PARAMS = [
    SamplingParams(max_new_tokens=12, ignore_eos=True),
    SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=2.0, seed=1),
    SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=2.0, seed=2, top_k=9),
    SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=2.0, seed=3, top_p=0.8, top_k=30),
]


def serve_without_waiting(directory: Path) -> None:
    dcp = DCPConfig(block_size=4, context_workspace_tokens=512)
    model, mesh = open_model_on(directory, dcp, False, "cuda")
    cache = new_cache(model.attention.config, model.attention.num_layers, dcp, model.dtype, model.device)
    steps = model.attention.step_builder(cache.sizes, dcp, mesh.dcp_rank, model.device)
    token = torch.zeros((), dtype=torch.int64, device=model.device)
    graph = StepGraph.decodes(model.decode, token, cache, steps, mesh, 4, 60)
    graph.capture()
    engine = new_engine(model, cache, dcp, mesh, 60, 64, 4, graph=graph)
    requests = [engine.add([5, 6, 7 + index], params, keep_logits=True) for index, params in enumerate(PARAMS)]
    engine.step()
    engine.step()  # from here on decodes alone
    with error_on_host_sync():
        while len(requests[0].token_ids) < 11:
            engine.step()
    list(engine.run())
    for request in requests:
        logits, generator = torch.stack(request.logits), new_generator(request.params.seed)
        assert logits.device.type == "cpu"
        for row, token in zip(logits, request.token_ids, strict=True):
            number = torch.rand(1, dtype=torch.float64, generator=generator)
            assert sample(row[None], [request.params], number).item() == token
    engine.close()


@pytest.mark.gpu
def test_steps_wait_for_their_tokens_alone(tmp_path: Path) -> None:
    save_tiny("deepseek_v3", tmp_path)
    run_ranks(1, serve_without_waiting, tmp_path, device="cuda")
