"""The serving loop that every rank runs: commands in, one step of the engine after the other, reports out.

The first rank posts the HTTP process's commands, which a step brings to all ranks, so that they add and abort alike.
"""

import logging
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from dcpmla.integrations.model_files import read_encoder, read_model_type
from dcpmla.integrations.open_model import ModelFiles
from dcpmla.runtime.agreement import News
from dcpmla.runtime.block_events import record_events, take_events
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.in_flight import StepEvents
from dcpmla.runtime.request import Request, TokenLogprobs
from dcpmla.serving.frontend import Frontend
from dcpmla.serving.known_prompts import KnownPrompts
from dcpmla.serving.messages import (
    Abort,
    Close,
    Connect,
    Disconnect,
    Drain,
    First,
    Lose,
    Output,
    Pull,
    Report,
    Seen,
    Started,
    Stop,
    Stopped,
    Submit,
    Wanted,
    pack_tokens,
    unpack_commands,
    unpack_tokens,
)
from dcpmla.transfer.transport import Peer

if TYPE_CHECKING:  # It needs the extra `events`.
    from dcpmla.serving.kv_publisher import EventPublisher

_logger = logging.getLogger(__name__)
_POLL = 0.005  # seconds between two steps that only look at transfers
_IDLE = 1.0  # seconds between two steps of an idle engine, in which the ranks show that they run


class ServingLoop:
    """The engine of a server.

    Args:
        frontend: The HTTP process; None on every rank but the first.
        publisher: Publisher of the changes of the cache; None on other ranks than the first, and without KV events.
    """

    def __init__(self, engine: Engine, frontend: Frontend | None, publisher: "EventPublisher | None" = None) -> None:
        self._engine, self._frontend, self._publisher = engine, frontend, publisher
        if publisher is not None:
            record_events(engine.allocator, engine.scheduler.tier)
        engine.stops = None  # The HTTP process makes all texts, and finds stop strings in them.
        self._requests: dict[int, Request] = {}
        self._known = KnownPrompts(engine.allocator.block_tokens)
        self._outputs: list[Output] = []
        self._num_sent = dict[int, int]()  # new tokens of each request that the HTTP process knows
        self._told = threading.Event()  # set by a signal to this rank
        self._is_draining = self._is_closed = False

    def stop(self) -> None:
        """Ask for the end of the job: take no more requests, finish the open ones. May be called on any rank, from any
        thread.
        """
        self._told.set()

    def run(self) -> None:
        """Serve until the HTTP process, once the job is to stop, sends its last command. Collective."""
        while not self._is_closed or self._engine.has_requests:
            if self._frontend is not None and self._engine.is_idle:
                self._frontend.wait(_POLL if self._engine.has_transfers else _IDLE)
            commands = b"" if self._frontend is None else self._frontend.take()
            self._engine.post(News(commands, is_told=self._told.is_set() and not self._is_draining))
            try:
                events = self._engine.step()
                self._follow(events.news)
            except ValueError as error:  # Requests are checked, commands well-formed: the traceback is wanted.
                raise RuntimeError("serving failed") from error
            for each in (events, self._engine.take_events()):  # commands may bring tokens of other jobs
                self._take(each)
            self._report()
        if self._frontend is not None:
            self._frontend.send(Stopped())
            self._frontend.close()

    def _take(self, events: StepEvents) -> None:
        """Queue what clients and other jobs wait for."""
        if self._frontend is not None:
            for request in events.changed:
                self._collect(request)
            for request in events.wanted:
                request_id, params = int(request.request_id), request.params
                prompt = pack_tokens(request.prompt_token_ids)
                self._frontend.send(Wanted(request_id, prompt, params, request.cache_salt))
        for request in events.finished:
            self._forget(int(request.request_id))
            if request.error is not None:
                reason = None if isinstance(request.error, ValueError) else "error"  # the client's mistake, or not
                output = Output(int(request.request_id), finish_reason=reason, error=str(request.error))
                self._outputs.append(output)

    def _follow(self, news: News) -> None:
        """Follow the first rank's commands, and a signal to any rank."""
        if news.is_told and not self._is_draining:
            self._is_draining = True
            if self._frontend is not None:
                self._frontend.send(Drain())
        for command in unpack_commands(news.content):
            match command:
                case Submit():
                    self._submit(command)
                case Abort():
                    for request_id in command.request_ids:
                        self._abort(request_id)
                case Seen():
                    for request_id, num_tokens in command.nums_tokens.items():
                        if request_id in self._requests:
                            self._requests[request_id].num_seen_tokens = num_tokens
                case Connect() | Disconnect():
                    self._link(command)
                case Close():
                    self._is_closed = True
                case _ if command.request_id in self._requests:  # otherwise it has ended meanwhile
                    self._change(self._requests[command.request_id], command)

    def _link(self, command: Connect | Disconnect) -> None:
        """Exchange blocks with another job, or no longer."""
        handoffs = self._engine.handoffs
        assert handoffs is not None
        if isinstance(command, Disconnect):
            handoffs.disconnect(command.engine)
            return
        try:
            handoffs.connect(Peer(command.engine, command.layout, command.agents))
        except ValueError as error:  # The HTTP process has compared the layouts, so this does not happen.
            _logger.error("the ranks do not connect to engine %s: %s", command.engine, error)

    def _change(self, request: Request, command: Stop | First | Pull | Lose) -> None:
        """Follow a command on an unfinished request."""
        engine = self._engine
        match command:
            case Stop():
                self._forget(command.request_id)
                engine.stop(request, command.num_tokens)
            case First():
                token = command.token
                engine.take_first(request, token.token_id, None if token.logprob is None else token)
            case _:
                assert engine.handoffs is not None
                if isinstance(command, Pull):
                    engine.handoffs.pull(request, command.engine, command.handoff)
                else:
                    engine.handoffs.lose(request, command.is_local)

    def _submit(self, command: Submit) -> None:
        """Add a request for each choice, each with its own seed: all requests, or none."""
        try:
            prompt = self._engine.prompt(unpack_tokens(command.prompt), command.cache_salt)
            self._known.add(prompt)
            for request_id, seed in zip(command.request_ids, command.seeds, strict=True):
                self._requests[request_id] = request = self._engine.add(
                    prompt,
                    replace(command.params, seed=seed),
                    request_id=request_id,
                    keep_logprobs=self._frontend is not None,
                    handoff=command.move.handoff,
                    reader=command.move.reader,
                    source=command.move.source,
                )
                if command.move.first is not None:
                    self._change(request, First(request_id, command.move.first))
        except ValueError as error:  # on every rank alike
            for request_id in command.request_ids:
                self._abort(request_id)
                self._outputs.append(Output(request_id, error=str(error)))

    def _abort(self, request_id: int) -> None:
        request = self._forget(request_id)
        if request is not None:  # otherwise it has just finished
            self._engine.abort(request)

    def _forget(self, request_id: int) -> Request | None:
        self._num_sent.pop(request_id, None)
        return self._requests.pop(request_id, None)

    def _collect(self, request: Request) -> None:
        """Queue an output with the new tokens of a request that was not aborted; an error follows the step."""
        request_id = int(request.request_id)
        if request.error is not None or request_id not in self._requests:
            return
        num_sent, self._num_sent[request_id] = self._num_sent.get(request_id, 0), len(request.token_ids)
        self._outputs.append(
            Output(
                request_id,
                token_ids=tuple(request.token_ids[num_sent:]),
                logprobs=_taken(request.logprobs),
                finish_reason=request.finish_reason,
                num_cached_tokens=request.num_cached_tokens,
                queue_seconds=0.0 if request.scheduled_time is None else request.scheduled_time - request.arrival_time,
                prompt_logprobs=_taken(request.prompt_logprobs),
            )
        )

    def _report(self) -> None:
        """Send what the step computed, log probabilities of prompts before their first tokens included."""
        for request_id, request in self._requests.items():
            if request.prompt_logprobs:
                self._outputs.append(Output(request_id, prompt_logprobs=_taken(request.prompt_logprobs)))
        outputs, self._outputs = self._outputs, []
        if self._frontend is None:
            return
        more: dict[tuple[str, ...], float] = {}
        if self._publisher is not None:
            allocator = self._engine.allocator
            events = take_events(allocator, self._engine.scheduler.tier)
            self._publisher.publish(events, allocator.block_tokens)
            more = self._publisher.totals()
        engine, num_seen = self._engine, [(each.token_ids, each.num_seen_tokens) for each in self._requests.values()]
        self._frontend.send(
            Report(
                outputs,
                num_bytes=self._frontend.num_taken,
                num_running=len(engine.scheduler.running),
                num_waiting=len(engine.scheduler.waiting),
                cache_use=engine.cache_use(),
                totals=_totals(engine) | more,
                readers=[] if engine.handoffs is None else engine.handoffs.readers,
                num_unseen=max((len(tokens) - num for tokens, num in num_seen if num is not None), default=0),
            )
        )


