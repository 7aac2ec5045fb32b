"""Events where layers begin, after which transfers send the rows of the layers before them: in steps between whose
graphs attention is launched, too.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from dcpmla.attention.step.table import StepRequests
from dcpmla.config import DCPConfig
from dcpmla.runtime.graph import StepGraph
from tests.support.graph_checks import open_model_on
from tests.support.models import save_tiny
from tests.support.ranks import run_ranks
from tests.support.recording import capture
from tests.support.whole_models import poisoned_cache

NUM_TOKENS, BLOCKS = 20, [0, 1, 2]


def layers_at_starts(directory: Path, dcp: DCPConfig, num_absorbed: int) -> tuple[bool, list[tuple[int, list[bool]]]]:
    """Run a prompt as a replay; return whether it is one graph, and at each event the layer that begins and which
    layers have the prompt's first row.
    """
    model, mesh = open_model_on(directory, dcp, False, "cpu")
    cache = poisoned_cache(model, dcp, [80] * 2, 7)
    steps = model.attention.step_builder(cache.sizes, dcp, mesh.dcp_rank, model.device)
    graph = StepGraph.prompts(model, cache, steps, mesh, 40, 2, 80, 8)
    capture(graph)
    for layer in cache.per_layer:
        layer.latents[BLOCKS] = float("nan")  # captures wrote nothing that stays
    noted = list[tuple[int, list[bool]]]()

    class Noting:
        def __init__(self, layer: int) -> None:
            self.layer = layer

        def record(self) -> None:
            noted.append((self.layer, [bool(each.latents[0, 0].isfinite().all()) for each in cache.per_layer]))

    for layer, starts in enumerate(cache.starts):
        event: Any = Noting(layer)
        starts.append(event)
    size = graph.prompt_size([NUM_TOKENS], [0], num_absorbed)
    assert size is not None
    assert graph._graphs._parts.keys() >= {size}
    requests = StepRequests([NUM_TOKENS], [NUM_TOKENS], [BLOCKS], num_decodes=num_absorbed, segment_len=8)
    graph.run(torch.arange(1, NUM_TOKENS + 1), requests, size)
    graph.release()
    return size.is_whole, noted


@pytest.mark.parametrize("num_absorbed", [0, 1])
def test_layers_record_their_starts(num_absorbed: int, tmp_path: Path) -> None:
    """One graph of a whole step, which is short, records nothing: its rows leave after it."""
    save_tiny("deepseek_v3", tmp_path)
    dcp = DCPConfig(block_size=8)
    ((is_whole, noted),) = run_ranks(1, layers_at_starts, tmp_path, dcp, num_absorbed)
    assert is_whole == bool(num_absorbed)
    num_layers = len(noted[0][1]) if noted else 0
    assert noted == [(layer, [other <= layer for other in range(num_layers)]) for layer in range(num_layers)]
    assert bool(noted) != is_whole
