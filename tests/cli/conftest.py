"""A frozen heap, because each command ends with a full collection."""

from tests.support.heap import frozen_heap

__all__ = ["frozen_heap"]
