"""Commands on transfers between jobs, as every rank follows them."""

import logging
from collections.abc import Mapping

from dcpmla.runtime.engine import Engine
from dcpmla.runtime.request import Request, TokenLogprobs
from dcpmla.serving.messages import Connect, Disconnect, First, Lose, Pull
from dcpmla.transfer.transport import Peer

_logger = logging.getLogger(__name__)


def follow(
    engine: Engine, requests: Mapping[int, Request], command: Connect | Disconnect | Pull | First | Lose
) -> None:
    """Follow a command of the first rank.

    Args:
        requests: Unfinished requests by id. Commands on others come too late.
    """
    handoffs = engine.handoffs
    assert handoffs is not None
    match command:
        case Connect():
            try:
                handoffs.connect(Peer(command.engine, command.layout, command.agents))
            except ValueError as error:  # the HTTP process has compared the layouts, so this does not happen
                _logger.error("the ranks do not connect to engine %s: %s", command.engine, error)
        case Disconnect():
            handoffs.disconnect(command.engine)
        case _:
            request = requests.get(command.request_id)
            if request is None:
                return
            match command:
                case Pull():
                    handoffs.pull(request, command.engine, command.handoff)
                case First():
                    take_first(engine, request, command.token)
                case Lose():
                    handoffs.lose(request, command.is_local)


def take_first(engine: Engine, request: Request, token: TokenLogprobs) -> None:
    """Take a request's first token from another job."""
    engine.take_first(request, token.token_id, None if token.logprob is None else token)


def transfer_totals(engine: Engine) -> dict[tuple[str, ...], float]:
    """Return `Report.transfer_totals`."""
    if engine.handoffs is None:
        return {}
    totals: dict[tuple[str, ...], float] = {}
    for direction, side in (("sent", engine.handoffs.sent), ("received", engine.handoffs.received)):
        totals |= {
            ("bytes", direction): side.bytes,
            ("seconds", direction): side.seconds,
            ("requests", direction, "done"): side.num_done,
            ("requests", direction, "failed"): side.num_failed,
        }
    return totals
