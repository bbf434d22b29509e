"""The settings of a server, checked in one place before anything slow begins."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.drafters import registry as drafters
from outrider.scheduler.planners import registry as planners

from ..errors import UserError
from ..machine import hardware, host_names, threads, topology
from ..machine.topology import Topology
from ..plugin.config import PluginConfig
from ..plugin.diffusion.target import UNMASKINGS, DiffusionTarget
from . import traces
from .parallel import Parallel

DRAFTERS = ("auto", *drafters.names(), "off")
CHECKPOINT_DRAFTERS = tuple(name for name in drafters.names() if drafters.find(name).needs_checkpoint)
DENOISING_DRAFTERS = tuple(name for name in drafters.names() if drafters.find(name).denoising_steps)
DENOISING_ORDERS = drafters.DENOISING_ORDERS
MEASURING_DRAFTER = drafters.MEASURING
DTYPES = ("auto", "bfloat16", "float32")
QUANTIZATIONS = ("none", "int8")
DEVICES = ("auto", "cpu", "cuda")
SAMPLING_DEFAULTS = ("model", "openai")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
LOGGED_REQUESTS = ("none", "summary", "content")
MAX_GAMMA = 64
SMALLEST_KV = 256
"""Tokens of the smallest KV cache."""
PLANNERS = planners.names()
PROFILED_PLANNERS = tuple(name for name in PLANNERS if planners.find(name).needs_profile)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything `outrider serve` can be told. None means: choose for me.

    model: folder, GGUF file or hub name; None is the embedded model.
    quantization: int8 rounds the weights of all linear layers and the head as they are loaded, on a CPU.
    drafter: auto is the dspark drafter that comes with the embedded model, and ngram for any other.
    drafter_path: folder of the drafter's checkpoint, where it needs one; None is the one shipped for the model.
    lookup: a drafter with a checkpoint leaves text that repeats itself to prompt lookup.
    gamma: draft tokens per step, 1..64. lookup_gamma: of that prompt lookup, where it is more than gamma.
    denoising_steps: forward passes for a draft, of a drafter that denoises; None is its own number.
    denoising_order: which tokens each of them reveals.
    initial_tokens: of each answer, for which a drafter with a checkpoint does not draft.
    planner: decides how much of each draft is verified. threshold: of survival, for the planner of that name.
    diffusion: what the model is, where it is a block-diffusion model; found by `resolve`.
    unmasking: how such a model's tokens are revealed; unmasking_tokens: of static, in each forward;
    unmasking_threshold: of threshold, a token's confidence. block_size: in place of the model's.
    profile: folder or name of measured step costs and calibration; None finds the one that fits.
    tune: without a profile that fits, measure a quick one at start.
    max_total_tokens: tokens of the KV cache, all requests together.
    engines: that share the machine and one HTTP process; None is one per NUMA node of a CPU.
    threads: that an engine, or each of its ranks, computes with, on a CPU.
    api_key: an administrator's. api_keys: a file of them, see `server/http/keys.py`. usage_file: keeps what they have
    used of their day; None is one in the cache folder.
    ssl_certfile, ssl_keyfile, ssl_ca_certs: TLS, as uvicorn has it; the last asks clients for a certificate.
    metrics_port: serves /metrics instead of port, at metrics_host.
    allowed_hosts: names in requests' Host and Origin that are answered; empty: any where a key is asked for or others
    reach the server, else this machine's own.
    max_connections: open at a time; None is as many as the system's limit on open files allows, 4096 at most.
    max_receive_seconds: how long a request may take to come, headers and body, and a TLS handshake.
    max_step_seconds: how long the engine may work on requests without ending a step; /health is red beyond.
    max_queued_requests: further ones are refused. max_queue_seconds, max_request_seconds: how long a request may wait,
    and run. max_stall_seconds: how long a client may take nothing of its answer.
    max_choices: largest `n` that one request may ask for.
    max_body_bytes: largest request body. max_request_tokens: of a request, its prompts and answers together.
    drain_seconds: how long running requests may go on after SIGTERM. lame_duck_seconds: how long, before that, new ones
    are still taken.
    log_requests: a line in the log when a request has ended; content: with what was asked and answered.
    otlp_endpoint: of a collector of OpenTelemetry traces; None sends none.
    sglang_flags: further flags, as SGLang's own command line takes them.
    """

    model: str | None = None
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 30000
    api_key: str | None = None
    api_keys: Path | None = None
    usage_file: Path | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    allowed_hosts: tuple[str, ...] = ()
    max_connections: int | None = None
    max_receive_seconds: float = 30.0
    max_step_seconds: float = 120.0
    max_queued_requests: int | None = None
    max_queue_seconds: float | None = None
    max_request_seconds: float | None = None
    max_stall_seconds: float = 60.0
    device: str = "auto"
    dtype: str = "auto"
    quantization: str = "none"
    drafter: str = "auto"
    drafter_path: str | None = None
    lookup: bool = True
    gamma: int = 7
    lookup_gamma: int = 15
    denoising_steps: int | None = None
    denoising_order: str = "left"
    initial_tokens: int = 0
    planner: str = "asynchronous"
    threshold: float = 0.3
    diffusion: DiffusionTarget | None = None
    unmasking: str = "threshold"
    unmasking_tokens: int = 1
    unmasking_threshold: float = 0.95
    block_size: int | None = None
    profile: str | None = None
    tune: bool = True
    max_running_requests: int | None = None
    context_length: int | None = None
    max_total_tokens: int | None = None
    chunked_prefill_size: int | None = None
    disable_radix_cache: bool = False
    engines: int | None = None
    threads: int | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    chat_template: str | None = None
    sampling_defaults: str = "model"
    max_choices: int = 128
    max_body_bytes: int = 10 * 2**20
    max_request_tokens: int | None = None
    drain_seconds: float = 30.0
    lame_duck_seconds: float = 0.0
    log_level: str = "warning"
    log_format: str = "text"
    log_requests: str = "none"
    otlp_endpoint: str | None = None
    sglang_flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._require_one_of("drafter", (*DRAFTERS, MEASURING_DRAFTER))
        self._require_one_of("planner", PLANNERS)
        self._require_between("threshold", 0, 1)
        self._require_one_of("unmasking", UNMASKINGS)
        self._require_between("unmasking_tokens", 1, 256)
        self._require_between("unmasking_threshold", 0, 1)
        self._require_one_of("dtype", DTYPES)
        self._require_one_of("quantization", QUANTIZATIONS)
        self._require_one_of("device", DEVICES)
        self._require_one_of("sampling_defaults", SAMPLING_DEFAULTS)
        self._require_one_of("log_level", LOG_LEVELS)
        self._require_one_of("log_format", LOG_FORMATS)
        self._require_one_of("log_requests", LOGGED_REQUESTS)
        self._require_between("port", 1, 65535)
        self._require_between("gamma", 1, MAX_GAMMA)
        self._require_between("lookup_gamma", 1, MAX_GAMMA)
        self._require_one_of("denoising_order", DENOISING_ORDERS)
        if self.denoising_steps is not None:
            if self.drafter not in DENOISING_DRAFTERS:
                raise UserError(f"--denoising-steps goes with --drafter {' or '.join(DENOISING_DRAFTERS)}")
            self._require_between("denoising_steps", 1, self.gamma)
        self._require_between("initial_tokens", 0, 1 << 20)
        if self.initial_tokens and self.drafter not in CHECKPOINT_DRAFTERS:
            raise UserError(f"--initial-tokens goes with --drafter {' or '.join(CHECKPOINT_DRAFTERS)}")
        self._require_between("max_choices", 1, 1 << 16)
        self._require_between("max_body_bytes", 1024, 1 << 32)
        self._require_between("drain_seconds", 0, 86400)
        self._require_between("lame_duck_seconds", 0, 86400)
        self._require_between("max_stall_seconds", 1, 86400)
        self._require_between("max_receive_seconds", 1, 86400)
        self._require_between("max_step_seconds", 1, 86400)
        for name, least, most in (
            ("metrics_port", 1, 65535),
            ("max_queued_requests", 1, 1 << 20),
            ("max_queue_seconds", 0.1, 86400),
            ("max_request_seconds", 0.1, 86400),
            ("max_request_tokens", 2, 1 << 40),
            ("max_connections", 1, 1 << 20),
        ):
            if getattr(self, name) is not None:
                self._require_between(name, least, most)
        for name in self.allowed_hosts:
            if name != "*" and not host_names.is_host(name):
                raise UserError(f"--allowed-hosts takes names and addresses without scheme or port, or *, not {name!r}")
        if self.usage_file is not None and self.api_keys is None:
            raise UserError("--usage-file keeps what keys have used; it goes with --api-keys")
        if self.metrics_port == self.port:
            raise UserError("--metrics-port is --port; choose another, or leave it out to serve metrics there")
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs):
            raise UserError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile")
        for name, least in (("max_running_requests", 1), ("context_length", 1), ("max_total_tokens", SMALLEST_KV)):
            if getattr(self, name) is not None:
                self._require_between(name, least, 1 << 40)
        if self.chunked_prefill_size is not None and self.chunked_prefill_size != -1:
            self._require_between("chunked_prefill_size", 1, 1 << 40)
        if self.engines is not None:
            most = hardware.gpu_count() if self.resolved_device == "cuda" else len(topology.here().cores)
            self._require_between("engines", 1, most)
        self._check_ranks()
        if self.threads is not None and self.resolved_device == "cpu":
            self._require_between("threads", 1, min(len(part.cpus) for part in self._parts))
        if self.api_key is not None and not self.api_key.strip():
            raise UserError("--api-key is empty; leave it out to serve without a key")
        if self.model is not None and not self.model.strip():
            raise UserError("--model is empty; leave it out to serve the embedded model")
        if self.device == "cuda" and not hardware.has_gpu():
            raise UserError("--device cuda, but nvidia-smi finds no GPU here; use --device cpu")

        if self.otlp_endpoint is not None:
            traces.check(self.otlp_endpoint)
        if self.threads is not None and self.resolved_device == "cuda":
            raise UserError("--threads is for CPUs; on a GPU leave it out")
        if self.quantization != "none" and self.resolved_device == "cuda":
            raise UserError(
                f"--quantization {self.quantization} is made for CPUs; on a GPU give SGLang's own after --, "
                "like -- --quantization fp8"
            )

    def _check_ranks(self) -> None:
        parallel = self.parallel
        if self.resolved_engines > 1 and parallel.nnodes > 1:
            raise UserError("--engines share one machine, --nnodes spread an engine over several; use one of them")
        if self.resolved_device == "cuda" or parallel.tp_size == 1:
            return
        if self.resolved_engines > 1:
            raise UserError("on a CPU, --engines and --tp-size both divide its cores; use one of them")
        if parallel.ranks_here > (cores := len(topology.here().cores)):
            raise UserError(
                f"--tp-size {parallel.tp_size} puts {parallel.ranks_here} ranks on this machine, which has "
                f"{cores} cores for them; each needs one of its own"
            )

    def _require_one_of(self, name: str, allowed: tuple[str, ...]) -> None:
        if getattr(self, name) not in allowed:
            raise UserError(f"{_flag(name)} is one of {', '.join(allowed)}, not {getattr(self, name)!r}")

    def _require_between(self, name: str, low: float, high: float) -> None:
        if not low <= getattr(self, name) <= high:
            raise UserError(f"{_flag(name)} is a number from {low} to {high}, not {getattr(self, name)}")

    @property
    def resolved_device(self) -> str:
        if self.device != "auto":
            return self.device
        return "cuda" if hardware.has_gpu() else "cpu"

    @property
    def resolved_dtype(self) -> str:
        """On a CPU without bfloat16 instructions, float32 is the faster of the two."""
        if self.dtype != "auto" or self.resolved_device == "cuda":
            return self.dtype
        return hardware.faster_dtype("cpu")

    @property
    def resolved_engines(self) -> int:
        """With flags of SGLang's own, which may spread one engine over the nodes, only as many as are asked for."""
        if self.engines is not None:
            return self.engines
        return 1 if self.resolved_device == "cuda" or self.sglang_flags else topology.here().nodes

    @property
    def parallel(self) -> Parallel:
        """How an engine is spread over ranks and machines; raises UserError for flags that cannot be."""
        return Parallel.of(self.sglang_flags)

    @property
    def _parts(self) -> tuple[Topology, ...]:
        return topology.here().split(self.schedulers)

    @property
    def schedulers(self) -> int:
        """Processes on this machine that compute: ranks of all engines."""
        return self.resolved_engines * self.parallel.ranks_here

    @property
    def resolved_threads(self) -> int:
        """That an engine computes with, or each of its ranks; 0 on a GPU."""
        if self.resolved_device == "cuda":
            return 0
        return self.threads or min(threads.default(part) for part in self._parts)

    @property
    def looks_up(self) -> bool:
        """Whether prompt lookup stands beside the drafter."""
        return self.lookup and self.drafter in CHECKPOINT_DRAFTERS

    @property
    def resolved_denoising_steps(self) -> int:
        """Forward passes for a draft; 0 where the drafter does not denoise."""
        if self.drafter not in DENOISING_DRAFTERS:
            return 0
        return self.denoising_steps or min(drafters.find(self.drafter).denoising_steps, self.gamma)

    @property
    def profiled(self) -> bool:
        """Whether the engine plans by a measured profile."""
        return self.diffusion is not None or (self.drafter != "off" and self.planner in PROFILED_PLANNERS)

    @property
    def unmasking_policy(self) -> str:
        """How a block-diffusion model's tokens are revealed, with its number."""
        number = self.unmasking_tokens if self.unmasking == "static" else self.unmasking_threshold
        return f"{self.unmasking} {number:g}"

    @property
    def plugin_config(self) -> PluginConfig:
        return PluginConfig(
            drafter=self.drafter,
            gamma=self.gamma,
            drafter_path=self.drafter_path or "",
            denoising_steps=self.resolved_denoising_steps,
            denoising_order=self.denoising_order,
            initial_tokens=self.initial_tokens,
            lookup_gamma=max(self.gamma, self.lookup_gamma) if self.looks_up else 0,
            planner=self.planner,
            threshold=self.threshold,
            profile=self.profile or "",
            quantization=self.quantization,
            diffusion=self.diffusion,
            unmasking=self.unmasking,
            unmasking_tokens=self.unmasking_tokens,
            unmasking_threshold=self.unmasking_threshold,
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
