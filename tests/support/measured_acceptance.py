"""Exact probabilities of acceptance's outcomes, measured on the worker's own code.

The random numbers of `Sampling.accept` are chosen here: bisection finds the threshold of each test, and the weights of
the last draw are read. This module does not know the rule, so a wrong rule yields wrong probabilities.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch

from outrider.drafters.base import Draft
from outrider.drafters.slot_tokens import SlotTokens
from outrider.kernels import acceptance
from outrider.kernels import sampling as target_sampling
from outrider.kernels.cpu import native
from outrider.kernels.ragged import FlatVerify
from outrider.server.plugin.decode import sampling as worker_sampling
from outrider.server.plugin.decode.flatten import flatten
from outrider.server.plugin.decode.logit_rules import LogitRules
from outrider.server.plugin.decode.sampling import Sampling

Text = tuple[int, ...]
Outcomes = list[tuple[Text, float]]
ALWAYS, NEVER = 2.0**-60, 1 - 2.0**-53
NUMBERS = torch.tensor([NEVER, ALWAYS], dtype=torch.float64)
BISECTIONS = 32


class Verified(NamedTuple):
    """A request's drafts in a step.

    text: prompt and answer so far, with the anchor. drafts: the verified ones. q: [depth][V] of all drafted tokens;
    None: point masses. kind: index in `Acceptance.kinds`.
    """

    text: Text
    drafts: Text
    q: tuple[Text, ...] | None = None
    kind: int = 0


class Kind(NamedTuple):
    """Sampling of a request. seed: None: unseeded."""

    temperature: float = 1.0
    seed: int | None = None
    top_k: int = 1 << 30
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def decided(self) -> bool:
        return self.seed is not None or self.temperature == 0


class Batch(NamedTuple):
    """Drafts of many requests, laid out for one verification."""

    items: Sequence[Verified]
    draft: Draft
    verify_lens: torch.Tensor
    seq_lens: torch.Tensor
    page_table: torch.Tensor
    flat: FlatVerify


class Acceptance:
    """logits: [B, V] of the target for a batch, after each request's rules. by_block: as in `Verification`."""

    def __init__(
        self, logits: Callable[[Batch], torch.Tensor], kinds: Sequence[Kind] = (Kind(),), *, by_block: bool = True
    ):
        self.logits, self.kinds, self.by_block = logits, tuple(kinds), by_block
        self.known: dict[Verified, Outcomes] = {}

    def learn(self, items: set[Verified]) -> None:
        """Measure these items together."""
        groups: dict[Any, list[Verified]] = {}
        for item in items - self.known.keys():
            groups.setdefault((self.kinds[item.kind].decided, item.q is None, not item.drafts), []).append(item)
        for (decided, _, _), group in groups.items():
            outcomes = self._decided(group) if decided else self._sampled(group)
            self.known.update(zip(group, outcomes, strict=True))

    def of(self, item: Verified) -> Outcomes:
        """Every outcome of a step for one request, tokens and probability."""
        self.learn({item})
        return self.known[item]

    # -- the worker's code ----------------------------------------------------------------------------------------

    def sampling(self, items: Sequence[Verified]) -> Sampling:
        kinds = [self.kinds[item.kind] for item in items]
        greedy = [kind.temperature == 0 for kind in kinds]
        info = SimpleNamespace(
            temperatures=torch.tensor([[kind.temperature or 1.0] for kind in kinds]),
            top_ks=torch.tensor([1 if kind.temperature == 0 else kind.top_k for kind in kinds], dtype=torch.int32),
            top_ps=torch.tensor([kind.top_p for kind in kinds]),
            min_ps=torch.tensor([kind.min_p for kind in kinds]),
            need_top_k_sampling=any(kind.top_k < 1 << 30 for kind in kinds) or any(greedy),
            need_top_p_sampling=any(kind.top_p < 1 for kind in kinds),
            need_min_p_sampling=any(kind.min_p > 0 for kind in kinds),
            is_all_greedy=all(greedy),
        )
        seeds = torch.tensor([kind.seed or 0 for kind in kinds])
        seeded = torch.tensor([kind.seed is not None for kind in kinds])
        return Sampling.of(info, seeds, seeded, by_block=self.by_block)

    def batch(self, items: Sequence[Verified]) -> Batch:
        count, width = len(items), max(max(len(item.drafts), len(item.q or ())) for item in items)
        longest = max(len(item.text) for item in items) + width + 1
        tokens = torch.zeros(count, width, dtype=torch.int64)
        for row, item in enumerate(items):
            tokens[row, : len(item.drafts)] = torch.tensor(item.drafts, dtype=torch.int64)
        probs = None
        if items[0].q is not None and width:
            probs = torch.zeros(count, width, max(len(q) for item in items for q in item.q or ()))
            for row, item in enumerate(items):
                if item.q:
                    probs[row, : len(item.q)] = torch.tensor(item.q)
        lens = torch.tensor([len(item.drafts) for item in items])
        seq_lens = torch.tensor([len(item.text) - 1 for item in items])
        table = torch.arange(count * longest, dtype=torch.int32).view(count, longest)
        anchors = torch.tensor([item.text[-1] for item in items])
        flat = flatten(anchors, tokens, lens, seq_lens, table, torch.arange(count))
        return Batch(items, Draft(tokens, lens, torch.zeros(count, width), probs), lens, seq_lens, table, flat)

    def _decided(self, items: Sequence[Verified]) -> list[Outcomes]:
        """The single outcome of each request that draws no number."""
        batch = self.batch(items)
        lens, out = self.sampling(items).accept(self.logits(batch), batch.draft, batch.verify_lens, batch.flat)
        return [[(tuple(row[:n]), 1.0)] for row, n in zip(out.tolist(), lens.tolist(), strict=True)]

    def _sampled(self, items: Sequence[Verified]) -> list[Outcomes]:
        width, count = self.batch(items).draft.tokens.shape[1], len(items)
        run = self._runner(items)
        # A row for each item and test: earlier tests pass, later ones fail.
        each, test = self._runner(list(items) * width), torch.arange(width).repeat_interleave(count)
        others = NUMBERS[(torch.arange(width) < test[:, None]).long()]
        low, high = torch.zeros(count * width, dtype=torch.float64), torch.ones(count * width, dtype=torch.float64)

        def kept(numbers: torch.Tensor) -> torch.Tensor:
            return each(others.scatter(1, test[:, None], numbers[:, None]))[0] > test

        if width:
            always = kept(torch.full_like(low, NEVER))
            for _ in range(BISECTIONS):
                middle = (low + high) / 2
                below = kept(middle)
                low, high = torch.where(below, middle, low), torch.where(below, high, middle)
            low = torch.where(always, 1.0, torch.where(low > 0, (low + high) / 2, 0.0))
        thresholds = low.view(width, count).T if width else torch.zeros(count, 0)
        outcomes: list[dict[Text, float]] = [defaultdict(float) for _ in items]
        for passed in itertools.product((True, False), repeat=width):
            kept, out, weights = run(NUMBERS[torch.tensor(passed).long()].expand(count, width))
            weights /= weights.sum(1, keepdim=True)
            for row, item in enumerate(items):
                n, k, limits = len(item.drafts), int(kept[row]), thresholds[row].tolist()
                chance = math.prod(t if yes else 1 - t for t, yes in zip(limits[:n], passed, strict=False))
                if chance > 0 and not any(passed[n:]):
                    assert tuple(out[row, :k].tolist()) == item.drafts[:k]
                    for y, w in enumerate(weights[row].tolist()):
                        if w > 0:
                            outcomes[row][*item.drafts[:k], y] += chance * w
        return [list(each.items()) for each in outcomes]

    def _runner(self, items: Sequence[Verified]) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
        """A function of uniform numbers [M, width]: drafts kept [M], tokens, and weights [M, V] of the last token."""
        if not items:
            return lambda numbers: (torch.zeros(0),)
        batch, sampling = self.batch(items), self.sampling(items)
        logits = self.logits(batch)

        def run(numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
            with chosen(numbers) as weights:
                lens, out = sampling.accept(logits.clone(), batch.draft, batch.verify_lens, batch.flat)
            return lens - 1, out, weights[-1].double()

        return run


def ruled_logits(
    rows: torch.Tensor, prompt: Text, grammar: Callable[[Text], Any], penalties: Mapping[str, float] | None = None,
    bias: Mapping[int, float] | None = None,
) -> Callable[[Batch], torch.Tensor]:  # fmt: skip
    """`Acceptance.logits` by the worker's own rules. rows: [V, V] logits by the last token. grammar: of an answer, or
    None. The last token of the prompt is the first of the answer. bias: by token."""
    plain = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}
    params = SimpleNamespace(**plain | dict(penalties or {}))

    def after(batch: Batch) -> torch.Tensor:
        history, reqs = SlotTokens(batch.page_table.numel()), []
        for row, item in enumerate(batch.items):
            history.write(batch.page_table[row, : len(item.text) - 1].long(), torch.tensor(item.text[:-1]))
            followed = grammar(item.text[len(prompt) - 1 :])
            reqs.append(
                SimpleNamespace(
                    origin_input_ids=list(prompt[:-1]), sampling_params=params, grammar=followed, finished=lambda: False
                )
            )
        biases = torch.zeros(len(reqs), len(rows))
        for token, each in (bias or {}).items():
            biases[:, token] = each
        info = SimpleNamespace(
            acc_additive_penalties=torch.zeros(1) if penalties else None, logit_bias=biases if bias else None,
            vocab_size=len(rows), grammar_mask=None,
        )  # fmt: skip
        return LogitRules(history, batch.page_table).verified(
            SimpleNamespace(reqs=reqs, sampling_info=info, req_pool_indices=torch.arange(len(reqs))),
            SimpleNamespace(next_token_logits=rows[batch.flat.input_ids]), batch.flat,
            torch.tensor([item.text[-1] for item in batch.items]), batch.draft.tokens, batch.seq_lens,
            longest=int(batch.seq_lens.max()), exact=True, barrier=None,
        )  # fmt: skip

    return after


UNAVAILABLE = mock.Mock(return_value=False)
"""a mock takes a millisecond"""


@contextmanager
def chosen(numbers: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Acceptance tests get these uniform numbers; the weights of draws are recorded."""
    weights: list[torch.Tensor] = []

    def likeliest(row: torch.Tensor, keys: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        weights.append(row)
        return row.argmax(1)

    with (
        mock.patch.object(worker_sampling, "uniforms", lambda keys, count: numbers[:, :count]),
        mock.patch.object(acceptance, "gumbel_argmax", likeliest),
        mock.patch.object(target_sampling, "gumbel_argmax", likeliest),
        mock.patch.object(native, "available", UNAVAILABLE),
    ):
        yield weights
