"""Options of a request in addition to SGLang's own parameters; only this module writes and reads them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

KEY = "outrider"
"""Key in SGLang's `custom_params`, which travel with a request into the scheduler's process."""


class OwnDrafter(NamedTuple):
    """The drafter of a request's owner, where owners have their own; by default the shared one.

    learner, learned, adapter: as in `RequestOptions`.
    secret: digest of the key that alone shares its cached prefixes; "": shared by all.
    """

    learner: str = ""
    learned: str = ""
    adapter: str | None = None
    secret: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options of one request; the defaults hold for a request without options.

    enabled: draft for it at all. gamma: most draft tokens per step; None: the server's.
    planned: the planner decides how much is verified; False verifies every drafted token.
    replayed: count the states of this request's blocks (block diffusion).
    min_tokens_per_second: its service level; None: none.
    trace: report the origin of each token (`decode/optional/trace.py`).
    learn: keep its answer for the drafter to learn from.
    learner, learned: with a drafter for each key or adapter, the owner's learner (`drafters/learning/owners.py`), and
        the drafter of it that drafts; "": the initial one.
    adapter: SGLang's id of the LoRA adapter of both; None: the model.
    corpus: owner of the texts that are looked up for it and that its own text joins; None: none.
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
        """Return the options for SGLang's `custom_params`; None if they equal the defaults."""
        return None if self == DEFAULTS else {KEY: asdict(self)}

    @classmethod
    def from_custom_params(cls, params: dict[str, Any] | None) -> RequestOptions:
        """Read the options written by `to_custom_params`; other parameters are ignored."""
        options = (params or {}).get(KEY)
        return cls(**options) if options else DEFAULTS

    def own_drafter(self, lora_id: str | None) -> tuple[str, str]:
        """Return learner and drafter for a request that is served with this adapter; empty if they belong to another
        adapter.

        A key's are the model's, and an adapter may have been replaced by another of the same name.
        """
        return (self.learner, self.learned) if self.adapter == lora_id else ("", "")

    def draft_limit(self, gamma: int) -> int:
        """Return the most draft tokens per step on a server that drafts `gamma`; 0: none."""
        if not self.enabled:
            return 0
        return gamma if self.gamma is None else min(gamma, self.gamma)


DEFAULTS = RequestOptions()
