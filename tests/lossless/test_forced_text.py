"""Text that a grammar forces is drafted, and answers stay the same or keep their distribution."""

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from asking import complete, tokens
from chi_square import THRESHOLD
from exact_answers import PROMPT, SAMPLES, Answer, Rules, answer_probs, answers_p_value
from metrics_page import MetricsPage
from running import Server
from small_target import SPECIAL, VOCAB, SmallTarget

NAMES = [
    "name", "title", "city", "country", "street_address", "email_address", "quantity", "unit_price", "total",
    "currency", "is_active", "created_at", "description", "category", "priority", "tags", "items", "participants",
    "score", "latitude", "status", "comment", "order_number", "first_name",
]  # fmt: skip
WORDS = [
    "low", "medium", "high", "critical", "open", "closed", "pending", "red", "green", "blue", "monday", "sunday",
    "small", "large", "EUR", "USD",
]  # fmt: skip
PATTERNS = (r"^\d{4}-\d{2}-\d{2}$", r"^[A-Z]{2}\d{3}$", r"^\+\d{6,9}$", r"^\d{2}:\d{2}$")


def schemas(count: int) -> list[dict[str, Any]]:
    """The same schemas every time."""
    draw = random.Random(17)
    return [_object(draw, 3) for _ in range(count)]


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(NAMES, draw.randint(1, 5))
    required = names if draw.random() < 0.7 else names[: draw.randint(0, len(names))]
    properties = {name: _value(draw, depth - 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _value(draw: random.Random, depth: int) -> dict[str, Any]:
    makers = [
        lambda: {"type": "string", "maxLength": draw.randint(3, 12)}, lambda: {"type": "integer"},
        lambda: {"type": "number"}, lambda: {"type": "boolean"},
        lambda: {"enum": draw.sample(WORDS, draw.randint(1, 4))},
        lambda: {"type": "string", "pattern": draw.choice(PATTERNS)}, lambda: {"const": draw.choice(WORDS)},
        lambda: {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    ]  # fmt: skip
    if depth > 0:
        makers += [
            lambda: _object(draw, depth),
            lambda: {"type": "array", "items": _value(draw, depth - 1), "minItems": 1, "maxItems": draw.randint(1, 4)},
        ] * 2
    return draw.choice(makers)()


CHOICES = 16
GREEDY, SEEDED = {"temperature": 0}, {"temperature": 0.8, "seed": 5}


def drafted(before: MetricsPage, after: MetricsPage, **labels: str) -> float:
    """Accepted tokens that a grammar forced."""
    name, labels = "outrider_accepted_position_total", labels | {"source": "grammar"}
    return after.value(name, **labels) - before.value(name, **labels)


@pytest.mark.parametrize(
    ("served", "sampling"), [("exact_server", GREEDY), ("planned_server", SEEDED)], indirect=["served"]
)
def test_answers_by_a_schema(
    served: Server, sampling: dict[str, Any], prompts: list[str], request: pytest.FixtureRequest
) -> None:
    count = 200 if request.config.getoption("--exhaustive") else 50
    formats = [
        {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}} for schema in schemas(count)
    ]

    def ask(number: int, speculate: bool) -> list[int]:
        body = sampling | {"max_tokens": 64, "response_format": formats[number]}
        return tokens(complete(served, prompts[number % len(prompts)], speculate=speculate, **body))

    def ask_all(speculate: bool) -> list[list[int]]:
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(lambda number: ask(number, speculate), range(count)))

    plain, before = ask_all(False), MetricsPage(served.url)
    assert ask_all(True) == plain
    assert drafted(before, MetricsPage(served.url)) > 3 * count


TEXTS = ("the order of things, then", "tennis; or something alike", "it is the end of the day.")


@pytest.mark.parametrize("served", ["exact_server", "planned_server"], indirect=True)
def test_sampled_answers_are_exact(served: Server, small_target: SmallTarget) -> None:
    """The texts can be split into tokens in many ways, so the target often refuses a forced token."""
    pieces = small_target.tokenizer.batch_decode([[token] for token in range(VOCAB)])

    def allowed(answer: Answer) -> list[int]:
        said = "".join(pieces[token] for token in answer)
        return [
            token
            for token in range(SPECIAL, VOCAB)
            if pieces[token] and any(text.startswith(said + pieces[token]) for text in TEXTS)
        ]

    prompt = small_target.tokenizer(PROMPT)["input_ids"]
    body = {"temperature": 1.0, "top_k": 3, "regex": "|".join(text.replace(".", r"\.") for text in TEXTS)}

    def sample(_: int) -> list[Answer]:
        answer = complete(served, prompt, speculate=True, n=CHOICES, max_tokens=5, **body)
        return [tuple(choice["token_ids"]) for choice in answer["choices"]]

    before = MetricsPage(served.url)
    with ThreadPoolExecutor(4) as pool:
        drawn = [answer for part in pool.map(sample, range(SAMPLES // CHOICES)) for answer in part]
    assert drafted(before, MetricsPage(served.url), sampling="sampled") > SAMPLES / 4
    exact = answer_probs(small_target.logits, prompt, 5, Rules(temperature=1.0, top_k=3, allowed=allowed))
    assert answers_p_value(drawn, exact) > THRESHOLD
