"""A drafter that takes observed tokens in later drafts the same."""

from dataclasses import replace

import pytest
import torch
from tiny_drafters import WIDE, make_drafter
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.drafters.base import DraftBatch, Drafter, Features
from outrider.drafters.wrappers import ROWS, DeferredObserve

SLOTS = 512
NAMES = ("hidden", "tokens", "positions", "slots")


def features(slots: torch.Tensor) -> Features:
    """Features at these slots, with the slots modulo 100 as positions."""
    hidden = torch.randn(len(slots), len(WIDE.target_layers) * WIDE.hidden_size)
    return Features(hidden, slots + 1, slots % 100, slots)


def batch(seq_lens: list[int]) -> DraftBatch:
    count = len(seq_lens)
    return DraftBatch(
        anchors=torch.arange(count), seq_lens=torch.tensor(seq_lens),
        page_table=torch.arange(SLOTS, dtype=torch.int32).view(4, -1), rows=torch.arange(count),
        temperatures=torch.zeros(count), keys=torch.randint(2**62, (count, WIDE.gamma)),
    )  # fmt: skip


class Spy(Drafter):
    def __init__(self, drafter: Drafter):
        self.drafter, self.seen = drafter, []
        self.gamma, self.target_layers = drafter.gamma, drafter.target_layers

    def allocate(self, slots: int) -> None:
        self.drafter.allocate(slots)

    def observe(self, features: Features) -> None:
        self.seen.append(len(features.slots))
        self.drafter.observe(features)

    def propose(self, batch: DraftBatch):
        return self.drafter.propose(batch)


def test_drafts_equal_an_immediate_drafters() -> None:
    """Slots are reused before any draft."""
    at_once, deferred = make_drafter(WIDE, slots=SLOTS), DeferredObserve(make_drafter(WIDE, slots=SLOTS))
    torch.manual_seed(1)
    for _ in range(6):
        for count in (300, 1, 3, 8, 60, 60, 1, 8):
            shown = features(torch.randperm(SLOTS)[:count])
            at_once.observe(shown)
            deferred.observe(shown)
        asked = batch([90, 17, 40])
        ours, theirs = deferred.propose(asked), at_once.propose(asked)
        assert torch.equal(ours.tokens, theirs.tokens)
        assert torch.equal(ours.confidence, theirs.confidence)
        for mine, right in zip(deferred.model.pools, at_once.pools, strict=True):
            assert torch.equal(torch.stack(mine), torch.stack(right))


def test_the_model_runs_only_when_a_request_drafts_or_much_waits() -> None:
    spy = Spy(make_drafter(WIDE, slots=SLOTS))
    deferred = DeferredObserve(spy)
    for slot in range(ROWS):
        deferred.observe(features(torch.tensor([slot])))
    assert spy.seen == []
    deferred.observe(features(torch.tensor([ROWS])))
    assert spy.seen == [ROWS]
    deferred.propose(batch([5]))
    assert spy.seen == [ROWS, 1]
    deferred.propose(batch([5]))
    assert spy.seen == [ROWS, 1]


class Operations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sets", [None, torch.tensor([1])])
def test_a_step_without_drafts_copies_its_tokens_and_no_more(sets: torch.Tensor | None) -> None:
    """A resting server pays for these operations at every step."""
    deferred, shown = DeferredObserve(Spy(make_drafter(WIDE, slots=SLOTS))), features(torch.tensor([3]))
    with Operations() as operations:
        deferred.observe(replace(shown, sets=sets))
    assert operations.count == 2, "hidden states, and the other numbers together"


def test_observed_tensors_may_be_overwritten() -> None:
    """An engine uses the same memory for every step."""
    at_once, deferred = make_drafter(WIDE, slots=SLOTS), DeferredObserve(make_drafter(WIDE, slots=SLOTS))
    shown = features(torch.arange(4))
    at_once.observe(shown)
    deferred.observe(shown)
    shown.hidden.zero_()
    shown.slots.zero_()
    asked = batch([4])
    assert torch.equal(deferred.propose(asked).confidence, at_once.propose(asked).confidence)
