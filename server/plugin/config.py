"""Settings of the SGLang plugin, which travel in the environment because it runs in spawned processes."""

import json
import os
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass
from typing import Self

from .diffusion.target import DiffusionTarget

ENV = "OUTRIDER_PLUGIN_CONFIG"


@dataclass(frozen=True, slots=True)
class PluginConfig:
    """Settings of the speculative worker, or of block diffusion in its place.

    drafter: which drafter proposes tokens; "off": no speculation is set up. gamma: draft tokens per step.
    drafter_path: folder of the drafter's checkpoint; "" for drafters without one.
    denoising_steps: of a drafter that denoises; 0: its default.
    initial_tokens: the first tokens of each answer, for which no drafter's model drafts.
    lookup_gamma: draft tokens per step of the prompt lookup that replaces a drafter with a checkpoint where text
        repeats itself; 0: no lookup.
    verification: "block" or "token", how drafts of sampled requests without a seed are verified.
    planner: which planner decides on verification. threshold: of survival, for the planner of that name.
    profile: folder of the profile measured for this server; "" or a missing folder: none.
    quantization: "int8" rounds the target's weights as they are loaded; "none" keeps them.
    activations: "int8" rounds the inputs of products with weights in blocks; "float" keeps them.
    diffusion: parameters of a block-diffusion target. unmasking: the policy that reveals its tokens.
    unmasking_tokens, unmasking_threshold: of the policies static and threshold.
    learning: folder for learning from answers (`drafters/learning`); "": none.
    learned: the drafter in it that serves in place of drafter_path's weights; "": none.
    learn_keys: most keys or adapters with their own drafters in memory; 0: all share one drafter.
    lookup_across: look up other requests' texts.
    lookup_store: their file; "": none. lookup_tokenizer: digest of their tokenizer.
    role: "prefill" or "decode" on separate servers; "": one server does both.
    max_pause: seconds that answers may pause while prompts are read; 0: SGLang cuts prompts as configured.
    """

    drafter: str = "off"
    gamma: int = 7
    drafter_path: str = ""
    denoising_steps: int = 0
    initial_tokens: int = 0
    lookup_gamma: int = 0
    verification: str = "block"
    planner: str = "asynchronous"
    threshold: float = 0.3
    profile: str = ""
    quantization: str = "none"
    activations: str = "float"
    diffusion: DiffusionTarget | None = None
    unmasking: str = "threshold"
    unmasking_tokens: int = 1
    unmasking_threshold: float = 0.95
    learning: str = ""
    learned: str = ""
    learn_keys: int = 0
    lookup_across: bool = False
    lookup_store: str = ""
    lookup_tokenizer: str = ""
    role: str = ""
    max_pause: float = 0.0

    @property
    def by_block(self) -> bool:
        return self.verification == "block"

    @property
    def step_tokens(self) -> int | None:
        """Tokens that each step of a block reveals; None: as many as are certain."""
        return self.unmasking_tokens if self.unmasking == "static" else None

    @property
    def longest(self) -> int:
        """Draft tokens per step, by model or lookup."""
        return max(self.gamma, self.lookup_gamma)

    def to_env(self, environ: MutableMapping[str, str] = os.environ) -> None:
        environ[ENV] = json.dumps(asdict(self))

    @classmethod
    def from_env(cls, environ: MutableMapping[str, str] = os.environ) -> Self:
        """Read the settings that the parent process wrote; without them (SGLang started on its own) the defaults
        hold."""
        fields = json.loads(environ.get(ENV, "{}"))
        if fields.get("diffusion"):
            fields["diffusion"] = DiffusionTarget(**fields["diffusion"])
        return cls(**fields)