def started(engine: Engine, files: ModelFiles, link: Peer | None = None) -> Started:
    """Return the HTTP process's message on an engine.

    Args:
        link: This job, as other jobs see it; None if it exchanges no blocks.
    """
    sizes = engine.cache.sizes
    num_cache_tokens = sizes.num_blocks * sizes.block_tokens
    return Started(
        str(files.directory),
        engine.model.vocab_size,
        min(engine.max_model_len, num_cache_tokens),
        engine.scheduler.max_num_seqs,
        num_cache_tokens,
        read_model_type(files.directory),
        files.config.model_type,
        read_encoder(files.directory),
        eos_token_ids=engine.grammars.eos_token_ids,
        no_grammars=engine.grammars.load(),
        link=None if link is None else Connect(*link),
        block_tokens=sizes.block_tokens,
    )


def _totals(engine: Engine) -> dict[tuple[str, ...], float]:
    """Return `Report.totals`."""
    stats, handoffs = engine.stats, engine.handoffs
    totals: dict[tuple[str, ...], float] = {
        ("compilations",): len(engine.compilations),
        ("preemptions",): stats.num_preemptions,
        ("drafts",): stats.num_drafts,
        ("draft_tokens",): stats.num_draft_tokens,
        ("accepted_draft_tokens",): stats.num_accepted_tokens,
    }
    totals |= {("accepted_draft_tokens_at", str(at)): number for at, number in enumerate(stats.num_accepted_at)}
    rates = engine.speculation.drafter.synthetic_rates
    totals |= {("synthetic_acceptance_rate", str(at)): rate for at, rate in enumerate(rates)}
    for labels, copies in () if engine.offload is None else engine.offload.totals().items():
        totals |= {(f"kv_offload_{name}", *labels): total for name, total in vars(copies).items()}
    for labels, number in () if engine.hot_counts is None else engine.hot_counts.totals().items():
        totals["kv_hot_rows", *labels] = number
    for direction, side in () if handoffs is None else (("sent", handoffs.sent), ("received", handoffs.received)):
        totals |= {
            ("kv_transfer_bytes", direction): side.bytes,
            ("kv_transfer_seconds", direction): side.seconds,
            ("kv_transfer_requests", direction, "done"): side.num_done,
            ("kv_transfer_requests", direction, "failed"): side.num_failed,
        }
    return totals


def _taken(entries: list[TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    """Return a list's entries, and empty it: this process keeps no copy of sent entries."""
    taken = tuple(entries)
    entries.clear()
    return taken
