"""Seeded tokens of whole decode steps: the worker's own code, with tables as target and drafter.

Distributions are tested in `test_every_outcome.py`; a seed's text is that without drafts, whatever else happens.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from planning import curve_cost
from torch.nn.functional import pad

from outrider.drafters.base import Draft, DraftBatch, Drafter, Features
from outrider.drafters.block.sampling import draw_columns
from outrider.scheduler.baselines import Threshold, VerifyAll
from outrider.scheduler.contract import Budget
from outrider.scheduler.planner import Asynchronous
from outrider.server.plugin.decode.flatten import flatten
from outrider.server.plugin.decode.sampling import Sampling

A, B, C, OPEN, LEAD, TO_OPEN, TO_LEAD = range(7)
GAMMA, LENGTH = 2, 4
TARGET = torch.tensor(  # by the previous token
    [
        [0.4, 0.4, 0.2, 0, 0, 0, 0],
        [0.2, 0.3, 0.5, 0, 0, 0, 0],
        [0.3, 0.3, 0.4, 0, 0, 0, 0],
        [0.7, 0.3, 0, 0, 0, 0, 0],
        [0.5, 0.5, 0, 0, 0, 0, 0],
        [0, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 0],
    ]
)
DRAFT = TARGET.clone()
DRAFT[A] = torch.tensor([0.4, 0.35, 0.25, 0, 0, 0, 0])
DRAFT[B] = torch.tensor([0.9, 0.05, 0.05, 0, 0, 0, 0])
DRAFT[OPEN] = DRAFT[LEAD]


class Table(Drafter):
    """Draws from the row of the previous token."""

    gamma = GAMMA

    def __init__(self, rows: torch.Tensor):
        self.rows = rows
        self.overlap = torch.minimum(rows, TARGET).sum(1)

    def allocate(self, slots: int) -> None:
        pass

    def observe(self, features: Features) -> None:
        pass

    def propose(self, batch: DraftBatch) -> Draft:
        previous, tokens, probs, confidence = batch.anchors, [], [], []
        for k in range(GAMMA):
            confidence.append(self.overlap[previous])
            previous, q = draw_columns(self.rows[previous].log(), batch.rules, batch.keys[:, k])
            tokens.append(previous)
            probs.append(q)
        return Draft(
            torch.stack(tokens, 1),
            torch.full_like(batch.anchors, GAMMA),
            torch.stack(confidence, 1),
            torch.stack(probs, 1) if batch.wants_probs else None,
        )


class Wide(Table):
    """In a width that only drafts without q fill."""

    def propose(self, batch: DraftBatch) -> Draft:
        draft = super().propose(batch)
        more = (0, 3)
        return replace(draft, tokens=pad(draft.tokens, more), confidence=pad(draft.confidence, more))


def texts(
    prompts: list[int], seeds: list[int], *, seeded: list[bool] | None = None, heat: list[float] | None = None,
    admit=None, drafter: Drafter | None = None, top_p: float = 1.0,
) -> list[tuple[int, ...]]:  # fmt: skip
    """The first LENGTH tokens of requests with one-token prompts, decoded in one batch.

    admit: verify_lens from (confidence, draft_lens); None: no drafts. heat: temperatures, 0: greedy.
    """
    count = len(prompts)
    heat = heat or [1.0] * count
    info = SimpleNamespace(
        temperatures=torch.tensor([[t or 1.0] for t in heat]),
        top_ks=torch.tensor([2**30 if t else 1 for t in heat], dtype=torch.int32), top_ps=torch.full((count,), top_p),
        need_top_k_sampling=True, need_top_p_sampling=top_p < 1, need_min_p_sampling=False, is_all_greedy=not any(heat),
    )  # fmt: skip
    sampling = Sampling.of(info, torch.tensor(seeds), torch.tensor(seeded or [True] * count))
    drafter = drafter or Table(DRAFT)
    table, rows = torch.arange(count * 20, dtype=torch.int32).view(count, 20), torch.arange(count)
    seq_lens = torch.full((count,), 5)
    anchors = sampling.draw(TARGET[torch.tensor(prompts)].log(), seq_lens - 1)
    answers = [[token] for token in anchors.tolist()]
    while min(len(tokens) for tokens in answers) < LENGTH:
        keys = sampling.draft_keys(seq_lens, GAMMA)
        batch = DraftBatch(
            anchors, seq_lens, table, rows, keys=keys, wants_probs=not sampling.all_decided, **sampling.rules._asdict()
        )
        draft = drafter.propose(batch)
        verify_lens = torch.zeros_like(seq_lens)
        if admit is not None:
            verify_lens = admit(draft.confidence, draft.lens)
        flat = flatten(anchors, draft.tokens, verify_lens, seq_lens, table, rows)
        logits = TARGET[flat.input_ids].log()
        accept_lens, out = sampling.accept(logits, draft, verify_lens, flat)
        for tokens, more, length in zip(answers, out.tolist(), accept_lens.tolist(), strict=True):
            tokens += more[:length]
        anchors = out.gather(1, accept_lens[:, None] - 1)[:, 0]
        seq_lens = seq_lens + accept_lens
    return [tuple(tokens[:LENGTH]) for tokens in answers]


def budget(tokens: int):
    """The planner's admission of `tokens` tokens, which cannot look ahead."""
    planner = Asynchronous(curve_cost(4, [1.0]), GAMMA)
    return lambda confidence, lens: planner.admit(confidence, lens, Budget(draft=True, tokens=tokens))


