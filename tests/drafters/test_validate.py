"""Decoding steps along an answer, counted from accepted runs."""

from outrider.drafters.training.validate import everywhere, walk


def test_walk_counts_cycles_and_positions() -> None:
    # token 0 accepts two and a bonus, token 3 none and a bonus, token 4 would accept more than remains
    walked = walk([2, 9, 9, 0, 4, 9], 6, 4)
    assert walked.cycles == 3
    assert walked.accepted_length == 2.0
    assert walked.tried == (3, 2, 1, 0)
    assert walked.kept == (2, 2, 0, 0)


def test_everywhere_counts_a_step_from_each_token() -> None:
    walked = everywhere([2, 9, 0], 3, 2)
    assert (walked.cycles, walked.tokens) == (3, 3 + 4)
    assert (walked.tried, walked.kept) == ((3, 2), (2, 2))
