"""Exact distributions of whole answers, from a target's logits and the documented rules, in float64 without the
server's code."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from chi_square import p_value

Logits = Callable[[list[list[int]]], torch.Tensor]
"""N texts of one length -> [N, V] float64 logits."""
Answer = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rules:
    """A request's sampling rules, named as in the API. allowed: the tokens that may follow an answer."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed: Callable[[Answer], list[int]] | None = None

    def probs(self, logits: torch.Tensor, answer: Answer) -> torch.Tensor:
        """[V] probabilities of the token after `answer`, from its logits [V].

        Penalties count the answer's tokens, as in SGLang; the bias comes last.
        """
        logits = logits.clone()
        for token in {*answer}:
            logits[token] -= self.frequency_penalty * answer.count(token) + self.presence_penalty
            logits[token] *= self.repetition_penalty if logits[token] < 0 else 1 / self.repetition_penalty
        if self.allowed is not None:
            banned = torch.ones(len(logits), dtype=torch.bool)
            banned[self.allowed(answer)] = False
            logits[banned] = -torch.inf
        for token, bias in self.logit_bias.items():
            logits[token] += bias
        probs = torch.softmax(logits / self.temperature, 0)
        order = probs.argsort(descending=True, stable=True)
        ranked = probs[order]
        kept = (ranked.cumsum(0) - ranked <= self.top_p) & (ranked >= self.min_p * ranked[0])
        if self.top_k is not None:
            kept &= torch.arange(len(probs)) < self.top_k
        result = torch.zeros_like(probs)
        result[order[kept]] = ranked[kept]
        return result / result.sum()


def continuing(words: Sequence[str], alternatives: Sequence[str]) -> Callable[[Answer], list[int]]:
    """`Rules.allowed` for a sequence of alternatives. words: of the tokens."""

    def begins(text: str) -> bool:
        return any(a.startswith(text) or (text.startswith(a) and begins(text[len(a) :])) for a in alternatives)

    def allowed(answer: Answer) -> list[int]:
        said = "".join(words[token] for token in answer)
        return [token for token, word in enumerate(words) if begins(said + word)]

    return allowed


PROMPT, SAMPLES = "List five ways to save", 2048
RULES = Rules(temperature=0.6, top_k=3)
"""Rules of `test_sampled.py`, and its number of answers: enough to detect a tenth of wrong drafts kept
(`test_planted_faults.py`)."""


def answer_probs(logits: Logits, prompt: list[int], length: int, rules: Rules) -> dict[Answer, float]:
    """Probability of every answer of `length` tokens; for rules that leave few tokens."""
    chances: dict[Answer, float] = {(): 1.0}
    for _ in range(length):
        begun = list(chances)
        rows = logits([[*prompt, *answer] for answer in begun])
        longer = {}
        for answer, row in zip(begun, rows, strict=True):
            probs = rules.probs(row, answer)
            for token in probs.nonzero()[:, 0].tolist():
                longer[*answer, token] = chances[answer] * float(probs[token])
        chances = longer
    return chances


def answers_p_value(answers: Iterable[Answer], exact: Mapping[Answer, float]) -> float:
    """Chi-square of answers against `answer_probs`, over their first two tokens, three and so on: the smallest p-value
    times the number of tests. 0 if an answer is impossible."""
    answers = [*answers]
    length = len(next(iter(exact)))
    p_values = []
    for count in range(2, length + 1):
        probs: Counter = Counter()
        for answer, p in exact.items():
            probs[answer[:count]] += p  # type: ignore[assignment]
        p_values.append(p_value(Counter(answer[:count] for answer in answers), probs, len(answers)))
    return min(1.0, min(p_values) * len(p_values))
