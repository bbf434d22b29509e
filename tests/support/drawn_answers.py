"""Answers of the small target, drawn in this process by the drafter's own sampling and the real acceptance.

The target's logits after every possible answer are tabulated, so thousands of answers take a moment.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from exact_answers import Answer, Rules, answer_probs
from small_target import SmallTarget

from outrider.drafters.base import Draft, DraftBatch
from outrider.drafters.block import checkpoint
from outrider.drafters.block.sampling import sample_block
from outrider.kernels import sampling as kernels
from outrider.server.plugin.decode.flatten import flatten
from outrider.server.plugin.decode.sampling import Sampling

GAMMA = 4
Admit = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(confidence [R, gamma], limits [R]) -> verify_lens [R]."""


PEEKED = 0.42
"""About half of the drafts have a higher confidence."""


def by_survival(confidence: torch.Tensor, limits: torch.Tensor, least: float = 0.05) -> torch.Tensor:
    """Admit drafts while the product of confidences is at least `least`: a legal admission."""
    alive = (confidence.cumprod(1) >= least).long().cumprod(1).sum(1)
    return torch.minimum(alive, limits)


def peeking(confidence: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    """The fault: c_2, which depends on x_1, decides whether x_1 is verified."""
    return limits * (confidence[:, 1] >= PEEKED)


@dataclass(frozen=True)
class Answers:
    """All answers of `length` tokens to a prompt.

    known: [S] tokens possible anywhere, or proposed by the drafter. rows: [P, S] float32, the target's logits after
    each of P beginnings; the first is empty. longer: [P, S] the beginning extended by this token, -1: impossible.
    exact: probabilities of whole answers.
    """

    prompt: list[int]
    length: int
    rules: Rules
    known: torch.Tensor
    rows: torch.Tensor
    longer: torch.Tensor
    exact: dict[Answer, float]
    drafter: torch.nn.Module

    @classmethod
    def of(cls, small: SmallTarget, prompt: list[int], length: int, rules: Rules) -> Self:
        begun: list[Answer] = [()]
        for count in range(1, length):
            begun += answer_probs(small.logits, prompt, count, rules)
        parts = [
            small.logits([[*prompt, *answer] for answer in begun if len(answer) == count]) for count in range(length)
        ]
        logits = torch.cat(parts)
        possible = [row.topk(rules.top_k or 1).indices.tolist() for row in logits]
        others = torch.randperm(logits.shape[1], generator=torch.Generator().manual_seed(0))[:64].tolist()
        known = torch.tensor(sorted({*others, *(token for row in possible for token in row)}))
        column = {token: i for i, token in enumerate(known.tolist())}
        place = {answer: i for i, answer in enumerate(begun)}
        longer = torch.full((len(begun), len(known)), -1)
        for answer, tokens in zip(begun, possible, strict=True):
            for token in tokens:
                longer[place[answer], column[token]] = place.get((*answer, token), 0)
        exact = answer_probs(small.logits, prompt, length, rules)
        drafter = checkpoint.load(small.dspark, dtype=torch.float32)
        w2 = small.model.lm_head.weight.detach()[known]
        drafter.markov_head.w2.weight.data = w2
        return cls(prompt, length, rules, known, logits[:, known].float(), longer, exact, drafter)

    def draw(self, count: int, seed: int, admit: Admit = by_survival) -> tuple[list[Answer], list[int]]:
        """`count` answers, one per request, and the observed drafts by position."""
        seeds = torch.randint(2**62, (count,), generator=torch.Generator().manual_seed(seed))
        everyone = self._sampling(seeds)
        place, given = torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)
        answers = torch.zeros(count, self.length + GAMMA, dtype=torch.int64)
        positions = torch.full((count,), len(self.prompt))
        first = everyone.draw(self.rows[place], positions - 1)
        answers[:, 0], place, given = first, self.longer[place, first], given + 1
        observed = [0] * GAMMA
        while len(running := (given < self.length).nonzero()[:, 0]):
            sampling, at = self._sampling(seeds[running]), place[running]
            drafted = self._draft(sampling, self.known[answers[running, given[running] - 1]], given[running])
            limits = (self.length - given[running] - 1).clamp(max=GAMMA)
            verify_lens = admit(drafted.confidence, limits)
            steps = [at]
            for token in drafted.tokens.T:
                steps.append(self.longer[steps[-1].clamp(min=0), token].where(steps[-1] >= 0, -1))
            table = torch.arange(len(running) * 64, dtype=torch.int32).view(-1, 64)
            flat = flatten(
                drafted.tokens[:, 0], drafted.tokens, verify_lens, len(self.prompt) % 8 + given[running] - 1, table,
                torch.arange(len(running)),
            )  # fmt: skip
            rows = torch.stack(steps, 1)[flat.request, flat.step].clamp(min=0)
            accepted, tokens = sampling.accept(self.rows[rows], drafted, verify_lens, flat)
            for k in range(GAMMA):
                observed[k] += int((torch.minimum(verify_lens, accepted) > k).sum())
            for k in range(GAMMA + 1):
                going = (accepted > k).nonzero()[:, 0]
                which = running[going]
                answers[which, given[which]] = tokens[going, k]
                place[which] = self.longer[place[which], tokens[going, k]]
                given[which] += 1
        texts = self.known[answers[:, : self.length]]
        return [tuple(answer) for answer in texts.tolist()], observed

    def _draft(self, sampling: Sampling, anchors: torch.Tensor, given: torch.Tensor) -> Draft:
        """Drafts in columns of `known`, as the drafter's sequential head draws them."""
        requests, size = len(anchors), self.drafter.config.hidden_size
        batch = DraftBatch(
            anchors=anchors, seq_lens=given, page_table=torch.zeros(1, 1, dtype=torch.int32),
            rows=torch.zeros_like(given), temperatures=sampling.rules.temperatures, top_ks=sampling.rules.top_ks,
            keys=sampling.draft_keys(given, GAMMA),
        )  # fmt: skip
        tokens, probs, confidence = sample_block(
            torch.zeros(requests, GAMMA, len(self.known)), torch.zeros(requests, GAMMA, size), batch, vocab=self.known,
            markov=self.drafter.markov_head, confidence=self.drafter.confidence_head,
        )  # fmt: skip
        lens = torch.full_like(anchors, GAMMA)
        return Draft(torch.searchsorted(self.known, tokens), lens, confidence, probs)

    def _sampling(self, seeds: torch.Tensor) -> Sampling:
        nobody, count = torch.zeros(len(seeds), dtype=torch.bool), len(seeds)
        top_ks = torch.full((count,), self.rules.top_k or len(self.known))
        rules = kernels.Rules(torch.full((count,), self.rules.temperature), top_ks)
        return Sampling(rules, seeds, nobody, nobody, False, False, False)
