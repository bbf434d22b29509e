"""The contract between the speculative worker and every drafter.

Each decode step calls `propose` once, then `observe` once with the tokens that the target has processed. A prefill
chunk calls `observe`, then `prefilled`, which says which requests the tokens belong to. A drafter never sees the
scheduler. A multi-step diffusion drafter runs its steps inside `propose`.

Draft state is indexed by the target's KV slots: a prefix shared by the radix cache brings its draft state along, and a
freed slot frees both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import pad

from outrider.kernels.blocks import BlockRows
from outrider.kernels.sampling import Rules

from .corpora import Corpora

Rows = torch.Tensor | BlockRows
"""A matrix [V, d] that is read by row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A loaded target.

    config: its Hugging Face (text) config.
    weights: returns embedding and head, each [V, d] without padding, to be used in place; indexing gives rows as a
        tensor. A function, because some models store them in another form and most drafters need neither.
    dtype: of its activations. device: where it runs.
    capture_layers: makes the engine pass the outputs of these layers to `Drafter.observe` from now on, 0 being the
        first decoder layer; None where the engine cannot.
    """

    config: Any
    weights: Callable[[], tuple[Rows, Rows]]
    dtype: torch.dtype
    device: torch.device | str
    capture_layers: Callable[[list[int]], None] | None = None


@dataclass(frozen=True, slots=True)
class Features:
    """The N tokens that the target has just processed; their keys and values are in the cache.

    hidden: [N, m*d] outputs of the `target_layers`, concatenated in that order, or [N, d] where the drafter
        `reads_output`; None where the drafter reads neither.
    tokens, positions, slots: [N] int64. sets: [N] int64, the weight set of each token's request, as in `DraftBatch`.
    """

    hidden: torch.Tensor | None
    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    sets: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Prompts of R requests, or chunks of prompts, that the target has just read.

    page_table, rows: as in `DraftBatch`. seq_lens: [R] int64, tokens in the cache, including the chunk.
    counts: tokens of each chunk, known to the host. longest: the largest of seq_lens, known to the host.
    """

    page_table: torch.Tensor
    rows: torch.Tensor
    seq_lens: torch.Tensor
    counts: Sequence[int]
    longest: int


