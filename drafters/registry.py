"""Every drafter by name: the one list that settings, flags, messages and the plugin read.

To add a drafter, write its module and its entry here, then run `make format`. Entries name their module instead of
importing it, because command lines need only the names, and torch takes seconds to import.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from .base import Drafter, Target
    from .corpora import Corpora


@dataclass(frozen=True, slots=True)
class DrafterEntry:
    """One drafter.

    make: "module:callable" that creates it.
    takes: keyword arguments of that callable, out of gamma (draft tokens per step), target (`Target`), device (the
        target's), corpora, checkpoint (a folder) and denoising_steps.
    help: a few words for `outrider serve --help` and server/README.md.
    needs_hidden_states: it has `target_layers`; the engine must expose the target's layer outputs.
    reads_output: it reads the target's last hidden states, which the engine exposes for every target.
    kind: of its checkpoints, as in `networks.Config`; "" for the drafter's own name.
    expected_run_length: expected accepted tokens over the chance of the first, measured with the shipped weights.
    denoising_steps: the default; 0: it does not denoise. trained: `outrider train` makes such drafters.
    """

    make: str
    takes: tuple[str, ...]
    help: str
    needs_hidden_states: bool = False
    reads_output: bool = False
    kind: str = ""
    expected_run_length: float = 1.7
    denoising_steps: int = 0
    trained: bool = True

    @property
    def reads_states(self) -> bool:
        """True if forwards of the target have to return hidden states."""
        return self.needs_hidden_states or self.reads_output

    @property
    def needs_checkpoint(self) -> bool:
        return "checkpoint" in self.takes


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a drafter takes on its device: fixed, its weights; per_slot, its state for each KV slot."""

    fixed: int
    per_slot: int


TOKEN_BYTES = 4
"""Bytes of `SlotTokens` for each KV slot: the worker has one, and prompt lookup another."""

BLOCK = ("outrider.drafters.block.drafter:BlockDrafter.load", ("target", "checkpoint", "gamma"))
DIFFUSION = (
    "outrider.drafters.diffusion.drafter:DiffusionDrafter.load",
    ("target", "checkpoint", "gamma", "denoising_steps"),
)

DRAFTERS = {
    "dspark": DrafterEntry(*BLOCK, "a block in one pass, token by token", needs_hidden_states=True),
    "dflash": DrafterEntry(*BLOCK, "the same, each token by itself", needs_hidden_states=True),
    "dflash2": DrafterEntry(*BLOCK, "DFlash 2, LiLiCorr: a path of likely tokens", needs_hidden_states=True),
    "eagle3": DrafterEntry(
        "outrider.drafters.eagle.drafter:EagleDrafter.load",
        ("target", "checkpoint", "gamma"),
        "an EAGLE-3 head, a pass for each token",
        needs_hidden_states=True,
    ),
    "mtp": DrafterEntry(
        "outrider.drafters.mtp.drafter:MtpDrafter.load",
        ("target", "checkpoint", "gamma"),
        "the target's own MTP layer",
        reads_output=True,
        trained=False,
    ),
    "deer": DrafterEntry(
        *DIFFUSION,
        "a block in one denoising step, from tokens alone",
        kind="diffusion",
        expected_run_length=1.4,
        denoising_steps=1,
    ),
    "specdiff": DrafterEntry(
        *DIFFUSION, "the same, in several steps", kind="diffusion", expected_run_length=1.6, denoising_steps=2
    ),
    "ngram": DrafterEntry(
        "outrider.drafters.ngram:NgramDrafter", ("gamma", "device", "corpora"), "prompt lookup, without a model"
    ),
}


def find(name: str) -> DrafterEntry:
    """Return a drafter's entry. Raises ValueError with the known names."""
    if name not in DRAFTERS:
        raise ValueError(f"a drafter is one of {', '.join(DRAFTERS)}, not {name!r}")
    return DRAFTERS[name]


def memory(name: str, checkpoint: str, *, lookup_gamma: int, dtype: torch.dtype) -> Memory:
    """Return the memory that a drafter will take for a target in `dtype`, before it is made; arguments as in `make`. A
    drafter without a checkpoint is taken to have a `SlotTokens`."""
    entry = find(name)
    looks_up = lookup_gamma > 0 or not entry.needs_checkpoint
    tokens = TOKEN_BYTES * (2 if looks_up else 1)
    if not entry.needs_checkpoint:
        return Memory(0, tokens)

    from .networks import memory as memory_of_checkpoint

    fixed, per_slot = memory_of_checkpoint(checkpoint, dtype)
    return Memory(fixed, per_slot + tokens)


def serving(kind: str) -> tuple[str, ...]:
    """Return the drafters that load checkpoints of this kind."""
    return tuple(name for name, entry in DRAFTERS.items() if (entry.kind or name) == kind)


def make(
    name: str, target: Target, *, gamma: int, checkpoint: str = "", lookup_gamma: int = 0, denoising_steps: int = 0,
    initial_tokens: int = 0, several_sets: bool = False, deferred: bool = True, corpora: Corpora | None = None,
) -> Drafter:  # fmt: skip
    """Create the drafter of that name for the target.

    checkpoint: its folder, where it needs one.
    lookup_gamma: draft tokens of the prompt lookup that replaces such a drafter where the text repeats itself; 0: no
        lookup.
    denoising_steps: for a drafter that denoises; 0: its default.
    initial_tokens: the first tokens of each answer, for which no model drafts.
    several_sets: requests may have weight sets of their own (`weight_sets.py`); on a CPU.
    deferred: it may postpone `observe` until it drafts; False: at once, because its state is also read from outside.
    corpora: other texts for prompt lookup; on a CPU with compiled kernels.
    Raises ValueError for an unknown name and for a checkpoint that does not fit.
    """
    entry = find(name)
    known = {
        "gamma": gamma, "target": target, "device": target.device, "checkpoint": checkpoint,
        "corpora": corpora,
        "denoising_steps": denoising_steps or entry.denoising_steps,
    }  # fmt: skip
    drafter: Drafter = pkgutil.resolve_name(entry.make)(**{argument: known[argument] for argument in entry.takes})
    if drafter.target_layers and target.capture_layers is not None:
        target.capture_layers(list(drafter.target_layers))
    if not entry.needs_checkpoint:
        return drafter

    from .lookup_first import LookupFirst
    from .ngram import NgramDrafter
    from .wrappers import DeferredObserve, Initialised

    if several_sets:
        from .block.drafter import BlockDrafter
        from .weight_sets import WeightSets

        if not isinstance(drafter, BlockDrafter):
            raise ValueError(f"only DSpark and DFlash take several sets of weights, {name} does not")
        drafter = WeightSets(drafter)
    if deferred and (drafter.target_layers or drafter.reads_output) and str(target.device).startswith("cpu"):
        drafter = DeferredObserve(drafter)
    if initial_tokens:
        drafter = Initialised(drafter, initial_tokens)
    if not lookup_gamma:
        return drafter
    lookup = NgramDrafter(lookup_gamma, device=target.device, corpora=corpora)
    return LookupFirst(lookup, drafter, expected_run_length=entry.expected_run_length)
