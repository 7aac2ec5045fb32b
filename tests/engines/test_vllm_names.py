"""The names of vLLM that the plug-in takes, in every version that it says it runs with: what moved is named here."""

from pathlib import Path

import pytest

from dcpmla.integrations.vllm import CHOSEN_BY_VLLM, END_VERSION, FIRST_VERSION
from tests.engines.trees import VERSIONS, vllm_tree
from tests.engines.vllm_names import Name, imported, members_of, moved, uncalled
from tests.support.launchers import ROOT
from tests.support.sources import metadata

PLUG_IN = ROOT / "dcpmla" / "integrations" / "vllm"
# Layers of MLA, and the methods that they call. `backend` replaces the first two on each layer, `impl` has the third.
LAYERS = ("vllm.model_executor.layers.attention.mla_attention", "vllm.models.kimi_k3.nvidia.mla")
CALLED = ("query_gather", "combine", "forward_mqa")


@pytest.mark.parametrize("version", VERSIONS)
def test_every_name_is_there(version: str) -> None:
    """The names that the plug-in imports from vLLM, and the methods that it replaces or overrides."""
    tree = vllm_tree(version)
    lines = [line for folder in (".", "sparse", "pooled") for line in moved(tree, PLUG_IN / folder)]
    registry = imported(PLUG_IN / "__init__.py")["AttentionBackendEnum"]
    members = members_of(tree, registry)
    lines += [f"{'.'.join(registry)} has no {name}" for name in ("CUSTOM", *CHOSEN_BY_VLLM) if name not in members]
    lines += [line for module in LAYERS for line in uncalled(tree, module, CALLED)]
    assert not lines, f"vLLM {version}: {'; '.join(lines)}"


@pytest.mark.parametrize("version", VERSIONS)
def test_batch_invariance_must_be_claimed(version: str) -> None:
    """With VLLM_BATCH_INVARIANT vLLM takes only backends that claim it: the plug-in's for dense MLA alone."""
    tree, name = vllm_tree(version), "supports_batch_invariance"
    base = (tree / "vllm/v1/attention/backend.py").read_text()
    assert f"if use_batch_invariant and not cls.{name}():" in base
    assert f"def {name}(cls) -> bool:\n        return False\n" in base
    assert "use_batch_invariant=envs.VLLM_BATCH_INVARIANT" in (tree / "vllm/v1/attention/selector.py").read_text()
    selector = (tree / "vllm/v1/attention/selector.py").read_text()
    assert "if envs.VLLM_BATCH_INVARIANT and not mamba_attn_backend.supports_batch_invariance():" in selector
    common = (tree / "vllm/model_executor/layers/attention/mla_attention.py").read_text()
    assert name not in common
    assert "self.impl.supports_quant_query_input" in common, "queries would be rounded whatever the plug-in says"
    sources = {str(path.relative_to(PLUG_IN)): path.read_text() for path in PLUG_IN.rglob("*.py")}
    claims = {path: text.partition(f"def {name}(cls) -> bool:\n")[2].split("\n")[0] for path, text in sources.items()}
    expected = {"backend.py": "        return True", "sparse/backend.py": "        return False"}
    assert {path: claim for path, claim in claims.items() if claim} == expected
    assert not any("def validate_configuration" in text for text in (common, *sources.values()))


def test_what_moved_is_named(tmp_path: Path) -> None:
    """In a tree of few files: a name, a module, a method, an argument, a call; inherited ones are found."""
    files = {
        "vllm/__init__.py": "",
        "vllm/base.py": (
            "class Base:\n    def inherited(self, x): ...\n    def older(self, *, only): ...\n"
            "    def abstract(self): raise NotImplementedError\n"
        ),
        "vllm/layer.py": (
            "from vllm.base import Base\n"
            "try:\n    from vllm.fast import Fast\nexcept ImportError:\n    Fast = None\n"
            "class Layer(Base):\n    def run(self, x, y): return self.manager.gather(x)\n"
        ),
        "vllm/tools.py": "from vllm.more import choose\nLIMIT: int = 2\n",
        "vllm/more.py": "def choose(q, k): ...\n",
        "plug_in/impl.py": (
            "from vllm.layer import Fast, Renamed\nfrom vllm.removed import Thing\nfrom vllm.tools import LIMIT\n"
        ),
        "plug_in/names.py": (
            "from vllm.layer import Layer\n"
            "from vllm import tools as helpers\n"
            'METHODS = {Layer: {"run": ("y", "z"), "inherited": ("x",), "older": ("only",), "dropped": (),\n'
            '                   "abstract": ()},\n'
            '           helpers: {"choose": ("k", "v"), "pick": ()}}\n'
        ),
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert moved(tmp_path, tmp_path / "plug_in") == [
        "vllm.layer.Renamed is gone",
        "vllm.removed.Thing is gone",
        "vllm.layer.Layer.run has no argument z",
        "vllm.layer.Layer.dropped is gone",
        "vllm.layer.Layer.abstract is gone",
        "vllm.tools.choose has no argument v",
        "vllm.tools.pick is gone",
    ]
    assert uncalled(tmp_path, "vllm.layer", ("gather", "combine")) == ["vllm.layer no longer calls combine"]
    assert uncalled(tmp_path, "vllm.removed", ("gather",)) == ["vllm.removed is gone"]
    assert members_of(tmp_path, Name("vllm.layer", "Base")) == set()


def test_the_versions_tested_are_those_declared() -> None:
    (requirement,) = metadata()["optional-dependencies"]["vllm"]
    first, end = (".".join(map(str, version)) for version in (FIRST_VERSION, END_VERSION))
    assert requirement == f"vllm>={first},<{end}"
    minors = [tuple(map(int, version.split(".")[:2])) for version in VERSIONS]
    assert minors[0] == FIRST_VERSION
    assert (minors[-1][0], minors[-1][1] + 1) == END_VERSION
