"""Models without the layers that launch the same kernels as others (`ShardedModel.shortened`)."""

from pathlib import Path

import pytest
from torch import nn

from dcpmla.config import DCPConfig
from dcpmla.parallel.linear import Linear
from tests.support.models import tiny_config
from tests.support.ranks import on_ranks
from tests.support.whole_models import load_on_rank


@pytest.mark.parametrize(("name", "kept"), [
    ("deepseek_v4", [0, 1, 2]), ("glm5_next_text", [0, 1, 2, 4]), ("kimi_linear", [0, 1, 2]), ("kimi_k3", [0, 1, 2]),
])  # fmt: skip
@on_ranks(1)
def test_a_layer_of_each_sort_stays(name: str, kept: list[int], tmp_path: Path) -> None:
    """Layers differ by attention, by experts or an MLP, by the sizes of their weights; nothing precedes the first."""
    tiny_config(name).save_pretrained(tmp_path)
    model, _ = load_on_rank(tmp_path, DCPConfig(), load_format="dummy")
    blocks = [*model.hidden_states.blocks]

    def those_kept() -> list[int]:
        with model.shortened():
            return [blocks.index(block) for block in model.hidden_states.blocks]

    assert those_kept() == kept
    assert [*model.hidden_states.blocks] == blocks
    linear = next(module for module in blocks[-1].modules() if isinstance(module, Linear))
    linear.weight = nn.Parameter(linear.weight[:1], requires_grad=False)
    assert those_kept() == sorted({*kept, len(blocks) - 1})
