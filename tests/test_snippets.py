"""The Python of README and docs, and the examples: they run, as they stand, from the repository's root."""

import re
from pathlib import Path

import pytest

from tests.support.launchers import run_forked, unattended
from tests.support.sources import metadata

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *(ROOT / "examples").glob("*/README.md")]
SNIPPETS = {
    f"{page.relative_to(ROOT)} {number}": snippet
    for page in PAGES
    for number, snippet in enumerate(re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE))
}
# What a snippet that does not stand alone takes as given: a stack of one's own, its weights and a step of two requests.
STACK = """
from datetime import timedelta
import torch
from dcpmla.integrations.families.table import attention_of
from dcpmla import *
from dcpmla.job.bootstrap import distributed, read_launcher
from tests.support.models import random_model, tiny_config

ranks = read_launcher("cpu")
joined = distributed(ranks, timedelta(minutes=1))
joined.__enter__()
device, dtype = ranks.device, torch.float32
config = tiny_config("deepseek_v3")
config.v_head_dim = 128
attention = random_model(config).model.layers[0].self_attn
weights = {name: tensor.detach() for name, tensor in attention.state_dict().items()}
query_lens, seq_lens, block_tables = [1, 5], [9, 12], [[0], [1]]
hidden_states = torch.randn(6, config.hidden_size)
cos_sin = torch.randn(6, config.qk_rope_head_dim)
dcp = DCPConfig(tensor_parallel_size=ranks.num_ranks, decode_context_parallel_size=ranks.num_ranks)
cache = LatentCache(LatentCache.plan(attention_of(config).config, dcp, 1, [64, 64], dtype), device)
for tensor in cache.tensors:
    tensor.zero_()
torch.set_grad_enabled(False)
"""
LAYER = (
    STACK
    + """
mesh = init_mesh(ranks.num_ranks, ranks.num_ranks)
exchange = select_exchange(dcp, mesh.dcp_group, device).exchange
model = layer = MLAAttention(attention_of(config).config, Placement(dcp, mesh, exchange, dtype, device))
layer.load_weights(weights)
requests = StepRequests(query_lens, seq_lens, block_tables)
step = StepBuilder(dcp, mesh.dcp_rank, device).build(requests).with_cos_sin(cos_sin)
"""
)
GIVEN = {"README.md 1": STACK, "docs/quantization.md 0": LAYER, "docs/quantization.md 1": LAYER}
RANKS = {"docs/quantization.md 0": 1, "docs/quantization.md 1": 1}  # of all others: 2
AFTER = {
    "README.md 1": "assert out.shape == hidden_states.shape and out.isfinite().all()",
    "docs/quantization.md 0": "assert values.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32",
}
LEAVE = "\njoined.__exit__(None, None, None)\n"


def test_the_snippets_are_found() -> None:
    assert {"README.md 0", "README.md 1", "docs/sparse.md 0"} <= set(SNIPPETS)
    assert {*GIVEN, *RANKS, *AFTER} <= set(SNIPPETS)


@pytest.mark.parametrize("name", SNIPPETS)
def test_a_snippet_runs(name: str, tmp_path: Path) -> None:
    script = tmp_path / "snippet.py"
    given = GIVEN.get(name, "")
    script.write_text("\n".join([given, SNIPPETS[name], AFTER.get(name, ""), LEAVE if given else ""]))
    first, *others = run_forked(unattended([script], RANKS.get(name, 2)))
    if name == "README.md 0":
        answers = first.stdout.splitlines()
        assert answers[0].startswith("123 ")
        assert answers[1].startswith("456 ")
        assert {"0 123", "1 456"} <= set(answers[2:])
    assert not any(other.stdout for other in others)


# The last lines of the examples of layers, the same of any number of ranks.
LAST_LINES = {
    "examples/layer.py": "tokens 47 to 48: [-0.016, -0.025, -0.028, ",
    "examples/sparse_layer.py": "tokens 47 to 48: [0.69, -1.729, 0.867, 0.354], selected [1, 3, 5, 6, 9, 10, 13, 16, ",
    "examples/compressed_layer.py": "tokens 67 to 68: [0.733, -0.465, -2.331, 2.035]",
}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("example", LAST_LINES)
def test_the_layers_examples(example: str, num_ranks: int) -> None:
    first, *_ = run_forked(unattended([ROOT / example], num_ranks))
    lines = first.stdout.splitlines()
    assert len(lines) == 9
    assert lines[-1].startswith(LAST_LINES[example])


def test_the_page_links_the_layers_examples() -> None:
    page = (ROOT / "docs" / "plugging_in.md").read_text()
    assert set(re.findall(r"\(\.\./(examples/\w+\.py)\)", page)) == LAST_LINES.keys()


def test_what_pip_installs_is_declared() -> None:
    """The extras that pages name, of the package or of a checkout, are pyproject.toml's."""
    declared = metadata()
    found = re.findall(r"pip install '([\w.]+)\[([\w,]+)\]'", "".join(page.read_text() for page in PAGES))
    assert {package for package, _ in found} == {".", declared["name"]}
    extras = {extra for _, extras in found for extra in extras.split(",")}
    assert {"vllm", "sglang"} <= extras <= set(declared["optional-dependencies"])


def test_the_stream_s_example() -> None:
    needle = ROOT / "examples" / "needle" / "model"
    first, other = run_forked(unattended([ROOT / "examples" / "stream.py", needle, 2], 2))
    lines = first.stdout.splitlines()
    assert lines[:2] == ["0: '123'", "1: '456'"]  # the answers, before the requests are finished
    assert sum(line.startswith("0: ' ") for line in lines) == 3
    assert "0: length, {'queue_seconds': " in first.stdout
    assert other.stdout == ""


def test_the_page_of_variables_lists_what_is_read() -> None:
    page, pattern = (ROOT / "docs" / "environment.md").read_text(), r'environ(?:\.\w+)?[\[(]"(\w+)"'
    read = {name for file in (ROOT / "dcpmla").rglob("*.py") for name in re.findall(pattern, file.read_text())}
    assert len(read) >= 12
    assert not [name for name in sorted(read) if f"`{name}`" not in page]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_example_of_two_jobs(num_ranks: int) -> None:
    """All rows of the prompts come from the job that prefills them."""
    needle = ROOT / "examples" / "needle" / "model"
    outputs = [
        run.stdout for run in run_forked(unattended([ROOT / "examples" / "disaggregated.py", needle], num_ranks))
    ]
    printed = outputs.pop(num_ranks // 2).splitlines()
    assert [line.split(",")[0] for line in printed] == ["0: '123 123 123 123'", "1: '456 149 456 149'"]
    num_bytes = {int(re.findall(r"([\d,]+) bytes", line)[0].replace(",", "")) for line in printed}
    num_tokens = 2 * -(-243 // (num_ranks // 2))  # of both prompts, on the first rank
    assert num_bytes == {num_tokens * 2 * 96 * 2}  # layers, values of a row, bytes of a value
    assert not any(outputs)
