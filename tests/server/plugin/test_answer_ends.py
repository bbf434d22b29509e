"""No token past an answer's end is drafted, recorded or counted."""

import numpy as np
import pytest
import torch
from planning import request

from outrider.drafters.base import Draft
from outrider.scheduler.baselines import VerifyAll
from outrider.server.plugin.decode.metrics import SpeculationMetrics
from outrider.server.plugin.decode.plan import StepPlanner
from outrider.server.plugin.decode.requests import RequestTable

GAMMA = 4
END, STOP = 7, 9


def table(*requests):
    made = RequestTable(8, GAMMA, "cpu")
    made.admit(requests, torch.arange(len(requests)))
    return made


def limits(found, *contexts):
    return found.view(found.entries(np.arange(len(contexts))), np.array(contexts)).limits.tolist()


def test_no_more_is_drafted_than_the_answer_has_room_for():
    """A prompt of 10 and 6 new tokens; a step adds one undrafted token."""
    requests = table(request(prompt=10, new_tokens=6))
    # With 10 cached the answer has one token, the anchor; 5 may follow.
    assert [limits(requests, cached)[0] for cached in (10, 11, 12, 13, 14)] == [4, 3, 2, 1, 0]
    assert limits(requests, 15) == [0]


def test_where_lengths_are_unsure_drafts_may_pass_the_answers_end_and_not_the_contexts():
    """10 to 14 tokens of a text of 16 are cached, in a context of 16 or more."""
    for context, drafted in ((16, 1), (17, 2), (18, 3), (40, GAMMA)):
        requests = RequestTable(8, GAMMA, "cpu", context)
        requests.admit([request(prompt=10, new_tokens=6)], torch.arange(1))
        entries = requests.entries(np.arange(1))
        assert requests.view(entries, np.array([14]), 4).limits.tolist() == [drafted]
        # The last draft of the longest text is at position 14 + drafted.
        assert 14 + drafted < context
        assert requests.view(entries, np.array([14])).limits.tolist() == [0]


def test_each_request_has_its_own_end_tokens():
    requests = table(
        request(ends=(END,)),
        request(ends=(END,), stop_token_ids={STOP}),
        request(ends=(END,), ignore_eos=True),
        request(),
    )
    assert [sorted(set(row) - {-1}) for row in requests.ends[:4].tolist()] == [[END], sorted((END, STOP)), [], []]
    again = table(request(ends=(END, STOP)), request(ends=(2,)))
    again.admit([request(ends=(3,))], torch.tensor([0]))  # a new request in the row has only its own ends
    assert again.ends[:2].tolist() == [[3, -1], [2, -1]]


def planning_of(registry, *requests):
    metrics = SpeculationMetrics(GAMMA, "test", registry)
    planning = StepPlanner(VerifyAll(), None, RequestTable(8, GAMMA, "cpu"), metrics, "cpu")
    planning.requests.admit(requests, torch.arange(len(requests)))
    return planning


def step_of(planning, tokens, accept):
    """One step that drafts `tokens` [R, gamma] and accepts `accept` of them."""
    count = len(tokens)
    step = planning.begin(np.arange(count), np.full(count, 10), torch.zeros(count, dtype=torch.int64))
    draft = Draft(torch.tensor(tokens), torch.full((count,), GAMMA), torch.full((count, GAMMA), 0.9))
    admission = planning.admit(step, draft, 0.0)
    planning.finish(admission, torch.tensor(accept) + 1)
    return admission


def test_no_token_after_a_drafted_end_is_verified_recorded_or_counted(registry, value):
    planning = planning_of(registry, *[request(ends=(END,))] * 3)
    # accepted with its end; rejected before its end; ends nowhere
    admission = step_of(planning, [[1, END, 3, 4], [1, 2, END, 4], [1, 2, 3, 4]], [2, 1, 4])
    assert admission.verify_lens.tolist() == [2, 3, 4]
    state = planning.state()["records"]
    assert state["verify_lens"] == [2, 3, 4]
    assert state["accepted"] == [2, 1, 4]
    # 2 drafts without the target's own token, 1 draft and that token, 4 drafts and that token
    assert value("outrider_accepted_length_sum") == 2 + 2 + 5
    assert planning.requests.generated[:3].tolist() == [2, 2, 5]
    assert value("outrider_verified_tokens_total") == 9


RULED = (
    {"frequency_penalty": 0.5},
    {"presence_penalty": -0.5},
    {"repetition_penalty": 1.1},
    {"min_new_tokens": 8},
    {"logit_bias": {"5": 1.0}},
    {"json_schema": "{}"},
    {"regex": "a+"},
    {"ebnf": 'root ::= "a"'},
    {"structural_tag": "{}"},
)


@pytest.mark.parametrize("rules", RULED)
def test_requests_with_rules_are_not_calibrated_on(registry, value, rules):
    """Their accepted drafts are counted."""
    planning = planning_of(registry, request(**rules), request())
    step = step_of(planning, [[1, 2, 3, 4], [1, 2, 3, 4]], [0, 4]).step
    assert step.view.ruled.tolist() == [True, False]
    assert planning.state()["records"]["accepted"] == [4]
    assert value("outrider_verified_tokens_total") == 8
    assert value("outrider_accepted_tokens_total") == 4
