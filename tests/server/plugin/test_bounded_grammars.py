"""The scheduler's grammars: the cache, and the limits on following one."""

from types import SimpleNamespace

import pytest
import torch
import xgrammar
from prometheus_client import CollectorRegistry
from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
from sglang.srt.speculative.spec_utils import GrammarTree, generate_token_bitmask
from small_grammars import nested_repeats, small_schema, tokenizer, vocabulary

from outrider.server.plugin.grammars import budget as budgets
from outrider.server.plugin.grammars.backend import TOO_SLOW, BoundedGrammar, GrammarCache, end_if_too_slow
from outrider.server.plugin.grammars.budget import GrammarBudget
from outrider.server.plugin.grammars.forced import ForcedText
from outrider.server.plugin.grammars.masks import apply_masks, fill_masks
from outrider.server.plugin.grammars.spelling import Spelling

VOCABULARY = {text: number for number, text in enumerate(vocabulary())}


def followed(regex: str, *, unlimited: bool = False) -> BoundedGrammar:
    compiled = xgrammar.GrammarCompiler(tokenizer(), max_threads=1).compile_regex(regex)
    return of_compiled(compiled, unlimited=unlimited)


def of_compiled(compiled: xgrammar.CompiledGrammar, *, unlimited: bool = False) -> BoundedGrammar:
    forced = ForcedText(Spelling(lambda text: [VOCABULARY[char] for char in text], [*map(str.encode, VOCABULARY)]))
    grammar = XGrammarGrammar(xgrammar.GrammarMatcher(compiled), len(VOCABULARY), compiled, None, "", None)
    return BoundedGrammar(grammar, forced, unlimited=unlimited)


def mask_of(grammar: BoundedGrammar) -> torch.Tensor:
    mask = grammar.allocate_vocab_mask(len(VOCABULARY), 1, "cpu")
    grammar.fill_vocab_mask(mask, 0)
    return mask


def exhaust(grammar: BoundedGrammar) -> None:
    grammar.budget.seconds = 1e9


def test_the_cache_keeps_the_latest_within_its_bytes() -> None:
    compiler = xgrammar.GrammarCompiler(tokenizer(), max_threads=1, cache_enabled=False)
    registry = CollectorRegistry()
    cache = GrammarCache(2**20, registry)
    first = ("json", small_schema("first"))
    for number in range(200):
        key = ("json", small_schema(f"name{number}"))
        cache[key] = of_compiled(compiler.compile_json_schema(key[1]))
        if number == 0:
            cache[first] = of_compiled(compiler.compile_json_schema(first[1]))
        assert cache.get(first) is not None
        assert cache.bytes <= 2**20
    assert 2 < len(cache._kept) < 200
    assert cache.get(key) is not None
    assert cache.get(("json", small_schema("name0"))) is None
    assert registry.get_sample_value("outrider_grammar_cache_bytes") == cache.bytes
    size = cache.bytes
    cache[key] = InvalidGrammarObject("in its place")
    assert cache.bytes < size
    cache.clear()
    assert cache.bytes == len(cache._kept) == 0


def test_ordinary_grammars_stay_far_within_the_budget() -> None:
    grammar = followed("[a-z]{1,200}")
    for letter in "lossless" * 20:
        mask_of(grammar)
        grammar.accept_token(VOCABULARY[letter])
    assert not grammar.budget.exceeded
    assert grammar.budget.calls == 320
    assert grammar.budget.seconds < budgets.BURST_SECONDS / 2


def test_a_grammar_that_becomes_too_slow_ends_its_request() -> None:
    grammar = followed(nested_repeats(6))
    for _ in range(400):
        mask_of(grammar)
        grammar.accept_token(VOCABULARY["a"])
        if grammar.budget.exceeded:
            break
    assert grammar.budget.exceeded
    calls = grammar.budget.calls
    assert (mask_of(grammar) == -1).all()  # all tokens are allowed until the request has ended
    grammar.accept_token(VOCABULARY["1"])
    assert grammar.budget.calls == calls
    req = SimpleNamespace(grammar=grammar, to_finish=None)
    assert end_if_too_slow(req)
    assert req.to_finish.status_code == 400
    assert req.to_finish.message == TOO_SLOW


def test_its_copies_are_refused_from_then_on() -> None:
    cache = GrammarCache(2**20, CollectorRegistry())
    cache["regex", "a"] = kept = followed("a")
    running = kept.copy()
    assert cache.get(("regex", "a")) is kept
    exhaust(running)
    assert not kept.budget.exceeded
    assert end_if_too_slow(SimpleNamespace(grammar=running, to_finish=None))
    assert isinstance(cache.get(("regex", "a")), InvalidGrammarObject)


def test_a_request_within_its_budget_goes_on() -> None:
    req = SimpleNamespace(grammar=followed("a*"), to_finish=None)
    assert not end_if_too_slow(req)
    assert not end_if_too_slow(SimpleNamespace(grammar=None, to_finish=None))
    assert req.to_finish is None


@pytest.mark.parametrize("at", range(6))
def test_a_verification_goes_on_when_the_budget_ends_in_it(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    grammar = followed("abc[a-z]*")
    grammar.accept_token(VOCABULARY["a"])
    monkeypatch.setattr(GrammarBudget, "exceeded", property(lambda budget: budget.calls > at))
    draft = [VOCABULARY[text] for text in ("b", "c", "1", "d")]  # the third is not allowed
    fill_masks(grammar, draft, grammar.allocate_vocab_mask(len(VOCABULARY), 5, "cpu"), 0)
    monkeypatch.undo()
    expected = followed("abc[a-z]*")
    expected.accept_token(VOCABULARY["a"])
    assert torch.equal(mask_of(grammar), mask_of(expected))  # all of the draft was rolled back


@pytest.mark.parametrize("text", ["bcd", "b1d", "1cd", "bcz", ""])
def test_masks_are_sglangs(text: str) -> None:
    """Masks of all rows up to the first refused token of a draft, at its place among other requests' rows."""
    grammar, draft = followed("abc[a-d]{1,3}"), [VOCABULARY[letter] for letter in text]
    grammar.accept_token(VOCABULARY["a"])
    block = torch.tensor([[VOCABULARY["a"], *draft]])
    child = torch.arange(1, block.shape[1] + 1)
    child[-1] = -1
    tree = GrammarTree.from_host(child[None], torch.full_like(block, -1), block)
    [request] = reqs = [SimpleNamespace(grammar=grammar)]
    expected = torch.randn(block.shape[1], len(VOCABULARY))
    logits = torch.cat([torch.zeros(2, len(VOCABULARY)), expected])
    mask, _ = generate_token_bitmask(reqs, *tree.resolve(), len(VOCABULARY))
    grammar.apply_vocab_mask(expected, mask)
    masks = grammar.allocate_vocab_mask(len(VOCABULARY), len(logits), "cpu")
    fill_masks(grammar, draft, masks, 2)
    apply_masks(request.grammar, masks, logits)
    assert torch.equal(logits[2:], expected)
    assert not logits[:2].any()
    assert grammar.accepted_tokens == [VOCABULARY["a"]]


def test_ranks_that_follow_together_have_no_clock() -> None:
    grammar = followed("a*", unlimited=True)
    exhaust(grammar)
    assert not grammar.budget.exceeded
    assert grammar.copy().budget.unlimited
