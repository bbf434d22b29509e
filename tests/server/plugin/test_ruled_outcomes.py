"""Requests with sampling rules have the rules' distribution, also after several drafts: every outcome, through the
worker's own rules, is compared with independent rules."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import xgrammar
from chi_square import distance
from enumeration import Enumeration, Found, exact
from exact_answers import Rules
from measured_acceptance import Acceptance, Kind, Text, ruled_logits
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
from table_models import TableModel

from outrider.scheduler.baselines import Threshold, VerifyAll
from outrider.scheduler.contract import Planner
from outrider.server.plugin.decode import logit_rules

EXACT, SEEN = 1e-6, 0.01
WORDS, END = "abc", 3
VOCAB, GAMMA, LENGTH = 4, 3, 4
PROMPT = (0, 1, 2, 0)
LOGITS = torch.tensor([[1.0, 0.4, 0.0, -3.0], [0.2, 1.1, 0.5, -3.0], [0.9, -0.3, 0.8, -3.0], [0.0, 0.0, 0.0, 0.0]])
Q = torch.tensor([[0.3, 0.4, 0.3, 0.0], [0.5, 0.3, 0.2, 0.0], [0.3, 0.4, 0.3, 0.0], [0.4, 0.3, 0.3, 0.0]])
CONFIDENCE = torch.tensor([[0.8, 0.6, 0.5, 0.5], [0.9, 0.2, 0.7, 0.5], [0.8, 0.8, 0.6, 0.5]])


@dataclass(frozen=True)
class Ruled:
    """A request. bias: by token. words: regular expression of its answer."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    penalties: dict[str, float] = field(default_factory=dict)
    bias: dict[int, float] = field(default_factory=dict)
    words: str | None = None

    @property
    def kind(self) -> Kind:
        return Kind(self.temperature, top_k=self.top_k or 1 << 30, top_p=self.top_p, min_p=self.min_p)

    def plain(self) -> Callable[[Text], list[float]]:
        """The next token's probabilities by independent rules, which count the prompt's last token."""
        rules = Rules(
            self.temperature, self.top_k, self.top_p, self.min_p, **self.penalties, logit_bias=self.bias,
            allowed=None if self.words is None else self.allowed,
        )  # fmt: skip
        return lambda text: rules.probs(LOGITS[text[-1]].double(), text[len(PROMPT) - 1 :]).tolist()

    def allowed(self, answer: Text) -> list[int]:
        """Tokens that continue the words of `ALTERNATIVES`."""
        open_: set[str] = {""}  # the rest of an unfinished word
        for token in answer:
            begun = {rest or word for rest in open_ for word in ([rest] if rest else ALTERNATIVES)}
            open_ = {rest[1:] for rest in begun if rest[0] == WORDS[token]}
        return [token for token, letter in enumerate(WORDS) if any(
            (rest or word)[0] == letter for rest in open_ for word in ALTERNATIVES
        )]  # fmt: skip


ALTERNATIVES = ("ab", "ac", "ba", "cb")
SETS = {
    "min-p": Ruled(1.2, min_p=0.45),
    "top-k": Ruled(1.3, top_k=2),
    "top-p": Ruled(1.6, top_p=0.75),
    "penalties": Ruled(penalties={"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.3}),
    "bias": Ruled(bias={0: -1.5, 2: 1.0}),
    "grammar": Ruled(words=f"({'|'.join(ALTERNATIVES)}){{64}}"),
    "all": Ruled(
        0.8, min_p=0.5, penalties={"frequency_penalty": 0.5, "presence_penalty": 0.3}, bias={1: 0.7},
        words=f"({'|'.join(ALTERNATIVES)}){{64}}",
    ),
}  # fmt: skip


def grammar(ruled: Ruled, answer: Text) -> Any:
    if ruled.words is None:
        return None
    info = xgrammar.TokenizerInfo([*WORDS, "<end>"], stop_token_ids=[END])
    compiled = xgrammar.GrammarCompiler(info).compile_regex(ruled.words)
    made = XGrammarGrammar(xgrammar.GrammarMatcher(compiled, max_rollback_tokens=16), VOCAB, compiled, None)
    for token in answer:
        made.accept_token(token)
    return made


def said(ruled: Ruled, planner: Planner) -> Found:
    model = TableModel(Q.expand(GAMMA, VOCAB, VOCAB), CONFIDENCE)
    logits = ruled_logits(LOGITS, PROMPT, lambda answer: grammar(ruled, answer), ruled.penalties, ruled.bias)
    return Enumeration([PROMPT], Acceptance(logits, [ruled.kind]), model, model, planner, LENGTH, VOCAB).run()


def off_by(ruled: Ruled, outcomes: Found) -> float:
    return distance(outcomes.texts, exact([ruled.plain()], [PROMPT], LENGTH))


@pytest.mark.parametrize("planner", [VerifyAll, lambda: Threshold(0.5)], ids=["verify all", "threshold"])
@pytest.mark.parametrize("name", SETS)
def test_a_request_has_the_targets_distribution_under_its_rules(name, planner):
    chances = said(SETS[name], planner())
    assert off_by(SETS[name], chances) < EXACT
    assert chances.verified[2] > 0.2


@pytest.mark.parametrize("name", SETS)
def test_every_rule_matters(name):
    """Without any part of it, the answers differ."""
    whole = exact([SETS[name].plain()], [PROMPT], LENGTH)
    parts = [part for part in Ruled.__dataclass_fields__ if getattr(SETS[name], part) != getattr(Ruled(), part)]
    for part in parts:
        less = replace(SETS[name], **{part: getattr(Ruled(), part)})
        assert distance(exact([less.plain()], [PROMPT], LENGTH), whole) > SEEN, part


@pytest.mark.parametrize("name", ["penalties", "grammar"])
def test_rules_that_do_not_count_drafts_are_detected(name, monkeypatch):
    """The planted fault applies the rules to one row of each request, as SGLang does."""
    honest = logit_rules.apply_rules

    def by_the_anchor(found, reqs, info, context, barrier=None):
        before = found.clone()
        honest(found, reqs, info, context, barrier)
        first = (context.step == 0).nonzero()[:, 0][context.request]
        if name == "grammar":
            found.copy_(before.masked_fill(found[first] == -torch.inf, -torch.inf))
        else:
            found.copy_(before + (found - before)[first])

    monkeypatch.setattr(logit_rules, "apply_rules", by_the_anchor)
    if name == "grammar":  # the grammar rejects the output one step later
        with pytest.raises(ValueError, match="Tokens not accepted"):
            said(SETS[name], VerifyAll())
    else:
        assert off_by(SETS[name], said(SETS[name], VerifyAll())) > SEEN
