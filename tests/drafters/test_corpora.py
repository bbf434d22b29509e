"""Lookup across requests: matches, separate and bounded corpora."""

import random
import threading

import pytest
import torch
from shown_texts import show

from outrider.drafters import corpora_file
from outrider.drafters.corpora import OWNERS, Corpora, Name
from outrider.drafters.ngram import NgramDrafter
from outrider.kernels.cpu import native

pytestmark = pytest.mark.skipif(not native.available(), reason="no compiled kernels here")

ME, YOU = Name.of("me", ""), Name.of("you", "")
GAMMA, CONTEXT = 5, 256


def drafts(corpora, texts, names, gamma=GAMMA):
    """Draft after each of `texts`, ended by its anchor, from the corpora of these names."""
    drafter = NgramDrafter(gamma, corpora=corpora)
    numbers = torch.tensor([corpora.number(name) for name in names])
    return drafter.propose(show(drafter, texts, CONTEXT, corpora=numbers))


def own_match(text, longest=32):
    return max(
        (n for n in range(longest, 1, -1) if any(text[i : i + n] == text[-n:] for i in range(len(text) - n))), default=0
    )


def expected(texts, end, longest=32, compared=16):
    """The rule in plain code: among the last 16 places in `texts` that share the last 8 tokens of `end`, else the last
    3, take the latest of the longest matches, to the end of its text. None if `end` itself has a match as long."""
    for size in (8, 3):
        places = [
            (t, i) for t, text in enumerate(texts) for i in range(size, len(text)) if text[i - size : i] == end[-size:]
        ][::-1][:compared]
        best = (0, None)
        for t, i in places:
            n = 0
            while n < min(longest, i, len(end)) and texts[t][i - 1 - n] == end[-1 - n]:
                n += 1
            best = max(best, (n, (t, i)), key=lambda each: each[0])
        if len(end) >= size and places:
            t, i = best[1]
            return texts[t][i : i + GAMMA] if best[0] > own_match(end) else None
    return None


def some_texts(count, tokens, seed):
    draw = random.Random(seed)
    passages = [[draw.randrange(tokens) for _ in range(draw.randrange(3, 50))] for _ in range(20)]
    return [[token for _ in range(4) for token in draw.choice(passages)][:CONTEXT] for _ in range(count)]


def test_matches_equal_a_plain_search():
    corpora, texts = Corpora(1 << 16), some_texts(40, 50, seed=1)
    kept = []
    for text in texts:
        if not any(
            other[i : i + 48] == text[j : j + 48]
            for other in kept
            for i in range(len(other) - 47)
            for j in range(len(text) - 47)
        ):
            corpora.insert(ME, text)
            kept.append(text)
    assert len(kept) > 8
    ends = [
        text[: random.Random(row).randrange(2, len(text))] for row, text in enumerate(some_texts(200, 50, seed=1)[::-1])
    ]
    draft = drafts(corpora, ends, [ME] * len(ends))
    matches = 0
    for row, end in enumerate(ends):
        want = expected(kept, end)
        assert bool(draft.across[row]) == (want is not None), row
        if want is not None:
            matches += 1
            assert draft.tokens[row, : draft.lens[row]].tolist() == want
            assert (draft.confidence[row, : len(want)] > 0).all()
            assert not draft.confidence[row, len(want) :].any()
    assert 20 < matches < 190


def test_no_match_is_found_in_another_corpus():
    """The lookups use another owner or another salt."""
    text, end = list(range(100)), list(range(20))
    salted, names = Name.of("me", "salt"), [ME, YOU, Name.of("me", "salt")]
    assert len({ME, YOU, salted, Name.of("mes", "alt")}) == 4
    alone, beside = Corpora(4096), Corpora(4096)
    for corpora in (alone, beside):
        corpora.insert(YOU, [7, 8, 9, *range(500, 540)])
        corpora.insert(salted, [3, 2, 1])
    beside.insert(ME, text)
    assert drafts(beside, [end] * 3, names).across.tolist() == [True, False, False]
    for name in (YOU, salted):
        ours, theirs = (drafts(corpora, [end, [7, 8, 9]], [name] * 2) for corpora in (alone, beside))
        for field in ("tokens", "lens", "confidence", "across"):
            assert torch.equal(getattr(ours, field), getattr(theirs, field))


def test_writing_to_a_corpus_keeps_other_owners_texts():
    corpora = Corpora(4096)
    corpora.insert(ME, list(range(100)))
    for salt in range(100):
        corpora.insert(Name.of("you", str(salt)), [salt, *range(200)])
        corpora.insert(YOU, [random.Random(salt).randrange(1000) for _ in range(1000)])
    assert drafts(corpora, [list(range(20))], [ME]).tokens[0].tolist() == [20, 21, 22, 23, 24]


def test_the_owner_that_was_silent_longest_is_dropped():
    corpora, end = Corpora(4096), list(range(20))
    for owner in range(OWNERS):
        corpora.insert(Name.of(str(owner), ""), list(range(100)))
    corpora.number(Name.of("0", ""))
    corpora.insert(ME, list(range(100)))
    there = drafts(corpora, [end] * 3, [Name.of("0", ""), Name.of("2", ""), ME]).across
    assert there.all()
    assert not drafts(corpora, [end], [Name.of("1", "")]).across.any()


