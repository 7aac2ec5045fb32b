"""Options of `vllm serve` (0.33 and earlier ones that recipes still pass) that this server does not have: what each of
their values does here. Options with the same name and meaning are the server's own.
"""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

_MODEL = "MODEL"  # stands for the model as it is given
_ON, _OFF = "on", "off"  # values of a flag: --x and --no-x


class VllmOption(NamedTuple):
    """Options that are treated alike.

    Attributes:
        names: Names of the options; short ones follow the option's long name.
        same: Values that ask for what happens anyway.
        is_ignored: Whether other values are accepted without effect; they are refused otherwise.
        words: Reason, or what to use instead.
        is_flag: Whether the options have no value.
        nargs: Number of their values, as argparse counts them.
    """

    names: tuple[str, ...]
    same: tuple[str, ...]
    is_ignored: bool
    words: str
    is_flag: bool = False
    nargs: str | None = None

    def check(self, name: str, value: str, model: str) -> str:
        """Return a line on a value that has no effect, empty for one that asks for what happens anyway.

        Args:
            name: Option as it is given.
            model: Model as it is given.
        Raises:
            ValueError: The value is refused.
        """
        same = tuple(model if each == _MODEL else each for each in self.same)
        if value in same:
            return ""
        if self.is_ignored:
            return f"{name} has no effect: {self.words}"
        if self.is_flag:
            raise ValueError(f"{name} is not supported: {self.words}")
        allowed = f"; it must be {' or '.join(same)}" if same else ", which is not supported"
        raise ValueError(f"{name} is {value!r}{allowed}: {self.words}")


def _flags(*names: str, same: str, words: str, is_ignored: bool = False) -> VllmOption:
    return VllmOption(names, (same,), is_ignored, words, is_flag=True)


def _ignored(*names: str, words: str, same: tuple[str, ...] = (), nargs: str | None = None) -> VllmOption:
    return VllmOption(names, same, True, words, nargs=nargs)


def _refused(*names: str, words: str, same: tuple[str, ...] = (), nargs: str | None = None) -> VllmOption:
    return VllmOption(names, same, False, words, nargs=nargs)


_KERNELS = "this package chooses among kernels of its own"
_TEXT_ONLY = "this server serves text alone"
_ALL_TP = "give all ranks to -tp; -dcp shares the cache among them"
_REPLICAS = "a server is one group of ranks; start one for each replica, and a router"
_LAUNCH = "this command starts its ranks itself; see --nnodes and --node-rank (docs/launch.md)"
_LORA = "adapters are not served; merge them into the checkpoint"
_NO_CODE = "no code of yours runs in the server"
_CONFIG = "the model is what its config.json says; change the file"
_DEFAULTS = "requests give temperature, top_p and their other fields themselves"
_TLS = "put a proxy that speaks TLS in front (docs/production.md)"
_TRACES = "this server writes no traces and profiles; /metrics has its measurements"
_NO_TEXTS = "prompts and answers are never logged; a request's line has numbers, and --disable-access-log leaves it out"
_ACCESSES = "probes and /metrics have lines at --log-level debug alone; --disable-access-log leaves out all"
_CUDA_GRAPHS = "graphs are captured for the sizes that --max-num-seqs and --max-num-batched-tokens need"
_GRAMMARS = "grammars are compiled by llguidance (the extra structured)"

