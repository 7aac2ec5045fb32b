"""`LLM`, the main interface: job, exchange and engine in one object; and helpers that the commands share."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from tqdm import tqdm

from dcpmla.comm.select import ChosenExchange, select_exchange
from dcpmla.config import DCPConfig
from dcpmla.fields import check_fields, number, option_label
from dcpmla.integrations.arguments import Prompt, check_names, layout, pair
from dcpmla.integrations.engine_options import EngineOptions
from dcpmla.integrations.loading import load_engine
from dcpmla.integrations.open_model import ModelFiles, check_layout, open_model
from dcpmla.job.bootstrap import agree, check_equal_arguments
from dcpmla.job.join import LOAD_TIMEOUT, TIMEOUT, Job, check_num_ranks, join_ranks
from dcpmla.parallel.mesh import init_mesh
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.request import Request
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.text.stream import TextStream

_BETWEEN_CALLS = 7 * 86400.0  # seconds that a caller may take between two calls; no rank waits during them


class LLM:
    """A model that generates, its latent cache sharded over the ranks of the job.

    Works under torchrun, mpirun and srun, and as one process. Every rank runs the same lines with the same values.
    Close it after use, best as a context manager: `with LLM(...) as llm`. Under a launcher, if a rank is killed, hangs
    or fails, all ranks end and one prints the reason (docs/faults.md); in one process exceptions reach the caller.

    Args:
        model: Directory of a safetensors checkpoint, or a hub id.
        tensor_parallel_size: Ranks that divide the heads; must be all ranks of the job, the default.
        decode_context_parallel_size: Ranks that share one cache; divides tensor_parallel_size; default 1.
        max_model_len: Maximum length of a sequence, prompt and answer; default: the model's.
        revision: Branch, tag or commit of a hub id; default: its main branch.
        device: "cuda", "cpu", or "auto": GPUs if any is visible.
        timeout: Seconds in a step after which a rank counts as lost.
        options: Fields of `DCPConfig` and of `EngineOptions`.
    Raises:
        ValueError: An option does not exist, a value is not allowed, or the model does not load.
        ConnectionError: The ranks did not connect.

    Attributes:
        rank: Number of this process in the job.
        engine: Engine, to add requests as they arrive (`Engine.add`, `Engine.step`).
        exchange: The ranks' exchange, and the reason for its choice.
    """

    def __init__(
        self,
        model: str | Path,
        tensor_parallel_size: int | None = None,
        decode_context_parallel_size: int | None = None,
        *,
        max_model_len: int | None = None,
        revision: str | None = None,
        device: str = "auto",
        timeout: float = TIMEOUT,
        **options: Any,
    ) -> None:
        check_names(options)
        check_fields({"timeout": number(0, above=True)}, {"timeout": timeout}, option_label)
        dcp_size = 1 if decode_context_parallel_size is None else decode_context_parallel_size
        if dist.is_initialized():
            raise ValueError(
                "torch.distributed is initialized already, by another LLM or by the program; close that LLM first, "
                "or give the program's own groups to load_engine"
            )
        sizes = {"tensor_parallel_size": tensor_parallel_size, "decode_context_parallel_size": dcp_size}
        arguments = {"model": str(model), "max_model_len": max_model_len, "revision": revision, **sizes, **options}
        check = partial(check_num_ranks, tensor_parallel_size=tensor_parallel_size)
        with ExitStack() as resources:
            job = resources.enter_context(join_ranks(device, timeout, arguments, check, watch_one=False))
            self._job, self.rank = job, job.ranks.rank
            job.watchdog.enter("reading the model's files", LOAD_TIMEOUT)
            with agree():
                dcp = layout(options, job.ranks.num_ranks, dcp_size)
                files = open_model(str(model), max_model_len, revision)
                check_layout(files, dcp)
                engine_options = EngineOptions.of(options)
            self.engine, self.exchange = build_engine(job, dcp, files, engine_options)
            resources.callback(self.engine.close)  # before the process groups: decode graphs hold their operations
            self._pause()
            self._resources = resources.pop_all()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        cache_salt: str = "",
    ) -> list[Request]:
        """Generate from prompts until all requests are finished.

        Args:
            prompts: One text, one list of token ids, or a list of prompts.
            sampling_params: Parameters for all prompts, where each prompt draws from a random stream of its own
                (`SamplingParams.for_prompt`); or one for each prompt, unchanged. Default: greedy, 16 tokens.
            use_tqdm: Whether to show a progress bar, on the first rank.
            cache_salt: Salt of the prompts' blocks: only prompts with the same salt reuse them (`Engine.prompt`).
        Returns:
            The finished requests, in the order of the prompts: `.prompt_token_ids`, `.token_ids`, `.text`,
            `.finish_reason` ("stop" or "length", or "error" with the reason in `.error`), `.metrics()` (seconds).
        Raises:
            ValueError: The model cannot continue a prompt, the numbers of params and prompts differ, or the ranks have
                different prompts or params.
        """
        requests = self._add(prompts, sampling_params, cache_salt)
        try:
            for _ in run_with_bar(self.engine, "generate", len(requests), use_tqdm and self._job.ranks.is_first):
                pass
        finally:
            self._leave(requests)
        return requests

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
    ) -> Iterator[tuple[Request, str]]:
        """Generate from prompts, token by token. All ranks must take the same number of tokens.

        Args:
            prompts, sampling_params, cache_salt: Arguments of `generate`.
        Yields:
            For each new token its request, and the text that it completes, maybe empty. The request's finish_reason
            is set with its last token; `request.request_id` is the prompt's number.
        Raises:
            ValueError: Same cases as `generate`.
        """
        requests = self._add(prompts, sampling_params, cache_salt)
        streams = {request: self._text_stream(request) for request in requests}
        try:
            while self.engine.has_requests:
                changed = self.engine.step().changed
                self._pause()
                yield from ((request, _new_text(request, streams[request])) for request in changed)
        finally:  # also runs if the caller stops early
            self._leave(requests)

    def close(self) -> None:
        """Free decode graphs and process groups. Collective; does nothing the second time."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._resources.__exit__(kind, error, trace)

    def _add(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        cache_salt: str,
    ) -> list[Request]:
        """Queue all prompts; if one is invalid, queue none."""
        if not dist.is_initialized():
            raise ValueError("this LLM is closed; make another one")
        self._job.watchdog.enter("queueing requests")
        pairs = pair(prompts, sampling_params)
        digest = sha256(repr((pairs, cache_salt)).encode(errors="backslashreplace")).hexdigest()[:12]
        check_equal_arguments({"prompts and sampling_params (a hash of them)": digest})
        requests: list[Request] = []
        try:
            for index, (prompt, params) in enumerate(pairs):
                checked = self.engine.prompt(prompt, cache_salt)
                requests.append(self.engine.add(checked, params, request_id=index))
        except ValueError as error:
            self._leave(requests)
            raise ValueError(f"prompt {len(requests)}: {error}") from error
        return requests

    def _text_stream(self, request: Request) -> TextStream | None:
        tokenizer = self.engine.tokenizer
        return None if tokenizer is None else TextStream(tokenizer, request.params, request.prompt_token_ids)

    def _leave(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.engine.abort(request)
        self._pause()

    def _pause(self) -> None:
        self._job.watchdog.enter("the program that calls LLM", _BETWEEN_CALLS)


def _new_text(request: Request, stream: TextStream | None) -> str:
    """Return the text that a request's tokens since the last call complete."""
    if stream is None:
        return ""
    tokens = request.token_ids[stream.num_tokens :]
    return stream.end(tokens, request.has_stop_token) if request.finish_reason else stream.push(tokens)


def build_engine(
    job: Job, dcp: DCPConfig, files: ModelFiles, options: EngineOptions, seq_lens: Sequence[int] | None = None
) -> tuple[Engine, ChosenExchange]:
    """Make the mesh, choose the exchange and load the engine of a job. Collective.

    Args:
        seq_lens: Lengths of all sequences, if known (`load_engine`).
    """
    job.watchdog.enter("loading the model", LOAD_TIMEOUT)
    mesh = init_mesh(dcp.tensor_parallel_size, dcp.decode_context_parallel_size)
    chosen = select_exchange(dcp, mesh.dcp_group, job.ranks.device)
    engine = load_engine(
        files,
        dcp,
        mesh,
        chosen,
        job.ranks.device,
        options,
        seq_lens=seq_lens,
        num_local_ranks=job.ranks.num_local_ranks,
        on_step=job.watchdog.enter,
    )
    return engine, chosen


def run_with_bar(engine: Engine, name: str, num_requests: int, is_shown: bool) -> Iterator[list[Request]]:
    """Step until no request is left, under a progress bar; yield the requests that each step finished. The bar counts
    them when the caller asks for the next ones.

    Raises:
        RuntimeError: A step raised a ValueError. User input has been checked before, so this is a bug and needs its
            traceback.
    """
    with tqdm(total=num_requests, desc=name, unit="request", disable=not is_shown) as bar:
        while engine.has_requests:
            try:
                finished = engine.step().finished
            except ValueError as error:
                raise RuntimeError(f"{name} failed") from error
            yield finished
            bar.set_postfix_str(_status(engine, bar.format_dict["elapsed"]), refresh=False)
            bar.update(len(finished))


def _status(engine: Engine, seconds: float) -> str:
    scheduler, rate = engine.scheduler, engine.stats.num_new_tokens / max(seconds, 1e-9)
    num_waiting = len(scheduler.waiting)
    return f"{rate:,.0f} tok/s, {len(scheduler.running)} running, {num_waiting} waiting, cache {engine.cache_use():.0%}"
