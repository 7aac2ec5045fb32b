"""Whole answers of replies, as `collect` makes them."""

from collections.abc import Iterable

from dcpmla.serving.messages import Output
from dcpmla.serving.replies import Reply
from dcpmla.serving.shown import Json


def whole_of(reply: Reply, outputs: Iterable[tuple[int, Output]]) -> Json:
    """Return the whole answer of a reply from outputs, each with the index of its choice."""
    for index, output in outputs:
        reply.add(index, output)
    return reply.whole()