def of(planner):
    return lambda confidence, lens: planner.admit(confidence, lens, Budget(draft=True, tokens=None))


PROMPTS = [TO_OPEN, TO_LEAD, TO_LEAD, TO_LEAD]
ADMISSIONS = {
    "off": None, "tight budget": budget(6), "verify all": of(VerifyAll()), "one": of(VerifyAll(1)),
    "threshold": of(Threshold(0.5)),
}  # fmt: skip


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("seeded", [[False] * 4, [True, False, True, False]])
def test_drafts_may_be_wider_than_q(seeded):
    for seed in range(20):
        seeds, heat = [4 * seed + i for i in range(4)], [1.0, 1.0, 0.0, 0.7]
        for name in ("tight budget", "verify all"):
            options = {"seeded": seeded, "heat": heat, "admit": ADMISSIONS[name]}
            assert texts(PROMPTS, seeds, drafter=Wide(DRAFT), **options) == texts(PROMPTS, seeds, **options)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_a_seed_decides_the_text(top_p, request):
    """The drafter, the admission and other requests do not matter."""
    flat = Table(torch.where(TARGET > 0, 1.0, 0.0) / (TARGET > 0).sum(1, keepdim=True))
    answers = set()
    seeds = 40 if request.config.getoption("--exhaustive") else 16
    for seed in range(seeds):
        (alone,) = texts([TO_OPEN], [seed], top_p=top_p)
        answers.add(alone)
        for name, admit in ADMISSIONS.items():
            for drafter in (Table(DRAFT), flat):
                (other,) = texts([TO_OPEN], [seed], admit=admit, drafter=drafter, top_p=top_p)
                assert other == alone, name
                beside = texts(
                    [TO_LEAD, TO_OPEN, TO_OPEN, TO_LEAD, TO_OPEN], [seed, 91, seed, seed, 1000 + seed],
                    seeded=[True, False, True, True, False], heat=[1.0, 1.0, 1.0, 0.0, 1.0], admit=admit,
                    drafter=drafter, top_p=top_p,
                )  # fmt: skip
                assert beside[2] == alone, name
                assert beside[3] == (LEAD, A, A, A)
    assert len(answers) > seeds / 4


@pytest.mark.usefixtures("compiled")
def test_a_drafter_that_knows_the_target_is_always_right():
    """q equals p, and both use the same noise."""
    steps = 0

    def count(confidence, lens):
        nonlocal steps
        steps += 1
        return lens

    for seed in range(20):
        texts([TO_OPEN], [seed], admit=count, drafter=Table(TARGET))
    assert steps == 20  # each step adds GAMMA + 1 tokens to the first


@pytest.mark.parametrize("with_probs", [True, False])
def test_on_a_device_every_token_is_the_same(monkeypatch, with_probs):
    """There is padding, and no number is read."""
    generator = torch.Generator().manual_seed(0)
    count, vocab, gamma = 60, 31, 4
    info = SimpleNamespace(
        top_ks=torch.tensor([1, 5, 1 << 30])[torch.arange(count) % 3],
        top_ps=torch.tensor([1.0, 0.7])[torch.arange(count) % 2],
        min_ps=torch.zeros(count),
        temperatures=torch.tensor([0.5, 1.0, 1.3, 0.8])[torch.arange(count) % 4, None],
        need_top_k_sampling=True, need_top_p_sampling=True, need_min_p_sampling=False, is_all_greedy=False,
    )  # fmt: skip
    seeds = torch.randint(2**62, (count,), generator=generator)
    sampling = Sampling.of(info, seeds, torch.arange(count) % 5 < 2)
    verify_lens = torch.randint(0, gamma + 1, (count,), generator=generator)
    anchors, seq_lens = torch.zeros(count, dtype=torch.int64), torch.randint(0, 40, (count,), generator=generator)
    table = torch.arange(count * 50, dtype=torch.int32).view(count, 50)
    probs = torch.rand(count, gamma, vocab, generator=generator).softmax(-1) if with_probs else None
    tokens = torch.randint(0, vocab, (count, gamma), generator=generator)
    draft = Draft(tokens, verify_lens, torch.zeros(count, gamma), probs)
    batch = anchors, tokens, verify_lens, seq_lens, table, torch.arange(count)
    exact, padded = flatten(*batch), flatten(*batch, count * (gamma + 1))
    logits = torch.randn(len(padded.input_ids), vocab, generator=generator)
    likely = tokens[padded.request, padded.step.clamp(max=gamma - 1)]
    logits.scatter_add_(1, likely[:, None], 4.0 * (torch.rand(len(logits), 1, generator=generator) < 0.9))
    expected = sampling.accept(logits[: len(exact.input_ids)].clone(), draft, verify_lens, exact)
    logits[len(exact.input_ids) :] = torch.nan
    monkeypatch.setattr("outrider.server.plugin.decode.sampling.on_host", lambda tensor: False)
    got = sampling.accept(logits, draft, verify_lens, padded)
    assert expected[0].unique().tolist() == list(range(1, gamma + 2))
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
