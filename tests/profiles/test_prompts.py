"""The built-in prompts: three kinds in turn, equal in both parts of the calibration."""

import ast
import doctest
import itertools
from collections import Counter

import pytest

from outrider.server.prompt_files import BUILT_IN, SAMPLED, read_questions, with_temperatures
from outrider.server.tune.effort import QUICK, Effort
from outrider.server.tune.measure import split

KINDS = ("code", "math", "chat")
QUESTIONS = read_questions(BUILT_IN)
FUNCTION = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
MATH = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def kinds(questions: list[str]) -> list[str]:
    """The kind of each built-in question."""
    places = {question: place for place, question in enumerate(QUESTIONS)}
    return [KINDS[places[question] % 3] for question in questions]


def test_there_are_48_prompts_of_each_kind_and_none_comes_twice() -> None:
    assert len(QUESTIONS) == len(set(QUESTIONS)) == 144 == Effort().prompts
    assert Counter(kinds(QUESTIONS)) == dict.fromkeys(KINDS, 48)


def test_the_kinds_come_in_turn() -> None:
    for question, kind in zip(QUESTIONS, KINDS * 48, strict=True):
        assert question.endswith(MATH) == (kind == "math"), question
        assert "```" not in question or kind == "code", question


def test_functions_to_write_are_python_with_two_examples() -> None:
    functions = [question for question in QUESTIONS if question.startswith(FUNCTION)]
    assert len(functions) == 32
    for question in functions:
        code = question.removeprefix(FUNCTION).removesuffix("\n\n```")
        function = ast.parse(code).body[-1]
        assert isinstance(function, ast.FunctionDef), question
        examples = doctest.DocTestParser().get_examples(ast.get_docstring(function) or "")
        assert len(examples) == 2, question
        assert all(example.want for example in examples), question


def test_both_parts_hold_the_same_share_of_each_kind() -> None:
    fitted_on, held_out = split(QUESTIONS)
    assert Counter(kinds(fitted_on)) == dict.fromkeys(KINDS, 32)
    assert Counter(kinds(held_out)) == dict.fromkeys(KINDS, 16)


def test_every_kind_has_every_temperature_in_both_parts() -> None:
    for part in split(with_temperatures(QUESTIONS)):
        pairs = zip(kinds([question for question, _ in part]), (temperature for _, temperature in part), strict=True)
        assert set(pairs) == set(itertools.product(KINDS, SAMPLED))


def test_a_quick_measurement_holds_all_kinds_in_both_parts() -> None:
    for part in split(QUESTIONS[: QUICK.prompts]):
        counts = Counter(kinds(part))
        assert set(counts) == set(KINDS)
        assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize("count", [*range(12), 144, 145])
def test_every_question_is_in_one_part_and_one_of_three_neighbours_is_held_out(count: int) -> None:
    questions = [str(number) for number in range(count)]
    fitted_on, held_out = split(questions)
    assert sorted([*fitted_on, *held_out], key=int) == questions
    for first in range(0, count - count % 3, 3):
        assert len(set(questions[first : first + 3]) & set(held_out)) == 1
