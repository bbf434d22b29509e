"""Exact probabilities of a speculating server's answers, honest or with planted faults, for targets of few tokens; a
planted fault of block verification."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch

from outrider.kernels.acceptance import Verification

Text = tuple[int, ...]
Probs = Mapping[int, float]
"""Probabilities of the next token; 0 without an entry."""
Next = Callable[[Text], Probs]
"""Probabilities of the token after the answer so far."""


def test(p: float, q: float) -> float:
    """Chance that rejection sampling keeps a draft of probability q."""
    return min(1.0, p / q)


def residual(p: Probs, q: Probs) -> dict[int, float]:
    """Distribution of the token that replaces a rejected one; p where the residual is empty."""
    rest = {token: max(0.0, each - q.get(token, 0.0)) for token, each in p.items()}
    total = sum(rest.values())
    return {token: each / total for token, each in rest.items()} if total > 0 else dict(p)


def all_of(text: Text, drafts: Text) -> int:
    return len(drafts)


@dataclass(frozen=True)
class Decoding:
    """Rules by which drafts become an answer; the defaults are honest.

    depth: tokens drafted in a step. keep: chance of a draft from (p, q). replace: distribution of the token after a
    rejection. admit: number of verified drafts after a text.
    """

    depth: int
    keep: Callable[[float, float], float] = test
    replace: Callable[[Probs, Probs], Probs] = residual
    admit: Callable[[Text, Text], int] = all_of

    def answers(self, target: Next, drafter: Next, length: int) -> dict[Text, float]:
        """Probability of every answer of `length` tokens; prefill draws the first.

        drafter: the distribution that drafts are drawn from; a lookup is a point mass.
        """
        target, drafter = cache(target), cache(drafter)
        texts: list[dict[Text, float]] = [defaultdict(float) for _ in range(length + 1)]  # by their length
        texts[1].update({(token,): p for token, p in target(()).items() if p > 0})
        for shorter in texts[1:length]:
            for text, chance in shorter.items():
                # No more drafts than fit before the target's last token.
                for more, p in self.step(target, drafter, text, min(self.depth, length - len(text) - 1)).items():
                    texts[len(text) + len(more)][text + more] += chance * p
        return dict(texts[length])

    def step(self, target: Next, drafter: Next, text: Text, depth: int) -> dict[Text, float]:
        """Probability of every outcome of a step that drafts `depth` tokens after `text`."""
        drafted: dict[Text, float] = {(): 1.0}
        for _ in range(depth):
            drafted = {
                (*tokens, token): chance * q
                for tokens, chance in drafted.items()
                for token, q in drafter(text + tokens).items()
                if q > 0
            }
        verified: dict[Text, float] = defaultdict(float)  # chance that these drafts are made and verified
        ended: dict[Text, float] = defaultdict(float)  # chance that no more drafts follow
        for tokens, chance in drafted.items():
            last = min(self.admit(text, tokens), depth)
            ended[tokens[:last]] += chance
            for k in range(last + 1):
                verified[tokens[:k]] += chance
        chances, kept = defaultdict(float), {(): 1.0}  # kept: chance that the earlier tests pass
        for tokens in sorted(verified, key=len):
            p = target(text + tokens)
            for token, each in p.items():
                chances[(*tokens, token)] += kept[tokens] * ended[tokens] * each
            q = drafter(text + tokens)
            for token in q:
                drafts = (*tokens, token)
                if drafts in verified:
                    keep = self.keep(p.get(token, 0.0), q[token])
                    kept[drafts] = kept[tokens] * keep
                    for drawn, each in self.replace(p, q).items():
                        chances[(*tokens, drawn)] += kept[tokens] * verified[drafts] * (1 - keep) * each
        return {more: p for more, p in chances.items() if p > 0}


def a_tenth_kept(p: float, q: float) -> float:
    """The fault that keeps a tenth of wrong drafts."""
    return 0.1 + 0.9 * test(p, q)


def replaced_from_p(p: Probs, q: Probs) -> Probs:
    """The fault that draws the replacement from p."""
    return p


def peeking(confidence: Callable[[Text], float], bound: float) -> Callable[[Text, Text], int]:
    """The fault that verifies no draft if the second is not likely enough, knowing the first.

    confidence: chance that the draft after a text is kept.
    """
    return lambda text, drafts: len(drafts) if confidence(text + drafts[:1]) >= bound else 0


Kept = Callable[[Verification], tuple[torch.Tensor, torch.Tensor]]
"""Drafts kept [R] and the scale after them [R], as `acceptance.kept_drafts` returns them."""


def every_test_by_the_scale(honest: Kept, batch: Verification) -> tuple[torch.Tensor, torch.Tensor]:
    """Test every token by the scale, which only the last token of a block should use."""
    number, scale = torch.zeros_like(batch.verify_lens), torch.ones(len(batch.tokens))
    for k in range(1, batch.tokens.shape[1] + 1):
        of_k = honest(batch._replace(verify_lens=batch.verify_lens.clamp(max=k)))
        last = (of_k[0] == k) & (batch.verify_lens >= k)
        number, scale = torch.where(last, k, number), torch.where(last, of_k[1], scale)
    return number, scale
