from dataclasses import replace

import pytest

from outrider.server.plugin.options import DEFAULTS, KEY, RequestOptions

TOLD = RequestOptions(
    enabled=False, gamma=3, planned=False, replayed=True, min_tokens_per_second=12.5, trace=True, learn=True,
    learner="a", corpus="me", stored=False, learned="0001", adapter="a",
)  # fmt: skip


def test_options_round_trip():
    for name in RequestOptions.__dataclass_fields__:
        options = replace(DEFAULTS, **{name: getattr(TOLD, name)})
        assert options != DEFAULTS
        assert RequestOptions.from_custom_params(options.to_custom_params()) == options


def test_a_request_without_options_carries_none():
    assert RequestOptions().to_custom_params() is None
    assert RequestOptions.from_custom_params(None) == RequestOptions.from_custom_params({}) == DEFAULTS


def test_foreign_parameters_are_kept():
    assert RequestOptions.from_custom_params({"theirs": 1}) == DEFAULTS
    with pytest.raises(TypeError):
        RequestOptions.from_custom_params({KEY: {"unknown": 1}})


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        (RequestOptions(), 7),
        (RequestOptions(gamma=3), 3),
        (RequestOptions(gamma=9), 7),
        (RequestOptions(gamma=0), 0),
        (RequestOptions(enabled=False, gamma=3), 0),
    ],
)
def test_draft_limit(options, limit):
    assert options.draft_limit(7) == limit
