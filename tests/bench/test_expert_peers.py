"""What surrounds the products of expert peers, in Triton's interpreter, with products in plain torch; a file of vLLM's
without the rest; their rows in `bench experts`.
"""

import os
import stat
import sys
import tarfile
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dcpmla.bench.experts import SHAPES, Shape
from dcpmla.cache.formats import FP8
from dcpmla.comm.terms import whole
from dcpmla.model.experts import ExpertWeights, compute_experts
from dcpmla.parallel.formats import BLOCK, Quantized, dequantize
from tests.attention.test_decode_compile import compile_for_hopper
from tests.support.benches import measure
from tests.support.interpreter import convert_as_torch
from tests.support.shared_memory import run_interpreted

HIDDEN, WIDTH, EXPERTS, TOP_K = 384, 1152, 12, 3


def product(codes: Tensor, scales: Tensor, weight: Quantized, expert: int) -> Tensor:
    values = (codes.float().unflatten(1, (-1, BLOCK)) * scales[..., None]).flatten(1)
    return values @ dequantize(weight.map(lambda part: part[expert]), torch.float32).T


class FakeDeepGemm:
    """DeepGEMM's contiguous layout with the ends of groups; each group begins at a multiple of the alignment."""

    def set_pdl(self, is_on: bool) -> None: ...

    def set_mk_alignment_for_contiguous_layout(self, rows: int) -> None:
        self.rows = rows

    def m_grouped_fp8_gemm_nt_contiguous(
        self, x: tuple[Tensor, Tensor], weight: Quantized, out: Tensor, ends: Tensor, use_psum_layout: bool
    ) -> None:
        assert use_psum_layout
        assert (ends.dtype, ends.shape) == (torch.int32, (EXPERTS,))
        assert ends.is_contiguous()
        assert len(x[0]) % self.rows == 0
        assert x[1].stride() == (1, len(x[0]))
        out.fill_(torch.nan)
        start = 0
        for expert, end in enumerate(ends.tolist()):
            out[start:end] = product(x[0][start:end], x[1][start:end], weight, expert).to(out.dtype)
            start = -(-end // self.rows) * self.rows


def multiply_blocks(
    x: tuple[Tensor, Tensor],
    weight: Quantized,
    out: Tensor,
    routes: Tensor | None,
    experts: Tensor,
    num_rows: Tensor,
    top_k: int,
    rows: int,
) -> None:
    """Multiply sorted routes; None: each is a block of its own."""
    assert x[1].is_contiguous()
    out.fill_(torch.nan)
    for block in range(-(-int(num_rows) // rows)):
        ids = torch.tensor([block]) if routes is None else routes[block * rows : (block + 1) * rows]
        ids = ids[ids < len(out)]
        tokens = ids // top_k
        assert len(ids)
        out[ids] = product(x[0][tokens], x[1][tokens], weight, int(experts[block])).to(out.dtype)


class FakeVllm:
    """Its kernel, which sorts no routes of few tokens."""

    def get_moe_configs(self, num_experts: int, *_: Any) -> dict[int, Any] | None:
        return {1: {"BLOCK_SIZE_M": 8}, 64: {"BLOCK_SIZE_M": 16}} if num_experts == EXPERTS - 1 else None

    def invoke_fused_moe_triton_kernel(
        self, x: Tensor, codes: Tensor, out: Tensor, x_scales: Tensor, scales: Tensor, *given: Any, **options: Any
    ) -> None:
        order, rows = given[1:], options["config"]["BLOCK_SIZE_M"]
        multiply_blocks((x, x_scales), Quantized(codes, scales), out[0], *order, options["top_k"], rows)


def fake_humming() -> Any:
    """Return its indexed products, with tiles of other heights for each."""

    def prepare(tensors: dict[str, Tensor], num_rows: int, *_: Any, **__: Any) -> tuple[Any, dict[str, Tensor]]:
        return SimpleNamespace(shape_n=num_rows), tensors

    def pick(config: Any, **options: Any) -> dict[str, Any]:
        return {"block_shape": (24 if config.shape_n == 2 * WIDTH and options["shape_m"] > 20 else 8, 256, 128)}

    def forward(config: Any, *, inputs: Tensor, input_scale: Tensor, outputs: Tensor, **given: Any) -> Tensor:
        weight = Quantized(given["weight"].view(FP8), given["weight_scale"])
        order = given["sorted_ids"], given["expert_ids"], given["num_tokens_padded"]
        rows = given["tuning_config"]["block_shape"][0]
        multiply_blocks((inputs, input_scale), weight, outputs, *order, given["top_k"], rows)
        return outputs

    def schema(**_: Any) -> None: ...

    return SimpleNamespace(
        transform=SimpleNamespace(prepare_and_transform_humming_tensors=prepare),
        schema=SimpleNamespace(HummingWeightSchema=schema, HummingInputSchema=schema),
        tune=SimpleNamespace(get_heuristics_config=pick),
        forward=SimpleNamespace(humming_forward=forward),
    )


def check_peers() -> None:
    """Compare with ours, whose rows are not quantized here; the last expert gets no route of few tokens."""
    from benchmarks.peers.experts import DeepGemm, Experts, Humming, Vllm

    convert_as_torch()
    generator = torch.Generator().manual_seed(0)

    def weight(num_rows: int, num_cols: int) -> Quantized:
        values = torch.randn(EXPERTS, num_rows, num_cols, generator=generator)
        scales = torch.rand(EXPERTS, num_rows // BLOCK, num_cols // BLOCK, generator=generator) + 0.5
        return Quantized(values.to(FP8), scales * num_cols**-0.5)

    weights = ExpertWeights(weight(2 * WIDTH, HIDDEN), weight(HIDDEN, WIDTH))
    peers: dict[str, Experts] = {
        "deep_gemm": DeepGemm(FakeDeepGemm(), weights),
        "humming": Humming(fake_humming(), weights),
        "vllm": Vllm(FakeVllm(), weights),
    }
    for num_tokens in (1, 9, 90):
        num_hit = EXPERTS if num_tokens == 90 else EXPERTS - 1
        ids = torch.rand(num_tokens, num_hit, generator=generator).topk(TOP_K).indices.int()
        x = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16()
        expert_weights = torch.rand(num_tokens, TOP_K, generator=generator)
        wanted = whole(compute_experts(x.float(), ids, expert_weights, weights))
        for name, compute in peers.items():
            out = compute(x, ids, expert_weights)
            error = float((out.float() - wanted).norm() / wanted.norm())
            assert out.shape == x.shape
            assert out.dtype == x.dtype
            assert error < 0.06, (name, num_tokens, error)


@pytest.mark.thorough
def test_peers_compute_as_ours() -> None:
    pytest.importorskip("triton")
    run_interpreted(1, check_peers)


def test_a_file_without_the_rest_of_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from benchmarks.peers.libraries import load_vllm

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "fused_moe.py").write_text(
        "import vllm.envs as envs\nfrom vllm.logger import init_logger\nfrom vllm.triton_utils import tl, triton\n"
        "from vllm.moe.config import (\n    Config,\n)\n\nlogger = init_logger(__name__)\n\n@triton.jit\n"
        "def kernel(x):\n    pass\n\ndef launch(config: Config | None = Config()) -> tl.dtype:\n"
        "    logger.info('')\n    return tl.float32 if not envs.VLLM_BATCH_INVARIANT else None\n"
    )
    with tarfile.open(tmp_path / "vllm_moe.tar.xz", "w:xz") as file:
        file.add(tmp_path / "fused_moe.py", "fused_moe.py")
    for _ in range(2):  # unpacked, then found
        assert str(load_vllm(tmp_path).launch()) == "fp32"
    assert not [name for name in sys.modules if name.startswith("vllm")]
    assert stat.filemode((tmp_path / f"dcpmla-peers-{os.geteuid()}").stat().st_mode) == "drwx------"


@pytest.mark.parametrize("kind", ["open", "file", "link", "another user's"])
def test_a_folder_that_others_can_write_is_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder has a predictable name in a directory that all users share, and its code is imported."""
    pytest.importorskip("triton")
    from benchmarks.peers.libraries import load_vllm

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    owner = os.geteuid()
    user = owner + (kind == "another user's")
    monkeypatch.setattr(os, "geteuid", lambda: user)
    folder, target = tmp_path / f"dcpmla-peers-{user}", tmp_path / "target"
    target.mkdir(mode=0o700)
    mode = {"open": "drwxrwxrwx", "file": "-rw-------", "link": "lrwxrwxrwx"}.get(kind, "drwx------")
    if kind == "link":
        folder.symlink_to(target)
    elif kind == "file":
        folder.touch(mode=0o600)
    else:
        folder.mkdir(mode=0o700)
        folder.chmod(0o777 if kind == "open" else 0o700)
    with tarfile.open(tmp_path / "vllm_moe.tar.xz", "w:xz"):
        pass
    with pytest.raises(ValueError, match=f"^--peers: {folder} has mode {mode} and belongs to user {owner}; it must be"):
        load_vllm(tmp_path)
    assert list(target.iterdir()) == []


POINTERS = {"scales_ptr": "*fp32", "out_scales_ptr": "*fp32", "weights_ptr": "*fp32"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "pointers", "constants"),
    [
        ("sort", {}, {"ROWS": 72, "PADDING": 128, "BINS": 512, "CHUNK": 4096}),
        ("gather", {"codes_ptr": "*u8", "out_ptr": "*u8"}, {"TOP_K": 9, "WIDTH": 7168, "COLUMNS": 8192, "GROUPS": 64}),
        ("gate", {"x_ptr": "*bf16", "codes_ptr": "*fp8e4nv"}, {"WIDTH": 512, "GROUPS": 4}),
        ("gate", {"x_ptr": "*bf16", "codes_ptr": "*fp8e4nv"}, {"WIDTH": 1408, "GROUPS": 8, "routes_ptr": None}),
        ("sum", {"x_ptr": "*bf16", "out_ptr": "*bf16"}, {"TOP_K": 9, "COLUMNS": 1024}),
    ],
)
def test_kernels_compile(name: str, pointers: dict[str, str], constants: dict[str, Any]) -> None:
    pytest.importorskip("triton")
    from triton.compiler import ASTSource

    from benchmarks.peers import kernels

    kernel = getattr(kernels, f"{name}_kernel")
    types = {argument: "*i32" for argument in kernel.arg_names if argument.endswith("_ptr")} | POINTERS | pointers
    _, said = compile_for_hopper(kernel, ASTSource, types, constants)
    assert "0 bytes spill stores" in said


@pytest.mark.thorough
@pytest.mark.usefixtures("one_process_on_cpu")
def test_peers_get_rows_or_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that cannot be loaded or run are left out; the others are measured over fp8."""
    pytest.importorskip("triton")
    from benchmarks.peers import experts as expert_peers

    monkeypatch.setitem(SHAPES, "v3-tp4", Shape(256, 128, 6, 2, 1))

    def fail(_: Path, weights: ExpertWeights) -> expert_peers.Experts:
        raise AssertionError("no nvcc\nhere")

    def make(_: Path, weights: ExpertWeights) -> expert_peers.Experts:
        return lambda *routed: whole(compute_experts(*routed, weights))

    peers = {"fake": (Path, make), "broken": (Path, fail), "deep_gemm": expert_peers.PEERS["deep_gemm"]}
    monkeypatch.setattr(expert_peers, "PEERS", peers)
    measured = measure(tmp_path, f"experts --tokens 1,5 --shape v3-tp4 --weights bf16,fp8 --peers {tmp_path}")
    rows = [(row["weights"], row["tokens"], row["kernel"]) for row in measured]
    ours = [("bf16", 1, "dcpmla"), ("bf16", 5, "dcpmla")]
    assert rows == ours + [("fp8", tokens, kernel) for tokens in (1, 5) for kernel in ("dcpmla", "fake")]
    printed = capsys.readouterr().out
    assert "WRONG" not in printed
    assert [line for line in printed.splitlines() if line.startswith("left out")] == [
        f"left out: deep_gemm: --peers is {tmp_path}, which has no deep_gemm.tar.xz",
        "left out: broken of v3-tp4, fp8, tokens 1: no nvcc",
        "left out: broken of v3-tp4, fp8, tokens 5: no nvcc",
    ]
