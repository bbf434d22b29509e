"""Requests with sampling rules have the rules' distribution, also after several drafts: every outcome, through the
worker's own rules, is compared with independent rules."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import xgrammar
from chi_square import distance
from enumeration import Enumeration, Found, exact
from exact_answers import Rules, continuing
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


ALTERNATIVES = ("ab", "ac", "ba", "cb")
ALLOWED = continuing(WORDS, ALTERNATIVES)
PLAIN = Rules()
SETS = {
    "min-p": Rules(1.2, min_p=0.45),
    "top-k": Rules(1.3, top_k=2),
    "top-p": Rules(1.6, top_p=0.75),
    "penalties": Rules(frequency_penalty=0.7, presence_penalty=0.4, repetition_penalty=1.3),
    "bias": Rules(logit_bias={0: -1.5, 2: 1.0}),
    "grammar": Rules(allowed=ALLOWED),
    "all": Rules(
        0.8, min_p=0.5, frequency_penalty=0.5, presence_penalty=0.3, logit_bias={1: 0.7}, allowed=ALLOWED
    ),
}  # fmt: skip
COMPILED = xgrammar.GrammarCompiler(
    xgrammar.TokenizerInfo([*WORDS, "<end>"], stop_token_ids=[END])
).compile_regex(f"({'|'.join(ALTERNATIVES)}){{64}}")  # fmt: skip


def parts_of(rules: Rules) -> list[str]:
    """Names of the rules that have an effect."""
    return [name for name in Rules.__dataclass_fields__ if getattr(rules, name) != getattr(PLAIN, name)]


def grammar(answer: Text) -> Any:
    made = XGrammarGrammar(xgrammar.GrammarMatcher(COMPILED, max_rollback_tokens=16), VOCAB, COMPILED, None)
    for token in answer:
        made.accept_token(token)
    return made


def said(rules: Rules, planner: Planner) -> Found:
    """The outcomes by the worker's rules, of the request that asks for these."""
    model = TableModel(Q.expand(GAMMA, VOCAB, VOCAB), CONFIDENCE)
    penalties = {name: getattr(rules, name) for name in parts_of(rules) if name.endswith("_penalty")}
    followed = grammar if rules.allowed else lambda answer: None
    logits = ruled_logits(LOGITS, PROMPT, followed, penalties, rules.logit_bias)
    kind = Kind(rules.temperature, top_k=rules.top_k or 1 << 30, top_p=rules.top_p, min_p=rules.min_p)
    return Enumeration([PROMPT], Acceptance(logits, [kind]), model, model, planner, LENGTH, VOCAB).run()


def plain(rules: Rules) -> dict[tuple[Text, ...], float]:
    """The outcomes by independent rules, which count the prompt's last token."""
    return exact(
        [lambda text: rules.probs(LOGITS[text[-1]].double(), text[len(PROMPT) - 1 :]).tolist()], [PROMPT], LENGTH
    )


def off_by(rules: Rules, outcomes: Found) -> float:
    return distance(outcomes.texts, plain(rules))


@pytest.mark.parametrize("planner", [VerifyAll, lambda: Threshold(0.5)], ids=["verify all", "threshold"])
@pytest.mark.parametrize("name", SETS)
def test_a_request_has_the_targets_distribution_under_its_rules(name, planner):
    chances = said(SETS[name], planner())
    assert off_by(SETS[name], chances) < EXACT
    assert chances.verified[2] > 0.2


@pytest.mark.parametrize("name", SETS)
def test_every_rule_matters(name):
    """Without any part of it, the answers differ."""
    for part in parts_of(SETS[name]):
        less = replace(SETS[name], **{part: getattr(PLAIN, part)})
        assert distance(plain(less), plain(SETS[name])) > SEEN, part


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