def test_memory_is_bounded_and_the_oldest_goes_first():
    corpora, draw = Corpora(1 << 14), random.Random(2)
    most = 2 * corpora.native.bytes_of(1 << 14)
    first = [draw.randrange(5000) for _ in range(200)]
    texts = [first, *([draw.randrange(5000) for _ in range(1000)] for _ in range(40))]
    for text in texts:
        corpora.insert(ME, text)
        for salt in range(9):
            corpora.insert(Name.of("me", str(salt)), text[salt:])
        assert corpora.bytes <= most
    assert corpora.bytes > most / 2
    draft = drafts(
        corpora, [first[:50], texts[-1][:50], texts[-10][:50], texts[-1][:50]], [ME] * 3 + [Name.of("me", "8")]
    )
    assert draft.across.tolist() == [False, True, True, True]
    assert draft.tokens[1].tolist() == texts[-1][50 : 50 + GAMMA]


def test_stored_texts_are_not_added_again():
    corpora, draw = Corpora(1 << 14), random.Random(3)
    text = [draw.randrange(5000) for _ in range(1000)]
    corpora.insert(ME, text)
    once = len(next(corpora.contents())[1])
    for turn in range(20):
        corpora.insert(ME, [*text, *range(turn * 10, turn * 10 + 10)])
    assert len(next(corpora.contents())[1]) < once + 20 * 60
    draft = drafts(corpora, [text[-40:]], [ME])
    assert draft.tokens[0].tolist() == [190, 191, 192, 193, 194]


def test_recurring_texts_stay():
    """A recurring text is added again before it would be dropped."""
    corpora, draw = Corpora(4096), random.Random(4)
    text = [draw.randrange(5000) for _ in range(200)]
    for _ in range(40):
        corpora.insert(ME, text)
        corpora.insert(ME, [draw.randrange(5000) for _ in range(500)])
    assert drafts(corpora, [text[:50]], [ME]).tokens[0].tolist() == text[50 : 50 + GAMMA]


def test_a_hash_collision_yields_no_false_match():
    """A full ring mixes lists of n-grams, but every draft continues its text's last three tokens."""
    corpora, draw = Corpora(4096), random.Random(5)
    text = [draw.randrange(40) for _ in range(6000)]
    corpora.insert(ME, text)
    ends = [[draw.randrange(40) for _ in range(12)] for _ in range(300)]
    draft = drafts(corpora, ends, [ME] * 300)
    there = {tuple(text[i : i + 4]) for i in range(len(text))}
    assert int(draft.across.sum()) > 5
    for row in draft.across.nonzero()[:, 0].tolist():
        assert (*ends[row][-3:], int(draft.tokens[row, 0])) in there


def test_a_file_brings_the_texts_back(tmp_path):
    corpora, path = Corpora(1 << 14), tmp_path / "texts"
    texts = some_texts(20, 3000, seed=6)
    for text in texts:
        corpora.insert(ME, text)
        corpora.insert(YOU, text[::-1])
    corpora.insert(YOU, list(range(4000, 4100)), secret=True)
    corpora_file.write(path, corpora.contents(), "tokenizer")
    assert path.stat().st_mode & 0o777 == 0o600
    again = Corpora(1 << 14)
    for name, contents in corpora_file.read(path, "tokenizer", 5000):
        again.fill(name, contents)
    ends = [text[:30] for text in texts] + [text[::-1][:30] for text in texts] + [list(range(4000, 4020))]
    names = [ME] * 20 + [YOU] * 21
    before, after = drafts(corpora, ends, names), drafts(again, ends, names)
    assert before.across[:-1].sum() > 30
    assert torch.equal(before.tokens[:-1], after.tokens[:-1])
    assert (bool(before.across[-1]), bool(after.across[-1])) == (True, False)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda found: found[:-4], "damaged"),
        (lambda found: found[:-8] + bytes(8), "damaged"),
        (lambda found: b"{}\n" + found, "no file of texts"),
        (lambda found: b"\xff" + found, "no file of texts"),
        (lambda found: b"", "no file of texts"),
        (lambda found: found.replace(b"texts 1", b"texts 2"), "expected"),
        (lambda found: found.replace(b'"mine"', b'"other"'), "another model's tokenizer"),
    ],
)
def test_a_foreign_or_damaged_file_is_refused(tmp_path, damage, message):
    corpora, path = Corpora(4096), tmp_path / "texts"
    corpora.insert(ME, list(range(50)))
    corpora_file.write(path, corpora.contents(), "mine")
    assert corpora_file.read(path, "mine", 50)
    with pytest.raises(ValueError, match="vocabulary of 49"):
        corpora_file.read(path, "mine", 49)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=message):
        corpora_file.read(path, "mine", 50)


def test_half_a_file_of_a_killed_process_is_deleted(tmp_path):
    (tmp_path / ".texts.abc").write_bytes(b"half")
    corpora_file.write(tmp_path / "texts", Corpora(4096).contents(), "mine")
    assert [each.name for each in tmp_path.iterdir()] == ["texts"]


def test_texts_are_written_while_requests_ask():
    """An owner that reads counts as the latest."""
    corpora, names, done = Corpora(1 << 12), [Name.of(str(k), "") for k in range(8)], threading.Event()
    for name in names:
        corpora.insert(name, list(range(1000)))

    def ask():
        while not done.is_set():
            for name in names:
                corpora.number(name)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for _ in range(200):
            assert sorted(name for name, _ in corpora.contents()) == sorted(names)
    finally:
        done.set()
        asking.join()
