"""Matrices in 4 bits, byte by byte as the formats' own libraries make them, and cut anywhere."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dcpmla.integrations.checkpoint import Checkpoint
from dcpmla.integrations.families.family import Family
from dcpmla.parallel.formats import dequantize, format_of
from dcpmla.parallel.linear import read_linear

# Integers [8, 16], and zero points of rows.
NUMBERS = torch.tensor(
    [
        [4, 7, -3, -8, -5, 3, -5, -1, 1, -5, -3, -6, -4, -1, -2, 0],
        [0, 4, 2, -7, -2, -1, -1, 6, 0, -7, -3, 1, 5, 0, 1, -4],
        [-5, -8, -5, -3, 6, 7, 7, -8, -6, -5, 0, -7, -5, 5, -5, -5],
        [6, -1, -8, -7, 1, 1, 7, -8, 7, 2, -4, -1, -5, 6, 3, -6],
        [-1, 4, -6, -8, -8, -4, -3, -3, -2, 0, -4, -7, 7, -4, 1, 2],
        [2, 7, 0, -7, -7, -1, 1, 1, -5, -2, -1, 3, 6, -6, 3, -8],
        [6, -5, -3, 4, 1, 2, -4, 3, -4, -2, -4, 7, 7, -4, -5, 4],
        [-4, -4, 0, 6, 7, -4, -5, 2, -1, 7, 5, -3, -3, -8, -7, -3],
    ]
)
ZEROS = torch.tensor([-8, 7, 0, 1, -3, 5, 2, -1])
# What `pack_to_int32` of compressed-tensors 0.20.1 makes of both.
PACKED = (
    *((1941112316, -2039208647), (-411690296, 1234015512), (268325635, 869472306), (261689470, 736326831)),
    *((1430258375, -1454435194), (-1720641286, 187610979), (-1263942338, -1018170268), (-1555044284, 1359306231)),
)
PACKED_ZEROS = 2060818672
# What the loops of AutoAWQ 0.2.9 (awq/modules/linear/gemm.py) make of both + 8.
AWQ = (
    *(1256777532, 1333541903, -2012589515, -518930352, -241790749, 1201120507, 972506611, -1458653945),
    *(1945650729, -157194189, -683326331, 1534718226, 1581121332, 48776407, 465123638, 1344588344),
)
AWQ_ZEROS = 2107614592
SCALES = torch.tensor([0.5, 2.0, 1.0, 0.25, 4.0, 1.0, 0.5, 8.0])


def weight_in(directory: Path, tensors: dict[str, Tensor]) -> Any:
    save_file({f"w.{name}": tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    checkpoint = Checkpoint(directory, rename=partial(Family().module_name, num_layers=4))
    (weight,) = checkpoint.weights("").values()
    return weight


def words(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("layout", ["compressed-tensors", "AWQ"])
def test_words_of_libraries(layout: str, tmp_path: Path) -> None:
    """Cuts run inside words of rows and inside groups."""
    if layout == "AWQ":
        tensors = {"qweight": words(*AWQ)[:, None], "qzeros": words([AWQ_ZEROS]), "scales": SCALES[None].half()}
    else:
        tensors = {"weight_packed": words(*PACKED), "weight_zero_point": words([PACKED_ZEROS])}
        tensors |= {"weight_scale": SCALES[:, None].bfloat16(), "weight_shape": torch.tensor([8, 16])}
    weight, expected = weight_in(tmp_path, tensors), (NUMBERS - ZEROS[:, None]) * SCALES[:, None]
    assert tuple(weight.shape) == (8, 16)
    everything = slice(None)
    for rows, cols in ((everything, everything), (slice(3, 7), slice(3, 11)), (slice(7, 8), slice(8, 16))):
        assert torch.equal(weight[rows, cols], expected[rows, cols])


CODES = torch.tensor([0xA1, 0x43, 0x6D, 0x97], dtype=torch.uint8)  # 0.5 -1 1.5 2 -3 4 6 -0.5
VALUES = torch.tensor([0.5, -1, 1.5, 2, -3, 4, 6, -0.5])


def test_worked_examples(tmp_path: Path) -> None:
    """Of eight numbers, as the formats' descriptions give them, and repeated to whole groups."""
    integers = torch.tensor([-7, -6, -5, -4, 0, 1, 2, 7])
    cases: list[tuple[dict[str, Tensor], Tensor]] = [
        (
            {"qweight": words([0x87654321 - (1 << 32)]).repeat(16, 1), "scales": torch.full((1, 1), 0.5).half()},
            torch.tensor([-3.5, -3, -2.5, -2, -1.5, -1, -0.5, 0]).repeat(16),  # GPTQ
        ),
        (
            {
                "weight": torch.tensor([0xA9, 0xCB, 0x10, 0x72], dtype=torch.uint8).view(torch.int8).repeat(1, 16),
                "weight_scale_inv": torch.full((1, 1), 0.5),
            },
            (integers * 0.5).repeat(16),  # w4afp8
        ),
        (
            {"weight_packed": CODES.repeat(1, 4), "weight_scale": torch.full((1, 1), 125, dtype=torch.uint8)},
            VALUES.repeat(4) / 4,  # MXFP4
        ),
    ]
    scales = torch.full((1, 2), 0x75, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for name, factor in (("weight_scale_2", 2.0**-10), ("weight_global_scale", 1024.0)):
        tensors = {"weight": CODES.repeat(1, 4), "weight_scale": scales, name: torch.tensor([factor])}
        cases.append((tensors, VALUES.repeat(4) * 208 / 1024))  # NVFP4
    for number, (tensors, expected) in enumerate(cases):
        (tmp_path / str(number)).mkdir()
        weight = weight_in(tmp_path / str(number), tensors)
        assert torch.equal(weight[:, :], expected[None])
        kept = read_linear({"w": weight}, "w", (1, len(expected)))
        assert format_of(kept) is not None
        assert torch.equal(dequantize(kept, torch.float32), expected[None])
