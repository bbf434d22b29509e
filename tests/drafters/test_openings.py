from types import SimpleNamespace

from outrider.drafters.training.synthesise import drawn_openings

VOCABULARY = SimpleNamespace(get_vocab=lambda: {"Ġriver": 0, "▁castle": 1, "river": 2, "ĠThe": 3, "Ġof": 4, "<s>": 5})


def test_openings_are_many_and_end_with_words_of_the_vocabulary() -> None:
    drawn = drawn_openings(VOCABULARY, 1000, seed=1)
    assert drawn == drawn_openings(VOCABULARY, 1000, seed=1) != drawn_openings(VOCABULARY, 1000, seed=2)
    assert len(set(drawn)) > 150
    assert "" in drawn
    assert not any("…" in text for text in drawn)
    worded = [text for text in drawn if text.endswith((" river", " castle"))]
    assert 350 < len(worded) < 650
    assert drawn_openings(SimpleNamespace(get_vocab=dict), 100, seed=1).count("") < 10
