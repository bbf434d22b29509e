"""The settings of a server, checked in one place before anything slow begins."""

from dataclasses import dataclass

from outrider.drafters import registry as drafters

from ..errors import UserError
from ..machine import hardware, host_names, threads, topology
from ..machine.topology import Topology
from ..plugin.config import PluginConfig
from ..plugin.diffusion.target import DiffusionTarget
from . import traces
from .declared import CHECKPOINT_DRAFTERS, DENOISING_DRAFTERS, MAX_PAUSE, PROFILED_PLANNERS, Declared
from .parallel import Parallel
from .setting import check, require_between

LOOKUP_GAMMA = 15
"""Least draft tokens per step of prompt lookup with a drafter model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Declared):
    """All settings of `outrider serve`.

    `resolve` finds the first three. diffusion: description of a block-diffusion model. learned: folder of the learned
    drafter that replaces the one of drafter_path; "": none. lookup_tokenizer: digest for `lookup_store`.
    sglang_flags: further flags, as SGLang's own command line takes them.
    """

    diffusion: DiffusionTarget | None = None
    learned: str = ""
    lookup_tokenizer: str = ""
    sglang_flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check(self)
        self._check_speculation()
        self._check_http()
        self._check_machine()
        self.parallel.check_one_server(
            {
                "--learn": self.learn,
                "--lora-paths or --enable-lora": self.has_adapters,
                "--tp-size": self.parallel.tp_size > 1,
                "--engines": self.resolved_engines > 1,
            }
        )

    def _check_speculation(self) -> None:
        if self.model is not None and not self.model.strip():
            raise UserError("--model is empty; leave it out to serve the embedded model")
        if self.learn_per != "server" and not self.learn:
            raise UserError(f"--learn-per {self.learn_per} goes with --learn")
        if self.denoising_steps is not None:
            if self.drafter not in DENOISING_DRAFTERS:
                raise UserError(f"--denoising-steps goes with --drafter {' or '.join(DENOISING_DRAFTERS)}")
            require_between("denoising_steps", self.denoising_steps, 1, self.gamma)
        if self.initial_tokens and self.drafter not in CHECKPOINT_DRAFTERS:
            raise UserError(f"--initial-tokens goes with --drafter {' or '.join(CHECKPOINT_DRAFTERS)}")

    def _check_http(self) -> None:
        for name in self.allowed_hosts:
            if name != "*" and not host_names.is_host(name):
                raise UserError(f"--allowed-hosts takes names and addresses without scheme or port, or *, not {name!r}")
        if self.usage_file is not None and self.api_keys is None:
            raise UserError("--usage-file keeps the keys' usage; it goes with --api-keys")
        if self.metrics_port == self.port:
            raise UserError("--metrics-port is --port; choose another, or leave it out to serve metrics there")
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs):
            raise UserError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile")
        if self.api_key is not None and not self.api_key.strip():
            raise UserError("--api-key is empty; leave it out to serve without a key")
        if self.otlp_endpoint is not None:
            traces.check(self.otlp_endpoint)

    def _check_machine(self) -> None:
        if self.device == "cuda" and not hardware.has_gpu():
            raise UserError("--device cuda, but nvidia-smi finds no GPU here; use --device cpu")
        on_gpu = self.resolved_device == "cuda"
        if self.engines is not None:
            require_between("engines", self.engines, 1, hardware.gpu_count() if on_gpu else len(topology.here().cores))
        self._check_ranks()
        if on_gpu and self.threads is not None:
            raise UserError("--threads is for CPUs; on a GPU leave it out")
        if on_gpu and self.quantization != "none":
            raise UserError(
                f"--quantization {self.quantization} is made for CPUs; on a GPU give SGLang's own after --, "
                "like -- --quantization fp8"
            )
        if on_gpu and self.activations == "int8":
            raise UserError(f"--activations {self.activations} is made for CPUs; on a GPU leave it out")
        if self.threads is not None:
            require_between("threads", self.threads, 1, min(len(part.cpus) for part in self._parts))

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

    @property
    def resolved_device(self) -> str:
        if self.device != "auto":
            return self.device
        return "cuda" if hardware.has_gpu() else "cpu"

    @property
    def resolved_dtype(self) -> str:
        """The type of weights. On a CPU without bfloat16 instructions, float32 is the faster of the two."""
        if self.dtype != "auto" or self.resolved_device == "cuda":
            return self.dtype
        return hardware.faster_dtype("cpu")

    @property
    def resolved_max_pause(self) -> float:
        if self.max_pause is not None:
            return self.max_pause
        return MAX_PAUSE[self.resolved_device]

    @property
    def reads_in_chunks(self) -> bool:
        """True where prompts are read in chunks that keep `max_pause`."""
        reads = self.diffusion is None and self.parallel.role != "decode"
        return reads and self.chunked_prefill_size != -1 and self.resolved_max_pause > 0

    @property
    def resolved_engines(self) -> int:
        """Number of engines; by default one with SGLang's own flags, which may spread it over nodes."""
        if self.engines is not None:
            return self.engines
        return 1 if self.resolved_device == "cuda" or self.sglang_flags else topology.here().nodes

    @property
    def parallel(self) -> Parallel:
        """Spread of an engine over ranks, machines and servers. Raises UserError for wrong flags."""
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
        """Threads of an engine, or of each of its ranks; 0 on a GPU."""
        if self.resolved_device == "cuda":
            return 0
        return self.threads or min(threads.default(part) for part in self._parts)

    @property
    def has_adapters(self) -> bool:
        """True if the server has adapters or may load some."""
        return self.enable_lora or bool(self.lora_paths)

    @property
    def looks_up(self) -> bool:
        """True if prompt lookup supplements the drafter."""
        return self.lookup and self.drafter in CHECKPOINT_DRAFTERS

    @property
    def looks_across(self) -> bool:
        """True where prompt lookup reads other requests' texts."""
        looks_up = self.lookup_across and (self.looks_up or self.drafter == "ngram")
        return looks_up and self.resolved_device == "cpu" and self.diffusion is None

    @property
    def learns_per_owner(self) -> bool:
        """True where each API key, or each adapter, has a learned drafter of its own."""
        return self.learn and self.learn_per != "server"

    @property
    def resolved_denoising_steps(self) -> int:
        """Forward passes for a draft; 0 where the drafter does not denoise."""
        if self.drafter not in DENOISING_DRAFTERS:
            return 0
        return self.denoising_steps or min(drafters.find(self.drafter).denoising_steps, self.gamma)

    @property
    def profiled(self) -> bool:
        """True where the engine plans by a measured profile."""
        return self.diffusion is not None or (self.drafter != "off" and self.planner in PROFILED_PLANNERS)

    @property
    def unmasking_policy(self) -> str:
        """`--unmasking` with its threshold or number of tokens."""
        number = self.unmasking_tokens if self.unmasking == "static" else self.unmasking_threshold
        return f"{self.unmasking} {number:g}"

    @property
    def plugin_config(self) -> PluginConfig:
        return PluginConfig(
            drafter=self.drafter,
            gamma=self.gamma,
            drafter_path=self.drafter_path or "",
            denoising_steps=self.resolved_denoising_steps,
            initial_tokens=self.initial_tokens,
            lookup_gamma=max(self.gamma, LOOKUP_GAMMA) if self.looks_up else 0,
            verification=self.verification,
            planner=self.planner,
            threshold=self.threshold,
            profile=self.profile or "",
            quantization=self.quantization,
            activations=self.activations,
            diffusion=self.diffusion,
            unmasking=self.unmasking,
            unmasking_tokens=self.unmasking_tokens,
            unmasking_threshold=self.unmasking_threshold,
            learning=str(self.learn_folder) if self.learn else "",
            learned=self.learned,
            learn_keys=self.learn_keys if self.learns_per_owner else 0,
            lookup_across=self.looks_across,
            lookup_store=str(self.lookup_store or ""),
            lookup_tokenizer=self.lookup_tokenizer,
            role=self.parallel.role,
            max_pause=self.resolved_max_pause if self.reads_in_chunks else 0.0,
        )
