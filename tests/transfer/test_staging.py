"""Sizes of staging slots."""

import pytest
import torch

from dcpmla.integrations.transfers import new_staging
from dcpmla.transfer.staging import MOST_SLOTS, NUM_SLOTS, slot_size

GIB = 1 << 30


@pytest.mark.parametrize(
    ("gb_per_s", "memory_gib", "slot_mib"),
    [
        (450, 139, 128),  # 450 MB a millisecond in four slots: 107 MiB each
        (900, 178, 128),  # 1 GiB is the most
        (450, 24, 32),  # of 24 GiB a 64th, 384 MiB
        (50, 139, 16),
        (10, 64, 4),
        (0.1, 64, 1),
    ],
)
def test_the_slots_of_a_transfer_fill_a_link(gb_per_s: float, memory_gib: int, slot_mib: int) -> None:
    assert slot_size(gb_per_s, memory_gib * GIB) == slot_mib << 20


def test_one_engine_holds_the_slots_of_a_transfer() -> None:
    assert NUM_SLOTS == 2 * MOST_SLOTS
    assert NUM_SLOTS * slot_size(1e4, 1 << 50) == GIB


@pytest.mark.parametrize("is_within_host", [True, False])
def test_slots_of_a_cpu_are_for_its_memory(is_within_host: bool) -> None:
    assert new_staging(torch.device("cpu"), is_within_host).shape == (NUM_SLOTS, 4 << 20)
