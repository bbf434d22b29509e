"""Accepted lengths, and decoding steps along an answer."""

import pytest

from outrider.drafters.acceptance import Acceptance, acceptance_table
from outrider.drafters.training.validate import everywhere, walk


def test_unverified_positions_are_unobserved() -> None:
    # both of two kept; rejected at once; none verified; rejected at the third
    acceptance = Acceptance.from_steps(verified=[2, 4, 0, 4], accepted=[2, 0, 0, 2], gamma=4)
    assert acceptance.cycles == 4
    assert acceptance.accepted_length == (3 + 1 + 1 + 3) / 4
    assert acceptance.tried == (3, 2, 1, 0)
    assert acceptance.kept == (2, 2, 0, 0)
    assert acceptance.conditional == [2 / 3, 1.0, 0.0, None]


def test_counts_add() -> None:
    first = Acceptance.from_steps([3], [1], 3)
    second = Acceptance.from_steps([3, 2], [3, 2], 3)
    assert first + second == Acceptance.from_steps([3, 3, 2], [1, 3, 2], 3)
    assert Acceptance.empty(3) + first == first
    assert Acceptance.empty(3).accepted_length == 0.0
    with pytest.raises(ValueError, match="gamma 3 and 2"):
        first + Acceptance.empty(2)


@pytest.mark.parametrize(("verified", "accepted"), [(2, 3), (5, 1), (2, -1)])
def test_impossible_counts_are_refused(verified: int, accepted: int) -> None:
    with pytest.raises(ValueError, match="accepted <= verified <= 4"):
        Acceptance.from_steps([verified], [accepted], 4)


def test_table_has_a_row_per_name_and_a_column_per_position() -> None:
    table = acceptance_table({"code": Acceptance.from_steps([2, 2], [2, 0], 2), "chat": Acceptance.empty(2)})
    lines = table.splitlines()
    assert lines[0] == "| | tau | steps | 1 | 2 |"
    assert lines[2] == "| code | 2.00 | 2 | 0.50 | 1.00 |"
    assert lines[3] == "| chat | 0.00 | 0 | - | - |"


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
