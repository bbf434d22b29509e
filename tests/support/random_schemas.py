"""JSON schemas of the kinds that users send: extraction, forms, nested records, arrays, enumerations, patterns."""

import random
from typing import Any

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
