"""The contract between the speculative worker and every drafter.

One decode step calls `propose` once, and `observe` once for whatever the target has just processed
(prefill chunks included, of which `prefilled` then tells whose they are), so a drafter never sees the scheduler.
A multi-step diffusion drafter runs its steps inside `propose`.

Draft state is indexed by the target's KV slots: a prefix handed on by the radix cache brings its draft state along,
and a freed slot frees both.
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
"""A matrix [V, d] of which rows are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A loaded target.

    config: its Hugging Face (text) config.
    weights: embedding and head, each [V, d] without padding, to be used in place; indexing gives rows as a tensor. A
        function, because not every model keeps them where they are looked for, and most drafters never ask.
    dtype: of its activations. device: where it runs.
    capture_layers: have the engine hand the outputs of these layers to `Drafter.observe` from now on, 0 being the first
        decoder layer; None where the engine cannot.
    """

    config: Any
    weights: Callable[[], tuple[Rows, Rows]]
    dtype: torch.dtype
    device: torch.device | str
    capture_layers: Callable[[list[int]], None] | None = None


@dataclass(frozen=True, slots=True)
class Features:
    """The tokens that the target has just processed: N tokens whose keys and values now stand in the cache.

    hidden: [N, m*d] outputs of the `target_layers`, concatenated in that order, or where it `reads_output` [N, d]; None
        where the drafter asks for none.
    tokens, positions, slots: [N] int64. sets: [N] int64, as in `DraftBatch`, of each one's request.
    """

    hidden: torch.Tensor | None
    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    sets: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Prompts of R requests, or chunks of them, that the target has just read.

    page_table, rows: as in `DraftBatch`. seq_lens: [R] int64, tokens in the cache, those of the chunk included.
    counts: tokens of each chunk. longest: the largest of seq_lens; both as the host knows them.
    """

    page_table: torch.Tensor
    rows: torch.Tensor
    seq_lens: torch.Tensor
    counts: Sequence[int]
    longest: int


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """R requests to draft for.

    anchors: [R] int64, the last committed token of each request (x_0); the target has not processed it yet.
    seq_lens: [R] int64, tokens in the cache, which is the anchor's position.
    page_table: [rows, context] int32, the KV slot of every position; positions seq_len .. seq_len + gamma have slots.
    rows: [R] int64, each request's row of `page_table`.
    temperatures: [R] float32; 0 means greedy.
    draft_mask: [R] bool, requests for which a model may draft, decided by the past alone; others get a draft of
        length 0, or what is found without a model. None: all. It saves time: drafts beyond it do no harm.
    depth: tokens that a model drafts for each at most, decided by the past alone; None: all that it can. Of drafters
        without `shortens` it is not read.
    keys: [R, gamma] int64, the only randomness a drafter may use: token k is drawn with keys[:, k-1] by
        `kernels.noise.gumbel_argmax`. A seeded request's are the target's own, so that both tend to draw the same.
    top_ks: [R] int64, top_ps, min_ps: [R] float32, other sampling rules (`kernels.sampling.Rules`); None: off for all.
        Where q follows them it comes nearer to the target's distribution.
    wants_probs: the draft's probs are needed.
    decided: [R] bool, greedy and seeded requests, whose probs are not read; None: any may be.
    probs_room: [at least R, G, V'] float32, where probs are to be left, as wide as they are; None: in memory of their
        own.
    all_greedy: whether all are greedy, where the host knows; None: `temperatures` are read, which waits for a device.
    answer_lens: [R] int64, tokens of each answer so far, the anchor included; None: not known.
    longest: bound of texts with their anchors, seq_lens + 1, where the host knows one; None: they are read, which
        waits for a device. Shapes depend on it, so it is the same for many steps.
    sets: [R] int64, number of the set of weights that each request is drafted with, see `Drafter.reload`; None: 0,
        that of the start, for all.
    corpora: [R] int64, number of the corpus of other texts that each may be looked up in, see `corpora.py`; None: none.
    """

    anchors: torch.Tensor
    seq_lens: torch.Tensor
    page_table: torch.Tensor
    rows: torch.Tensor
    temperatures: torch.Tensor
    keys: torch.Tensor
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

    @property
    def rules(self) -> Rules:
        return Rules(self.temperatures, self.top_ks, self.top_ps, self.min_ps)

    def select(self, requests: torch.Tensor) -> DraftBatch:
        """The part that is about `requests` [M] int64, for all of which the model drafts."""
        return replace(
            self,
            anchors=self.anchors[requests],
            seq_lens=self.seq_lens[requests],
            rows=self.rows[requests],
            keys=self.keys[requests],
            answer_lens=None if self.answer_lens is None else self.answer_lens[requests],
            sets=None if self.sets is None else self.sets[requests],
            corpora=None if self.corpora is None else self.corpora[requests],
            draft_mask=None,
            decided=None if self.decided is None else self.decided[requests],
            **self.rules.of(requests)._asdict(),
        )


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposed block for each of R requests.

    tokens: [R, gamma] int64 in the target's vocabulary; positions at or beyond `lens` are arbitrary valid tokens.
    lens: [R] int64 in 0..gamma, how many tokens were proposed.
    confidence: [R, gamma] float32, c_k = P(token k is kept | tokens before it are), which may depend on
        x_0 .. x_{k-1} but never on x_k or later (DSpark, section 3.2.1), unless a later token's q is a point mass.
        Calibration learns what it is worth; a constant will do where nothing is known.
    probs: [R, G, V'] float32, q, with `lens` <= G <= gamma: exactly the distribution of each token given all that q and
        c of the tokens up to it, and the tokens before it, depend on. That is what it was drawn from where no token to
        its left was drawn later, with knowledge of it, and always a point mass on the token itself; a drafter that
        draws in another order gives the latter wherever the former does not hold (`diffusion/denoise.py`). None means
        a point mass on every token (greedy and lookup drafts), or that they are not wanted. Rows of greedy and seeded
        requests are not read. What lies in the room of `Drafter.reserve_probs` has more rows, and is overwritten by the
        next draft.
    vocab: [V'] int64, the target's token of each column of `probs`, strictly increasing; None means V' is the
        target's vocabulary. Tokens outside it have q = 0.
    looked_up: [R] bool, drafts that prompt lookup made, decided before any of their tokens was drawn; None: none.
    points: [R] bool, drafts whose q is a point mass on every token, whatever probs says; their lens may be above G;
        None: none.
    across: [R] bool, those of them that were found in other requests' texts; None: none.
    drafting: requests for which a model drafted, whether its draft was taken or not; costs of drafts are learnt by it.
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

    @classmethod
    def of(
        cls,
        tokens: torch.Tensor,
        probs: torch.Tensor | None,
        confidence: torch.Tensor,
        vocab: torch.Tensor | None,
        lens: torch.Tensor | None = None,
    ) -> Draft:
        """A model's draft of all of these tokens [R, M] for each of R requests. lens: M of each; None: they are
        made."""
        lens = tokens.new_full((len(tokens),), tokens.shape[1]) if lens is None else lens
        return cls(tokens, lens, confidence, probs, None if probs is None else vocab, drafting=len(tokens))

    @classmethod
    def nothing(cls, requests: int, gamma: int, device: torch.device | str) -> Draft:
        """No tokens for any of so many requests."""
        tokens = torch.zeros((requests, gamma), dtype=torch.int64, device=device)
        return cls(tokens, tokens.new_zeros(requests), torch.zeros((requests, gamma), device=device))

    def widened(self, gamma: int) -> Draft:
        """The same, with columns for `gamma` tokens; probs stay as they are."""
        more = (0, gamma - self.tokens.shape[1])
        return replace(self, tokens=pad(self.tokens, more), confidence=pad(self.confidence, more))

    def spread(self, requests: torch.Tensor, anchors: torch.Tensor, *, drafting: int | None = None) -> Draft:
        """The drafts as those of `requests` [M] among the R of anchors [R]; the others' have length 0.

        drafting: requests that a model drafted for; None: those of this draft.
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

    `slot_tokens.SlotTokens` reads the text back; `ngram.py` is a whole drafter. tests/drafters/test_contract.py holds
    every drafter of the registry to this contract.
    """

    gamma: int
    looks_up: bool = False
    """True if it drafts without a model, by `look_up`; which drafts those are, `Draft.looked_up` says."""
    shortens: bool = False
    """True if its model drafts fewer tokens, in less time, where `DraftBatch.depth` says so."""
    assesses_itself: bool = False
    """True if its confidences come from its own distributions, for lack of a head; outcomes then correct them."""
    corpora: Corpora | None = None
    """Texts of other requests that it looks up."""
    target_layers: tuple[int, ...] = ()
    """Target layers whose outputs `observe` wants; 0 is the output of the first decoder layer."""
    reads_output: bool = False
    """True if `observe` wants the target's last hidden states, behind its final norm; without `target_layers`."""

    def allocate(self, slots: int) -> None:  # noqa: B027 - a drafter may have no state
        """Make room for the draft state of `slots` KV slots (called once, before the first `observe`)."""

    def slot_state(self) -> list[torch.Tensor]:
        """Tensors [slots, ...] of the draft state, once allocated. Copied to slots of a drafter with the same weights,
        they have it draft as this one."""
        return []

    def reserve_probs(self, requests: int) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Make room for the probs of so many requests, [requests, G, V'] float32, in which drafts by graphs leave them;
        returns it with `Draft.vocab`, or None where no graphs will be. Called once, before `capture`."""
        return None

    def capture(self, sizes: Sequence[int], page_table: torch.Tensor) -> None:  # noqa: B027 - most have nothing to
        """Capture CUDA graphs of `propose` for these numbers of requests, ascending, where its work is the same
        whatever the drafts; called once, on a GPU, after `allocate`. page_table: that of every `DraftBatch`."""

    def observe(self, features: Features) -> None:  # noqa: B027 - a drafter may have no state
        """Take in tokens that are now committed, or prefilled: their state goes to `features.slots`."""

    def prefilled(self, chunks: Prefilled) -> None:  # noqa: B027 - most need no more than `observe`
        """`observe` has shown chunks of prompts, and these they were; may wait for a device."""

    @abstractmethod
    def propose(self, batch: DraftBatch) -> Draft:
        """Draft a block for every request of the batch."""

    def reload(self, checkpoint: str, number: int = 0) -> None:
        """Draft with the weights of another checkpoint folder of the same shape from now on; draft state stays, made by
        the weights before. Raises ValueError where it does not fit, and then nothing has changed.

        number: of the set of weights that is replaced or added, see `DraftBatch.sets`; 0: that of the start.
        """
        raise ValueError(f"the weights of a {type(self).__name__} cannot be exchanged while it serves")

    def drop(self, number: int) -> None:  # noqa: B027 - most have one set
        """Drop a set of weights that was added; its requests are drafted with the weights of the start."""

    def look_up(self, batch: DraftBatch) -> Draft:
        """Drafts made without a model; only where `looks_up`."""
        raise NotImplementedError(f"{type(self).__name__} drafts by its model alone")
