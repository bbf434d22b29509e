"""Forced text as drafts: every outcome of drafting and acceptance is followed, and answers have the target's
distribution. The vocabulary has several ways to split forced text, so the target often refuses a forced token."""

from collections.abc import Callable

import pytest
import torch
import xgrammar
from chi_square import distance
from enumeration import Enumeration, Found, exact
from exact_answers import Rules, continuing
from measured_acceptance import Acceptance, Batch, Kind, Text, ruled_logits
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
from table_models import TableModel

from outrider.drafters.lookup_first import LookupFirst
from outrider.drafters.ngram import NgramDrafter
from outrider.scheduler.baselines import Threshold, VerifyAll
from outrider.scheduler.contract import Planner
from outrider.server.plugin.decode import grammar_drafts
from outrider.server.plugin.decode.grammar_drafts import GrammarDrafts
from outrider.server.plugin.grammars.backend import BoundedGrammar
from outrider.server.plugin.grammars.forced import ForcedText
from outrider.server.plugin.grammars.spelling import Spelling, Written
from outrider.server.plugin.hooks.algorithm import OutriderAlgorithm

EXACT, SEEN = 1e-6, 0.01
WORDS = ("a", "b", "c", "ba")
VOCAB, END, GAMMA, LENGTH = 5, 4, 3, 4
PROMPT = (0, 2, 1, 0)
"""Its last token is the first of the answer for the grammar, see `Enumeration`."""
ALTERNATIVES = ("abacbab", "acbabac")
LOGITS = torch.tensor([
    [1.0, 0.4, 0.9, 0.7, -3.0], [0.2, 0.6, 0.5, 0.1, -3.0], [0.9, 0.3, 0.8, -0.4, -3.0], [0.1, 0.8, 0.2, 0.3, -3.0],
    [0.0, 0.0, 0.0, 0.0, 0.0],
])  # fmt: skip
Q = torch.tensor([
    [0.2, 0.3, 0.2, 0.3, 0.0], [0.4, 0.2, 0.3, 0.1, 0.0], [0.3, 0.3, 0.2, 0.2, 0.0], [0.1, 0.3, 0.5, 0.1, 0.0],
    [0.25, 0.25, 0.25, 0.25, 0.0],
])  # fmt: skip
CONFIDENCE = torch.full((GAMMA, VOCAB), 0.7)
KINDS = {"sampled": Kind(1.2), "greedy": Kind(0.0)}


def encode(text: str) -> list[int]:
    """The longest token first."""
    tokens, place = [], 0
    while place < len(text):
        word = max((word for word in WORDS if text.startswith(word, place)), key=len)
        tokens.append(WORDS.index(word))
        place += len(word)
    return tokens


COMPILED = xgrammar.GrammarCompiler(
    xgrammar.TokenizerInfo([*WORDS, "<end>"], stop_token_ids=[END]), max_threads=1
).compile_regex(f"({'|'.join(ALTERNATIVES)}){{64}}")


WRITTEN = Written(Spelling(encode, [word.encode() for word in WORDS]))
WRITTEN.learn(b"bab", [WORDS.index(word) for word in "bab"])  # the tokenizer writes ba, b


def grammar(answer: Text) -> BoundedGrammar:
    plain = XGrammarGrammar(xgrammar.GrammarMatcher(COMPILED), VOCAB, COMPILED, None, "", None)
    made = BoundedGrammar(plain, ForcedText(WRITTEN.spelling, written=WRITTEN), unlimited=True)
    for token in answer:
        made.accept_token(token)
    return made


def answer_of(text: Text) -> Text:
    return text[len(PROMPT) - 1 :]


logits = ruled_logits(LOGITS, PROMPT, grammar)


def believing(batch: Batch) -> torch.Tensor:
    """Logits of a target that takes every drafted token as given."""
    honest, flat = logits(batch), batch.flat
    for row, (request, step) in enumerate(zip(flat.request.tolist(), flat.step.tolist(), strict=True)):
        if step < int(batch.verify_lens[request]):
            token = batch.draft.tokens[request, step]
            if honest[row, token] > -torch.inf:
                honest[row] = torch.where(torch.arange(VOCAB) == token, 0.0, -torch.inf)
    return honest


def plain(kind: Kind) -> Callable[[Text], list[float]]:
    """The next token's probabilities, by independent rules and the alternatives alone."""
    greedy = kind.temperature == 0
    rules = Rules(kind.temperature or 1.0, 1 if greedy else None, allowed=continuing(WORDS, ALTERNATIVES))
    return lambda text: rules.probs(LOGITS[text[-1]].double(), answer_of(text)).tolist()


def said(kind: Kind, planner: Planner, of_target: Callable[[Batch], torch.Tensor] = logits) -> Found:
    model = TableModel(Q.expand(GAMMA, VOCAB, VOCAB), CONFIDENCE)
    drafter = LookupFirst(NgramDrafter(GAMMA), model, expected_run_length=1.7)
    acceptance = Acceptance(of_target, [kind])
    return Enumeration(
        [PROMPT], acceptance, drafter, model, planner, LENGTH, VOCAB, grammar=lambda text: grammar(answer_of(text))
    ).run()


def off_by(kind: Kind, outcomes: Found) -> float:
    return distance(outcomes.texts, exact([plain(kind)], [PROMPT], LENGTH))


@pytest.mark.parametrize("planner", [VerifyAll, lambda: Threshold(0.5)], ids=["verify all", "threshold"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_answers_have_the_targets_distribution(kind: Kind, planner: Callable[[], Planner]) -> None:
    outcomes = said(kind, planner())
    assert off_by(kind, outcomes) < EXACT
    assert outcomes.looked_up > 0.3
    assert outcomes.modelled > 0.3


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_on_a_gpu_forced_tokens_take_the_place_of_drafts(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host does not know the drafts there."""
    monkeypatch.setattr(grammar_drafts, "on_host", lambda tensor: False)
    found = said(kind, VerifyAll())
    assert off_by(kind, found) < EXACT
    assert found.looked_up > 0.3


def test_sglang_reads_the_results_of_a_step_before_the_next_one_of_a_grammar() -> None:
    """So grammars have read the anchors when forced text is drafted, on a GPU too."""
    assert not OutriderAlgorithm("OUTRIDER", lambda _: None, supports_overlap=True).supports_grammar_overlap()


def test_forced_text_that_is_not_verified_is_detected() -> None:
    assert off_by(KINDS["sampled"], said(KINDS["sampled"], VerifyAll(), believing)) > SEEN


def test_sampled_drafts_that_are_cut_where_the_grammar_refuses_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cut depends on the token that was drawn, but the next one is drawn as if nothing had been tried."""
    honest = GrammarDrafts.follow
    monkeypatch.setattr(
        GrammarDrafts, "follow", lambda drafts, draft, decided: honest(drafts, draft, torch.ones_like(decided))
    )
    assert off_by(KINDS["sampled"], said(KINDS["sampled"], VerifyAll())) > SEEN