VLLM_OPTIONS = (
    # Parallelism
    _refused("--pipeline-parallel-size", "-pp", same=("1",), words=_ALL_TP),
    _refused("--data-parallel-size", "-dp", same=("1",), words=_REPLICAS),
    _refused("--data-parallel-rank", "-dpn", "--data-parallel-start-rank", "-dpr", same=("0",), words=_REPLICAS),
    _refused("--data-parallel-size-local", "-dpl", same=("1",), words=_REPLICAS),
    _ignored("--data-parallel-address", "-dpa", "--data-parallel-rpc-port", "-dpp", words=_REPLICAS),
    _ignored("--data-parallel-backend", "-dpb", words=_REPLICAS),
    _flags("--data-parallel-hybrid-lb", "--data-parallel-external-lb", same=_OFF, words=_REPLICAS),
    _refused("--prefill-context-parallel-size", "-pcp", same=("1",), words="prompts are computed by -tp ranks"),
    _flags("--headless", same=_OFF, is_ignored=True, words="the first rank alone answers HTTP"),
    _ignored("--distributed-executor-backend", same=("mp", "external_launcher"), words=_LAUNCH),
    _ignored("--max-parallel-loading-workers", words="each rank reads its part of the weights"),
    _flags("--disable-custom-all-reduce", same=_OFF, is_ignored=True, words=_KERNELS),
    _ignored("--all2all-backend", words="outputs of experts are summed over all ranks"),
    _ignored("--dbo-decode-token-threshold", "--dbo-prefill-token-threshold", "--ubatch-size", words=_KERNELS),
    _flags("--enable-dbo", "--enable-eplb", "--enable-ep-weight-filter", same=_OFF, is_ignored=True, words=_KERNELS),
    _ignored("--eplb-config", "--expert-placement-strategy", words="experts stay on their ranks"),
    _flags("--numa-bind", same=_OFF, is_ignored=True, words="bind the ranks with numactl, or the launcher"),
    _ignored("--numa-bind-nodes", "--numa-bind-cpus", words="bind the ranks with numactl, or the launcher", nargs="+"),
    # The model and its tokenizer
    _flags("--trust-remote-code", same=_OFF, is_ignored=True, words="no code of a checkpoint runs here"),
    _refused("--tokenizer", same=(_MODEL,), words="put the tokenizer's files into MODEL's directory"),
    _ignored("--tokenizer-mode", same=("auto",), words="tokenizer and encoding of chats are the checkpoint's"),
    _refused("--tokenizer-revision", "--code-revision", words="--revision names one commit of all files"),
    _flags("--skip-tokenizer-init", same=_OFF, words="requests may give token ids in any case"),
    _refused("--hf-overrides", "--hf-config-path", words=_CONFIG),
    _refused("--config-format", same=("auto", "hf"), words=_CONFIG),
    _refused("--model-impl", same=("auto", "vllm"), words="models run on this package's layers"),
    _refused("--task", "--runner", same=("auto", "generate"), words="this server generates; it does not embed or rank"),
    _refused("--convert", same=("auto", "none"), words="this server generates; it does not embed or rank"),
    _refused("--quantization-config", words="weights are read as they are stored"),
    _refused("--generation-config", same=("vllm",), words=_DEFAULTS),
    _refused("--override-generation-config", same=("{}",), words=_DEFAULTS),
    _refused("--hf-token", words="give it in the variable HF_TOKEN"),
    _refused("--download-dir", words="give it in the variable HF_HOME"),
    _ignored("--safetensors-load-strategy", "--model-loader-extra-config", words="each rank reads its own part"),
    _ignored("--ignore-patterns", words="only safetensors, configs and the tokenizer are read", nargs="+"),
    _flags("--use-tqdm-on-load", same=_ON, is_ignored=True, words="the first rank shows its progress"),
    _refused("--logits-processors", "--middleware", words=_NO_CODE, nargs="+"),
    _refused("--reasoning-parser-plugin", "--tool-parser-plugin", "--io-processor-plugin", words=_NO_CODE),
    _refused("--worker-cls", "--worker-extension-cls", "--scheduler-cls", words=_NO_CODE),
    _flags("--enable-lora", same=_OFF, words=_LORA),
    _refused("--lora-modules", words=_LORA, nargs="+"),
    _refused("--max-loras", "--max-lora-rank", "--max-cpu-loras", "--lora-dtype", words=_LORA),
    _flags("--enable-sleep-mode", same=_OFF, words="end the server to free its GPUs"),
    _flags("--enable-prompt-embeds", "--enable-return-routed-experts", same=_OFF, words="requests have no such field"),
    # The cache, and memory
    _refused("--num-gpu-blocks-override", words="use --kv-cache-memory-bytes"),
    _refused("--cpu-offload-gb", same=("0",), words="weights stay on GPUs; see --kv-offloading-size"),
    _refused("--offload-backend", same=("auto",), words="weights stay on GPUs; see --kv-offloading-size"),
    _refused("--offload-group-size", "--offload-num-in-group", same=("0",), words="weights stay on GPUs"),
    _ignored("--offload-prefetch-step", words="weights stay on GPUs"),
    _ignored("--swap-space", same=("0",), words="blocks that leave the cache are kept with --kv-offloading-size"),
    _refused("--kv-offloading-backend", same=("native",), words="blocks are kept by this package"),
    _ignored("--prefix-caching-hash-algo", same=("sha256",), words="blocks are found by SHA-256"),
    _refused("--kv-cache-dtype-skip-layers", words="all layers have one format of the cache", nargs="+"),
    _refused("--kv-transfer-config", words="use --role and --prefill-servers (docs/disaggregation.md)"),
    _flags("--disable-hybrid-kv-cache-manager", same=_OFF, is_ignored=True, words="each family has one cache"),
    _ignored("--mamba-cache-dtype", "--mamba-ssm-cache-dtype", words="states have a format of their own"),
    _ignored("--mamba-block-size", "--mamba-cache-mode", words="states have a format of their own"),
    _ignored("--prefix-cache-retention-interval", "--prefix-match-unit", words="prefixes are found block by block"),
    # Steps
    _flags("--enable-chunked-prefill", same=_ON, words="prompts are always computed in pieces; see --max-prefill-ms"),
    _flags("--async-scheduling", same=_ON, words="each step is always launched before the last one's tokens are known"),
    _refused("--max-num-scheduled-tokens", words="use --max-num-batched-tokens"),
    _refused("--max-num-partial-prefills", same=("1",), words="use --max-prefill-ms"),
    _ignored("--long-prefill-token-threshold", "--prefill-schedule-interval", words="use --max-prefill-ms"),
    _refused("--scheduling-policy", same=("fcfs",), words="requests are served in order, but short rests pass others"),
    _refused("--max-num-queued-reqs", words="use --max-waiting"),
    _ignored("--stream-interval", same=("1",), words="tokens are sent as they come"),
    _ignored("--compilation-config", "-cc", "-O", "--optimization-level", "--performance-mode", words=_CUDA_GRAPHS),
    _ignored("--max-cudagraph-capture-size", "--max-seq-len-to-capture", words=_CUDA_GRAPHS),
    _ignored("--cudagraph-capture-sizes", words=_CUDA_GRAPHS, nargs="+"),
    _flags("--enable-flashinfer-autotune", same=_OFF, is_ignored=True, words=_KERNELS),
    _ignored("--moe-backend", "--linear-backend", same=("auto",), words=_KERNELS),
    _ignored("--kernel-config", "--additional-config", "--mamba-backend", words=_KERNELS),
    _ignored("--gdn-prefill-backend", "--kda-prefill-backend", "--kda-decode-backend", words=_KERNELS),
    _flags("--enable-cumem-allocator", "--disable-cascade-attn", same=_OFF, is_ignored=True, words=_KERNELS),
    _ignored(
        *("--attention-config", "-ac"),
        words="use --attention-backend, --prefill-backend, --decode-query-dtype and --index-cache-dtype",
    ),
    # Answers
    _flags("--enable-auto-tool-choice", same=_ON, words="tool_choice auto is always served"),
    _flags("--enable-reasoning", same=_ON, words="reasoning is always parsed; --reasoning-parser names its format"),
    _ignored("--chat-template-content-format", same=("auto",), words="templates get each content as one text"),
    _flags("--trust-request-chat-template", same=_OFF, words="the template is the server's; use --chat-template"),
    _refused("--response-role", same=("assistant",), words="answers are the assistant's"),
    _flags("--exclude-tools-when-tool-choice-none", same=_ON, words="tool_choice none always leaves tools out"),
    _refused("--tool-server", words="clients run the tools"),
    _flags("--return-tokens-as-token-ids", same=_OFF, words="requests ask with return_token_ids"),
    _flags("--enable-prompt-tokens-details", same=_ON, words="usage always has the cached tokens"),
    _flags("--enable-force-include-usage", same=_OFF, words="requests ask with stream_options.include_usage"),
    _refused("--max-logprobs", same=("20",), words="requests may ask for 20 alternatives"),
    _refused("--logprobs-mode", same=("raw_logprobs",), words="log probabilities are the model's own"),
    _ignored("--seed", words="a request's own seed repeats its draws; without one they are secret"),
    _refused("--reasoning-config", words="no request has a budget of reasoning"),
    _ignored("--structured-outputs-config", "--guided-decoding-backend", words=_GRAMMARS),
    # HTTP
    _refused("--uds", "--grpc-port", words="use --host and --port"),
    _refused("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-cert-reqs", "--ssl-ciphers", words=_TLS),
    _refused("--root-path", words="let the proxy in front take the path away"),
    _flags("--allow-credentials", same=_OFF, words="browsers send the key in a header"),
    _ignored("--allowed-methods", "--allowed-headers", words="--allowed-origins says who may ask"),
    _ignored("--api-server-count", "-asc", same=("1",), words="one process answers HTTP"),
    _refused("--config", words="give the options themselves"),
    _refused("--shutdown-timeout", words="use --drain-seconds"),
    _flags("--enable-request-id-headers", same=_OFF, words="answers have an id"),
    _flags("--disable-fastapi-docs", same=_ON, words="there are no such pages"),
    # Logs and measurements
    _flags("--disable-log-requests", same=_ON, words=_NO_TEXTS),
    _flags("--enable-log-requests", "--enable-log-outputs", same=_OFF, words=_NO_TEXTS),
    _ignored("--max-log-len", words=_NO_TEXTS),
    _flags("--disable-log-stats", same=_OFF, is_ignored=True, words="--log-level warning leaves out lines on the load"),
    _ignored("--disable-access-log-for-endpoints", words=_ACCESSES),
    _ignored("--uvicorn-log-level", words="use --log-level"),
    _ignored("--log-config-file", words="the log goes to standard error; use --log-level"),
    _refused("--otlp-traces-endpoint", "--profiler-config", words=_TRACES),
    _refused("--collect-detailed-traces", words=_TRACES, nargs="+"),
    _refused("--show-hidden-metrics-for-version", words="use --metrics-names vllm"),
    _flags("--kv-cache-metrics", "--cudagraph-metrics", same=_OFF, is_ignored=True, words="/metrics has what there is"),
    # Images, audio and video
    _flags("--language-model-only", same=_ON, words=_TEXT_ONLY),
    _flags("--enable-mm-embeds", "--mm-encoder-only", same=_OFF, words=_TEXT_ONLY),
    _flags("--skip-mm-profiling", "--disable-chunked-mm-input", same=_ON, is_ignored=True, words=_TEXT_ONLY),
    _ignored("--mm-encoder-tp-mode", "--mm-encoder-attn-backend", "--mm-processor-cache-gb", words=_TEXT_ONLY),
    _ignored("--mm-processor-cache-type", "--mm-processor-kwargs", "--limit-mm-per-prompt", words=_TEXT_ONLY),
    _ignored("--allowed-local-media-path", "--media-io-kwargs", words=_TEXT_ONLY),
    _ignored("--allowed-media-domains", words=_TEXT_ONLY, nargs="+"),
)  # fmt: skip


