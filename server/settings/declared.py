"""All settings of a server, each with its flag, its bounds and its help."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from outrider.drafters import registry as drafters
from outrider.scheduler import registry as planners

from ..plugin.diffusion.target import UNMASKINGS
from . import traces
from .setting import setting

DRAFTERS = ("auto", *drafters.DRAFTERS, "off")
CHECKPOINT_DRAFTERS = tuple(name for name, entry in drafters.DRAFTERS.items() if entry.needs_checkpoint)
TRAINED_DRAFTERS = tuple(name for name in CHECKPOINT_DRAFTERS if drafters.find(name).trained)
DENOISING_DRAFTERS = tuple(name for name, entry in drafters.DRAFTERS.items() if entry.denoising_steps)
PLANNERS = tuple(planners.PLANNERS)
PROFILED_PLANNERS = tuple(name for name in PLANNERS if planners.find(name).needs_profile)
MAX_GAMMA = 64
SMALLEST_KV = 256
"""Tokens of the smallest KV cache."""
DAY = 86400
ANY = 1 << 40
MAX_PAUSE = {"cpu": 0.2, "cuda": 0.05}
"""Seconds, by device."""


def _each(entries: Mapping[str, drafters.DrafterEntry | planners.PlannerEntry]) -> str:
    return ", ".join(f"`{name}` ({entry.help})" for name, entry in entries.items())


_model = partial(setting, "model")
_speculation = partial(setting, "speculation")
_learning = partial(setting, "learning")
_diffusion = partial(setting, "block-diffusion models")
_capacity = partial(setting, "capacity")
_http = partial(setting, "HTTP")
_observing = partial(setting, "observing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """The settings that have a flag. None means: choose for me."""

    model: str | None = _model(
        None,
        "folder, hub name, or [GGUF file](#checkpoints) to serve, also one of the hub: `hf.co/OWNER/REPO:Q4_K_M`; "
        "`outrider-dllm`: the embedded model as a block-diffusion model, a demonstration",
        metavar="PATH_OR_HUB_NAME",
        unset="the embedded model",
    )
    served_model_name: str | None = _model(None, "the name that requests use", metavar="NAME", unset="the model's")
    lora_paths: tuple[str, ...] = _model((), "[LoRA adapters](#adapters) to serve", metavar="NAME=FOLDER,…")
    enable_lora: bool = _model(False, "let administrators load adapters")
    dtype: str = _model(
        "auto",
        "type of weights and activations; auto on a CPU: `bfloat16` with AVX-512 BF16 or AMX, else `float32`",
        choices=("auto", "bfloat16", "float32"),
    )
    quantization: str = _model(
        "none", "`int8`: 8-bit weights and activations on a CPU; faster and less accurate", choices=("none", "int8")
    )
    activations: str = _model(
        "auto",
        "precision of inputs to weights in blocks (GGUF, AWQ, GPTQ) on a CPU. `int8`: activations rounded to 8 bits "
        "in blocks, as llama.cpp does; faster and [less accurate](../docs/performance.md#what-rounding-changes). "
        "`auto`: as in a shipped profile, else the faster one here, measured once and kept",
        choices=("auto", "float", "int8"),
    )
    device: str = _model("auto", "`cpu` or `cuda`", choices=("auto", "cpu", "cuda"))
    threads: int | None = _model(
        None,
        "CPU threads of each engine or tensor-parallel rank, within affinity, quota and cpuset",
        unset="one per physical core, less one above 4",
    )
    context_length: int | None = _model(
        None, "tokens of prompt and answer together; bounds `max_tokens`", unset="the model's", bounds=(1, ANY)
    )
    chat_template: str | None = _model(
        None, "a template in place of the model's own", metavar="FILE", unset="the model's"
    )
    sampling_defaults: str = _model(
        "model",
        "sampling of requests that do not set `temperature`, `top_p`, `top_k`, `min_p` or `repetition_penalty`. "
        "`model`: from `generation_config.json` or the GGUF file (the embedded model: temperature 0.2, top-p 0.9); "
        "`openai`: 1, 1 and no more. Shown in `/v1/models`",
        choices=("model", "openai"),
    )
    tool_call_parser: str | None = _model(
        None, "SGLang's parser for tool calls, or `auto`", metavar="NAME", unset="by the chat template"
    )
    reasoning_parser: str | None = _model(None, "SGLang's parser for reasoning, or `auto`", metavar="NAME")

    drafter: str = _speculation(
        "auto",
        f"who proposes tokens: {_each(drafters.DRAFTERS)}, `off`; auto: `dspark` with the embedded "
        "model, else one that [is here and fits](#drafters), else `ngram`",
        choices=DRAFTERS,
    )
    drafter_path: str | None = _speculation(
        None,
        "checkpoint of a drafter model, folder or hub name: ours, DeepSpec's, DFlash, EAGLE-3 of SpecForge and "
        "ModelOpt, speculators'. Its kind decides without `--drafter`; "
        "`deer` and `specdiff` take each other's",
        metavar="PATH_OR_HUB_NAME",
        unset="the shipped one",
    )
    lookup: bool = _speculation(True, "prompt lookup with a drafter model, where text repeats itself")
    gamma: int = _speculation(7, "maximum draft tokens per step", bounds=(1, MAX_GAMMA))
    lookup_across: bool = _speculation(
        True,
        "prompt lookup in [other requests](../docs/learn.md#other-requests-texts) of the API key and `cache_salt` too; "
        "on a CPU",
    )
    lookup_store: Path | None = _speculation(
        None, "file that keeps them over a restart", metavar="FILE", unset="memory alone"
    )
    denoising_steps: int | None = _speculation(
        None,
        f"forward passes per draft of {' or '.join(DENOISING_DRAFTERS)}, at most `--gamma`: more are slower and "
        "more often right",
        unset="1 for `deer`, 2 for `specdiff`",
    )
    initial_tokens: int = _speculation(
        0,
        "first tokens of an answer that a drafter model leaves to prompt lookup (with `--no-lookup` undrafted)",
        bounds=(0, 1 << 20),
    )
    verification: str = _speculation(
        "block",
        "how drafts of sampled requests without a seed are verified: `block`, which keeps more, or `token` by token",
        choices=("block", "token"),
    )
    planner: str = _speculation(
        "asynchronous", f"decides how much of each draft is verified: {_each(planners.PLANNERS)}", choices=PLANNERS
    )
    threshold: float = _speculation(0.3, "survival below which `--planner threshold` stops", metavar="P", bounds=(0, 1))
    profile: str | None = _speculation(
        None,
        "name or folder of a [profile](../profiles/README.md), measured by `outrider tune`",
        metavar="NAME_OR_FOLDER",
        unset="the one that fits",
    )
    tune: bool = _speculation(
        True,
        "without a profile that fits, measure a quick one at start and [refine it while idle](../docs/tune.md); "
        "without both every draft is verified",
    )

    learn: bool = _learning(
        False,
        "[train the drafter](../docs/learn.md) on finished answers while idle, and use better ones; "
        "without a drafter for the model, make one",
    )
    learn_folder: Path | None = _learning(
        None,
        "where answers and learned drafters are kept, readable by this user alone",
        metavar="FOLDER",
        unset="`learned/` in the cache folder, by model and drafter",
    )
    learn_per: str = _learning(
        "server",
        "[a drafter for each](../docs/learn.md#a-drafter-for-each-key) API key (`key`) or LoRA adapter (`adapter`); "
        "on a CPU",
        choices=("server", "key", "adapter"),
    )
    learn_keys: int = _learning(
        8, "keys or adapters with drafters in memory and training features on disk", bounds=(1, 1 << 10)
    )
    learn_threads: int = _learning(1, "CPU threads of the training", bounds=(1, 1 << 10))
    learn_device: str = _learning(
        "cpu", "device of the training; on a GPU memory for the model once more is needed", choices=("cpu", "cuda")
    )

    unmasking: str = _diffusion(
        "threshold",
        "[which masked tokens](../docs/diffusion-targets.md#which-tokens-a-forward-reveals) a forward reveals; "
        "`threshold`: all that are certain enough; `static`: a fixed number, the most certain",
        choices=UNMASKINGS,
    )
    unmasking_threshold: float = _diffusion(
        0.95,
        "probability above which `--unmasking threshold` reveals a token; at least one is",
        metavar="P",
        bounds=(0, 1),
    )
    unmasking_tokens: int = _diffusion(1, "tokens that `--unmasking static` reveals per forward", bounds=(1, 256))
    block_size: int | None = _diffusion(None, "tokens of a block", unset="the model's")

    engines: int | None = _capacity(
        None,
        "[engines](#engines) that share the machine's cores, or its GPUs, and one address",
        unset="one per NUMA node of a CPU",
    )
    max_running_requests: int | None = _capacity(
        None, "requests decoded at once, per engine", unset="SGLang's", bounds=(1, ANY)
    )
    max_total_tokens: int | None = _capacity(
        None,
        "KV cache of each engine, in tokens; on a CPU it takes memory as it fills",
        unset="on a CPU the context, or 1024 for each of `--max-running-requests` (32) and 8192 more, within 2 GiB",
        bounds=(SMALLEST_KV, ANY),
    )
    chunked_prefill_size: int | None = _capacity(
        None, "prompt tokens per step; -1: all at once", unset="SGLang's", exempt=-1, bounds=(1, ANY)
    )
    max_pause: float | None = _capacity(
        None,
        "seconds for which answers may pause while prompts are read: [prompts are read in chunks]"
        "(../docs/scale.md#long-prompts) with decode steps between them, short prompts first; 0: at once, in order",
        unset=f"{MAX_PAUSE['cpu']} on a CPU, {MAX_PAUSE['cuda']} on a GPU",
        bounds=(0, DAY),
    )
    disable_radix_cache: bool = _capacity(False, "share no prefixes between requests")

    host: str = _http("127.0.0.1", "address to listen on; the default is this machine only", metavar="HOST")
    port: int = _http(30000, "port to listen on", bounds=(1, 65535))
    api_key: str | None = _http(
        None,
        "an administrator's key without limits, required on every route but `/health`, `/ready`, `/docs`, "
        "`/openapi.json` and the page; `OUTRIDER_API_KEY` keeps it out of the process list",
        metavar="KEY",
        environment=("OUTRIDER_API_KEY",),
    )
    api_keys: Path | None = _http(
        None, "[keys with limits](../docs/secure.md#keys), made by `outrider key`; read again when the file changes"
    )
    usage_file: Path | None = _http(
        None, "keeps each key's use of its day over a restart", unset="`usage/PORT.json` in the cache folder"
    )
    ssl_certfile: str | None = _http(
        None, "serve HTTPS with this certificate (PEM), reloaded when renewed", metavar="FILE"
    )
    ssl_keyfile: str | None = _http(
        None,
        "its private key; `OUTRIDER_SSL_KEYFILE_PASSWORD` opens an encrypted one",
        metavar="FILE",
        unset="in the same file",
    )
    ssl_ca_certs: str | None = _http(None, "require client certificates signed by one of these", metavar="FILE")
    metrics_port: int | None = _http(
        None,
        "serve `/metrics` there and not on `--port`, without key and TLS; with `/health` and `/ready`",
        bounds=(1, 65535),
    )
    metrics_host: str = _http("127.0.0.1", "address of `--metrics-port`", metavar="HOST")
    allowed_hosts: tuple[str, ...] = _http(
        (),
        "further names answered in `Host` (without a key, in `Origin` too); any other gets 421, foreign pages 403. "
        "`*`: any",
        metavar="NAME,…",
        unset="any; on loopback without a key this machine's own",
    )
    max_queued_requests: int | None = _http(
        None, "choices that may wait (`n` for each prompt); beyond: 429", unset="unlimited", bounds=(1, 1 << 20)
    )
    max_queue_seconds: float | None = _http(None, "longest wait; then 429", unset="unlimited", bounds=(0.1, DAY))
    max_request_seconds: float | None = _http(
        None,
        "longest run once it has a place; then 504, or an error in its stream",
        unset="unlimited",
        bounds=(0.1, DAY),
    )
    max_connections: int | None = _http(
        None,
        "open connections, TLS handshakes included; one more gets 503 (with TLS no answer) and is closed. The "
        "metrics port has 128 of its own",
        unset="4096, or the hard limit on open files less 512",
        bounds=(1, 1 << 20),
    )
    max_receive_seconds: float = _http(
        30.0,
        "time for headers and body to arrive; then 408, and the connection is closed. A TLS handshake has as long",
        bounds=(1, DAY),
    )
    max_stall_seconds: float = _http(
        60.0, "time for which a client does not read its answer; then connection and request end", bounds=(1, DAY)
    )
    max_choices: int = _http(128, "largest `n`", bounds=(1, 1 << 16))
    max_request_tokens: int | None = _http(
        None,
        "a request's prompts and answers together; more gets 400, and bounds a chat without `max_tokens`",
        unset="unlimited",
        bounds=(2, ANY),
    )
    max_body_bytes: int = _http(10 * 2**20, "largest request body", bounds=(1024, 1 << 32))
    max_step_seconds: float = _http(
        120.0,
        "longest step while requests are under way; beyond it `/health` and `/ready` say 503 and requests are "
        "refused until steps end again. Set it above the time of a prompt chunk",
        bounds=(1, DAY),
    )
    drain_seconds: float = _http(30.0, "time for running requests after SIGTERM", bounds=(0, DAY))
    lame_duck_seconds: float = _http(
        0.0,
        "time after SIGTERM in which requests are still taken while `/ready` says 503, for balancers that do not retry",
        bounds=(0, DAY),
    )

    log_level: str = _observing(
        "warning", "least severe messages logged", choices=("debug", "info", "warning", "error")
    )
    log_format: str = _observing("text", "`json`: an object per line, from all processes", choices=("text", "json"))
    log_requests: str = _observing(
        "none",
        "`summary`: a line per ended request with id, outcome, key, times and tokens; `content`: also prompt and "
        "answer, which are logged nowhere else",
        choices=("none", "summary", "content"),
    )
    otlp_endpoint: str | None = _observing(
        None,
        "OpenTelemetry collector: `HOST:4317` for gRPC, `HOST:4318` for HTTP; also "
        "`OTEL_EXPORTER_OTLP_ENDPOINT`. Needs `deploy/requirements/traces.txt`",
        metavar="ADDRESS",
        environment=traces.ENVIRONMENT,
    )
