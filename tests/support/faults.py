"""Exact probabilities of a speculating server's answers: an honest one, and ones with a planted fault.

The answers are few enough to be counted: a short answer of a target that has a few tokens to choose from.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

Text = tuple[int, ...]
Probs = Mapping[int, float]
"""Probabilities of the next token; tokens without an entry have none."""
Next = Callable[[Text], Probs]
"""Probabilities of the token after an answer's first tokens."""


def test(p: float, q: float) -> float:
    """Chance that a draft of probability q is kept: rejection sampling's."""
    return min(1.0, p / q)


def residual(p: Probs, q: Probs) -> dict[int, float]:
    """Distribution of the token in place of a rejected one; p where nothing of it is left."""
    rest = {token: max(0.0, each - q.get(token, 0.0)) for token, each in p.items()}
    total = sum(rest.values())
    return {token: each / total for token, each in rest.items()} if total > 0 else dict(p)


def all_of(text: Text, drafts: Text) -> int:
    """Every draft is verified."""
    return len(drafts)


@dataclass(frozen=True)
class Decoding:
    """Rules by which drafts become an answer; each is honest unless another is given.

    depth: tokens drafted in a step. keep: chance of a draft from (p, q). replace: distribution of the token in place
    of a rejected one. admit: how many of the drafts behind a text are verified.
    """

    depth: int
    keep: Callable[[float, float], float] = test
    replace: Callable[[Probs, Probs], Probs] = residual
    admit: Callable[[Text, Text], int] = all_of

    def answers(self, target: Next, drafter: Next, length: int) -> dict[Text, float]:
        """Probability of every answer of `length` tokens, of which prefill draws the first.

        drafter: the distribution that drafts are drawn from; a looked-up one is a point mass.
        """
        target, drafter = cache(target), cache(drafter)
        texts: list[dict[Text, float]] = [defaultdict(float) for _ in range(length + 1)]  # by their length
        texts[1].update({(token,): p for token, p in target(()).items() if p > 0})
        for shorter in texts[1:length]:
            for text, chance in shorter.items():
                # As many drafts as may come out with a token of the target's behind them.
                for more, p in self.step(target, drafter, text, min(self.depth, length - len(text) - 1)).items():
                    texts[len(text) + len(more)][text + more] += chance * p
        return dict(texts[length])

    def step(self, target: Next, drafter: Next, text: Text, depth: int) -> dict[Text, float]:
        """Probability of all that a step behind `text` may bring, which drafts `depth` tokens."""
        drafted: dict[Text, float] = {(): 1.0}
        for _ in range(depth):
            drafted = {
                (*tokens, token): chance * q
                for tokens, chance in drafted.items()
                for token, q in drafter(text + tokens).items()
                if q > 0
            }
        verified: dict[Text, float] = defaultdict(float)  # chance that this is drafted, and as much of it verified
        ended: dict[Text, float] = defaultdict(float)  # and no more of it
        for tokens, chance in drafted.items():
            last = min(self.admit(text, tokens), depth)
            ended[tokens[:last]] += chance
            for k in range(last + 1):
                verified[tokens[:k]] += chance
        found, kept = defaultdict(float), {(): 1.0}  # kept: chance of the tests before
        for tokens in sorted(verified, key=len):
            p = target(text + tokens)
            for token, each in p.items():
                found[(*tokens, token)] += kept[tokens] * ended[tokens] * each
            q = drafter(text + tokens)
            for token in q:
                drafts = (*tokens, token)
                if drafts in verified:
                    keep = self.keep(p.get(token, 0.0), q[token])
                    kept[drafts] = kept[tokens] * keep
                    for other, each in self.replace(p, q).items():
                        found[(*tokens, other)] += kept[tokens] * verified[drafts] * (1 - keep) * each
        return {more: p for more, p in found.items() if p > 0}


def a_tenth_kept(p: float, q: float) -> float:
    """The fault that keeps a tenth of the wrong drafts."""
    return 0.1 + 0.9 * test(p, q)


def replaced_from_p(p: Probs, q: Probs) -> Probs:
    """The fault that draws the replacement from p."""
    return p


def peeking(confidence: Callable[[Text], float], bound: float) -> Callable[[Text, Text], int]:
    """The fault that verifies nothing of drafts whose second token is not likely enough, once the first is known.

    confidence: chance that the draft behind a text is kept.
    """
    return lambda text, drafts: len(drafts) if confidence(text + drafts[:1]) >= bound else 0