class _Keep(argparse.Action):
    """The action of these options: keep their names and values, which `check_vllm_options` reads."""

    def __call__(self, parser: object, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Append an option with its value."""
        name = str(option_string)
        value = values if isinstance(values, str) else " ".join(values)
        if self.nargs == 0:
            value = _OFF if name.startswith("--no-") else _ON
        namespace.vllm_options = (*namespace.vllm_options, (name, value))


def add_vllm_options(parser: argparse.ArgumentParser) -> None:
    """Add these options to a parser; its --help does not show them."""
    parser.set_defaults(vllm_options=())
    for each in VLLM_OPTIONS:
        nargs: Any = 0 if each.is_flag else each.nargs
        names = [*each.names, *(f"--no-{name[2:]}" for name in each.names if each.is_flag)]
        parser.add_argument(*names, dest="vllm_options", action=_Keep, nargs=nargs, help=argparse.SUPPRESS)


def check_vllm_options(given: Sequence[tuple[str, str]], model: str) -> Iterator[str]:
    """Yield a line for each option that has no effect.

    Args:
        given: Options and their values, as `_Keep` keeps them.
        model: Model as it is given.
    Raises:
        ValueError: A value is refused; the message has what to use instead.
    """
    for name, value in given:
        positive = f"--{name.removeprefix('--no-')}" if name.startswith("--no-") else name
        (entry,) = (each for each in VLLM_OPTIONS if positive in each.names or name in each.names)
        if line := entry.check(name, value, model):
            yield line


def check_quantization(quantization: str | None, config: Any) -> None:
    """Raise ValueError if `--quantization` names another method than a model's config does."""
    own = (getattr(config, "quantization_config", None) or {}).get("quant_method")
    if quantization not in (None, own):
        raise ValueError(
            f"quantization (--quantization) is {quantization!r}, but the checkpoint's quantization_config has "
            f"{own!r}: weights are read as they are stored; leave the option out, or choose another checkpoint"
        )
