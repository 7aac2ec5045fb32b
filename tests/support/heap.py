"""Quick collections of the heap."""

import gc

import pytest


@pytest.fixture(scope="session", autouse=True)
def frozen_heap() -> None:
    """Exclude the objects of imported modules from collections: a full one would take half a second."""
    gc.collect()
    gc.freeze()