@dataclass(frozen=True, slots=True)
class ForcedTokens:
    """Tokens that grammars force, for R requests: tokens [R, gamma] int64, lens [R] int64, confidence [R, gamma]
    float32 as in `Draft`."""

    tokens: torch.Tensor
    lens: torch.Tensor
    confidence: torch.Tensor


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """R requests to draft for.

    anchors: [R] int64, the last committed token of each request (x_0); the target has not processed it yet.
    seq_lens: [R] int64, tokens in the cache, which is the anchor's position.
    page_table: [rows, context] int32, the KV slot of every position; positions seq_len .. seq_len + gamma have slots.
    rows: [R] int64, each request's row of `page_table`. temperatures: [R] float32; 0 means greedy.
    draft_mask: [R] bool, requests for which a model may draft, decided by the past alone; the rest get a draft of
        length 0, or one found without a model. None: all. It only saves time: drafting for more requests does no harm.
    depth: the most tokens that a model drafts per request, decided by the past alone; None: all that it can. Drafters
        without `shortens` ignore it.
    keys: [R, gamma] int64, the only randomness a drafter may use: token k is drawn with keys[:, k-1] by
        `kernels.noise.gumbel_argmax`. A seeded request has the target's own keys, so that drafter and target tend to
        draw the same token.
    seeds, seeded: [R] int64, [R] bool; `graphs.py` computes the keys from them. None: not known.
    top_ks, top_ps, min_ps: [R] int64, [R] float32, [R] float32, the remaining sampling rules
        (`kernels.sampling.Rules`); None: off for all. A drafter that applies them to q comes nearer to the target's
        distribution.
    wants_probs: the draft's probs are needed.
    decided: [R] bool, greedy and seeded requests: their probs are not read. None: any may be read.
    probs_room: [at least R, G, V'] float32, a buffer for probs, exactly as wide as they are; None: the drafter
        allocates.
    all_greedy: whether all requests are greedy, where the host knows; None: read `temperatures`, which waits for a
        device.
    answer_lens: [R] int64, tokens of each answer so far, including the anchor; None: not known.
    longest: an upper bound of seq_lens + 1, where the host knows one; None: read `seq_lens`, which waits for a device.
        Shapes depend on it, so it stays the same for many steps.
    sets: [R] int64, number of each request's weight set, see `Drafter.reload`; None: 0, the set loaded at the start.
    corpora: [R] int64, number of the corpus (`corpora.py`) that each request may look up; None: none.
    forced: tokens that each answer's grammar forces next; None: none.
    """

    anchors: torch.Tensor
    seq_lens: torch.Tensor
    page_table: torch.Tensor
    rows: torch.Tensor
    temperatures: torch.Tensor
    keys: torch.Tensor
    seeds: torch.Tensor | None = None
    seeded: torch.Tensor | None = None
    draft_mask: torch.Tensor | None = None
    depth: int | None = None
    top_ks: torch.Tensor | None = None
    top_ps: torch.Tensor | None = None
    min_ps: torch.Tensor | None = None
    wants_probs: bool = True
    decided: torch.Tensor | None = None
    probs_room: torch.Tensor | None = None
    all_greedy: bool | None = None
    answer_lens: torch.Tensor | None = None
    longest: int | None = None
    sets: torch.Tensor | None = None
    corpora: torch.Tensor | None = None
    forced: ForcedTokens | None = None

    @property
    def rules(self) -> Rules:
        return Rules(self.temperatures, self.top_ks, self.top_ps, self.min_ps)

    def select(self, requests: torch.Tensor) -> DraftBatch:
        """Return the batch of `requests` [M] int64 alone, without a draft mask: the model drafts for all of them."""
        return replace(
            self, anchors=self.anchors[requests], seq_lens=self.seq_lens[requests], rows=self.rows[requests],
            keys=self.keys[requests], answer_lens=None if self.answer_lens is None else self.answer_lens[requests],
            sets=None if self.sets is None else self.sets[requests],
            corpora=None if self.corpora is None else self.corpora[requests], draft_mask=None, forced=None,
            decided=None if self.decided is None else self.decided[requests], **self.rules.of(requests)._asdict(),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposed block for each of R requests.

    tokens: [R, gamma] int64 in the target's vocabulary; positions at or beyond `lens` are arbitrary valid tokens.
    lens: [R] int64 in 0..gamma, how many tokens were proposed.
    confidence: [R, gamma] float32, c_k = P(token k is kept | tokens before it are). It may depend on x_0 .. x_{k-1} but
        never on x_k or later (DSpark, section 3.2.1), unless a later token's q is a point mass. Calibration corrects
        it; a drafter without an estimate may return a constant.
    probs: [R, G, V'] float32, with `lens` <= G <= gamma: q, the exact distribution of each token given everything that
        the tokens before it, and q and c up to it, depend on. That is the distribution the token was drawn from, unless
        a token to its left was drawn later and depends on it; then only a point mass is exact. None: a point mass on
        every token (greedy and lookup drafts), or not wanted. Rows of greedy and seeded requests are not read. Probs in
        the buffer of `Drafter.reserve_probs` have more rows; the next draft overwrites them.
    vocab: [V'] int64, the target's token of each column of `probs`, strictly increasing; None: V' is the target's
        vocabulary. Tokens outside it have q = 0.
    looked_up: [R] bool, drafts made by prompt lookup, decided before any of their tokens was drawn; None: none.
    points: [R] bool, drafts with a point mass as q of every token, whatever `probs` contains; their lens may exceed G.
        None: none.
    across: [R] bool, looked-up drafts that come from other requests' texts; None: none.
    by_grammar: [R] bool, looked-up drafts that a grammar forces; None: none.
    drafting: number of requests for which a model drafted, including drafts that were not used; draft costs are learnt
        from it.
    """

    tokens: torch.Tensor
    lens: torch.Tensor
    confidence: torch.Tensor
    probs: torch.Tensor | None = None
    vocab: torch.Tensor | None = None
    looked_up: torch.Tensor | None = None
    drafting: int = 0
    across: torch.Tensor | None = None
    points: torch.Tensor | None = None
    by_grammar: torch.Tensor | None = None

    @classmethod
    def of(
        cls, tokens: torch.Tensor, probs: torch.Tensor | None, confidence: torch.Tensor, vocab: torch.Tensor | None
    ) -> Draft:
        """Return a model's draft that proposes all tokens [R, M]."""
        lens = tokens.new_full((len(tokens),), tokens.shape[1])
        return cls(tokens, lens, confidence, probs, None if probs is None else vocab, drafting=len(tokens))

    @classmethod
    def nothing(cls, requests: int, gamma: int, device: torch.device | str) -> Draft:
        """Return a draft of length 0 for each request."""
        tokens = torch.zeros((requests, gamma), dtype=torch.int64, device=device)
        return cls(tokens, tokens.new_zeros(requests), torch.zeros((requests, gamma), device=device))

    def widened(self, gamma: int) -> Draft:
        """Return the same draft with columns for `gamma` tokens; probs stay as they are."""
        more = (0, gamma - self.tokens.shape[1])
        return replace(self, tokens=pad(self.tokens, more), confidence=pad(self.confidence, more))

    def spread(self, requests: torch.Tensor, anchors: torch.Tensor, *, drafting: int | None = None) -> Draft:
        """Scatter this draft of M requests to rows `requests` [M] of R = len(anchors); other rows get length 0.

        drafting: as in `Draft`; None: as in this draft.
        """
        shape = len(anchors), self.tokens.shape[1]
        tokens, lens = anchors[:, None].repeat(1, shape[1]), torch.zeros_like(anchors)
        confidence = self.confidence.new_zeros(shape)
        tokens[requests], lens[requests], confidence[requests] = self.tokens, self.lens, self.confidence
        probs = None
        if self.probs is not None:
            probs = self.probs.new_zeros(len(anchors), *self.probs.shape[1:])
            probs[requests] = self.probs
        return Draft(
            tokens, lens, confidence, probs, self.vocab, drafting=self.drafting if drafting is None else drafting
        )


class Drafter(ABC):
    """Proposes blocks of up to `gamma` tokens. Only `propose` is required.

    `slot_tokens.SlotTokens` reads a request's text back; `ngram.py` is a complete drafter.
    tests/drafters/test_contract.py holds every drafter of the registry to this contract.
    """

    gamma: int
    looks_up: bool = False
    """True if `look_up` drafts without a model; `Draft.looked_up` marks such drafts."""
    shortens: bool = False
    """True if its model drafts fewer tokens, in less time, when `DraftBatch.depth` is smaller."""
    assesses_itself: bool = False
    """True if its confidences come from its own distributions, for lack of a head; outcomes then correct them."""
    corpora: Corpora | None = None
    """Texts of other requests that it looks up."""
    target_layers: tuple[int, ...] = ()
    """Target layers that `observe` reads; 0 is the output of the first decoder layer."""
    reads_output: bool = False
    """True if `observe` reads the target's last hidden states, after its final norm. Excludes `target_layers`."""

    def allocate(self, slots: int) -> None:  # noqa: B027 - a drafter may have no state
        """Allocate the draft state of `slots` KV slots (called once, before the first `observe`)."""

    def slot_state(self) -> list[torch.Tensor]:
        """Return the tensors [slots, ...] of the allocated draft state. A drafter with the same weights drafts the same
        after they are copied to its slots."""
        return []

    def reserve_probs(self, requests: int) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Allocate a buffer [requests, G, V'] float32 for the probs of captured drafts (`graphs.py`). Return it and
        `Draft.vocab`; None: `propose` cannot be captured, because its work varies. Called once, after `allocate`."""
        return None

    def observe(self, features: Features) -> None:  # noqa: B027 - a drafter may have no state
        """Store the draft state of tokens that are now committed, or prefilled, at `features.slots`."""

    def prefilled(self, chunks: Prefilled) -> None:  # noqa: B027 - most need no more than `observe`
        """Record which requests the tokens of the last `observe` belong to; may wait for a device."""

    @abstractmethod
    def propose(self, batch: DraftBatch) -> Draft:
        """Draft a block for every request of the batch."""

    def reload(self, checkpoint: str, number: int = 0) -> None:
        """Draft with the weights of another checkpoint folder of the same shape from now on.

        Draft state made by the previous weights stays. Raises ValueError, leaving the drafter unchanged, where the
        checkpoint does not fit.

        number: of the weight set that is replaced or added, see `DraftBatch.sets`; 0: the set loaded at the start.
        """
        raise ValueError(f"the weights of a {type(self).__name__} cannot be exchanged while it serves")

    def drop(self, number: int) -> None:  # noqa: B027 - most have one set
        """Drop a weight set that was added; its requests are then drafted with set 0."""

    def look_up(self, batch: DraftBatch) -> Draft:
        """Draft without a model; only where `looks_up`."""
        raise NotImplementedError(f"{type(self).__name__} drafts by its model alone")
