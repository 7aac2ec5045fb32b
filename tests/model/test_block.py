"""Parts of the decoder: who is handed rows in fp8, and the head cut over ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dcpmla.comm.reduce import CollectiveReduce
from dcpmla.model.block import Decoder, DecoderBlock, VocabHead
from dcpmla.parallel.linear import Linear
from dcpmla.parallel.quantized import NormedRows, PlainRows, plain, quantize_groups
from tests.support.ranks import run_ranks


class Part(nn.Module):
    """Attention or an MLP that keeps what it is given."""

    def __init__(self, takes_quantized: bool) -> None:
        super().__init__()
        self.takes_quantized = takes_quantized

    def forward(self, x: PlainRows, *_: object) -> Tensor:
        self.given = x
        return plain(x).sin()

    partial = forward


def check_codes() -> None:
    """Check that codes are made where the next part takes them, and change nothing else."""
    outs, generator = [], torch.Generator().manual_seed(0)
    embedding = torch.randn(5, 128, generator=generator)
    for takes_quantized in ((False,) * 6, (True, True, False, False, True, True)):
        parts = [Part(one) for one in takes_quantized]
        reduce = CollectiveReduce(dist.group.WORLD)
        norms = torch.ones(7, 128)
        blocks = [
            DecoderBlock(at, parts[at], parts[at + 1], norms[at], norms[at + 1], 1e-6, reduce)  # type: ignore[arg-type]
            for at in (0, 2, 4)
        ]
        outs.append(Decoder(embedding, norms[0], blocks, 1e-6)(torch.tensor([3, 0, 3]), None, None))
        assert isinstance(parts[0].given, Tensor)  # nobody has summed before the first
        for part in parts[1:]:
            assert isinstance(part.given, NormedRows) == part.takes_quantized
            if isinstance(part.given, NormedRows):
                for got, wanted in zip(part.given.quantized, quantize_groups(part.given.plain, 128), strict=True):
                    assert torch.equal(got.float(), wanted.float())
    assert torch.equal(*outs)


def test_codes() -> None:
    run_ranks(1, check_codes)


def check_best() -> None:
    """Check the best tokens against those of all logits, many of them equal, also between ranks."""
    size, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.randint(-1, 2, (24, 3), generator=generator).to(dtype)
        x = torch.randint(-1, 2, (50, 3), generator=generator).to(dtype)
        linear = Linear(3, 24 // size, dtype=dtype, device=torch.device("cpu"))
        linear.load(weight.chunk(size)[rank])
        head = VocabHead(linear, 24, dist.group.WORLD)
        logits = x.float() @ weight.float().T
        assert torch.equal(head(x), logits)
        assert torch.equal(head.best(x), logits.argmax(-1))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_best_token_is_the_lowest_of_all_ranks(size: int) -> None:
    run_ranks(size, check_best)
