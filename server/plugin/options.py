"""Options of a request beside SGLang's own parameters; only this module writes and reads them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

KEY = "outrider"
"""Key in SGLang's `custom_params`, which travel with a request into the scheduler's process."""


class OwnDrafter(NamedTuple):
    """The drafter of a request's owner, where owners have their own; the defaults: the one that all share.

    learner, learned, adapter: as of `RequestOptions`. secret: digest of the key that alone shares its cached prefixes;
    "": all do.
    """

    learner: str = ""
    learned: str = ""
    adapter: str | None = None
    secret: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options of one request; the defaults are those of a request that says nothing.

    enabled: draft for it at all. gamma: draft tokens per step, at most; None: the server's.
    planned: the planner decides how much is verified; False verifies every drafted token.
    replayed: count the states that the blocks of this request come through (block diffusion).
    min_tokens_per_second: its service level; None: none.
    trace: say of each token who made it (`decode/trace.py`).
    learn: its answer is kept for the drafter to learn from.
    learner, learned: with a drafter for each key or adapter, the owner's learner (`drafters/learning/owners.py`), and
        which of its drafters drafts; "": the one of the start.
    adapter: SGLang's id of the LoRA adapter that both are of; None: the model.
    corpus: owner of the texts that are looked up for it, and to which its own is added; None: none.
    stored: its text may be written to the file of such texts.
    """

    enabled: bool = True
    gamma: int | None = None
    planned: bool = True
    replayed: bool = False
    min_tokens_per_second: float | None = None
    trace: bool = False
    learn: bool = False
    learner: str = ""
    learned: str = ""
    adapter: str | None = None
    corpus: str | None = None
    stored: bool = True

    def to_custom_params(self) -> dict[str, Any] | None:
        """The options for SGLang's `custom_params`; None where nothing differs from the defaults."""
        return None if self == DEFAULTS else {KEY: asdict(self)}

    @classmethod
    def from_custom_params(cls, params: dict[str, Any] | None) -> RequestOptions:
        """Read what `to_custom_params` wrote; parameters of others are left alone."""
        said = (params or {}).get(KEY)
        return cls(**said) if said else DEFAULTS

    def own_drafter(self, lora_id: str | None) -> tuple[str, str]:
        """Learner and drafter for a request that is served with this adapter; empty where they are of another: a key's
        are the model's, and an adapter may have gone and another come by its name."""
        return (self.learner, self.learned) if self.adapter == lora_id else ("", "")

    def draft_limit(self, gamma: int) -> int:
        """Draft tokens per step, at most, on a server that drafts `gamma`; 0: none."""
        if not self.enabled:
            return 0
        return gamma if self.gamma is None else min(gamma, self.gamma)


DEFAULTS = RequestOptions()
