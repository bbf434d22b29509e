"""Two tools with few argument values, which even a small model calls."""

VALUES = (
    ("get_weather", "city", ["Paris and its suburbs", "London"]),
    ("find_hotel", "near", ["the station of Köln", "the sea"]),
)
CLOSED = {"type": "object", "additionalProperties": False}
SCHEMAS = [(name, CLOSED | {"properties": {field: {"enum": v}}, "required": [field]}) for name, field, v in VALUES]
TOOLS = [
    {"type": "function", "function": {"name": name, "strict": True, "parameters": schema}} for name, schema in SCHEMAS
]
