"""Two tools with few argument values, which even a small model calls."""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {field: {"enum": values}},
                "required": [field],
                "additionalProperties": False,
            },
        },
    }
    for name, field, values in (
        ("get_weather", "city", ["Paris and its suburbs", "London"]),
        ("find_hotel", "near", ["the station of Köln", "the sea"]),
    )
]
