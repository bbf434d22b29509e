"""Streams of /v1/messages, put together as by Anthropic's client."""

import json
from collections.abc import Sequence
from typing import Any


def assembled(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message of a whole stream."""
    message: dict[str, Any] = {}
    opened, inputs = None, dict[int, str]()
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert (opened, event["index"]) == (None, len(message["content"]))
                opened = event["index"]
                message["content"].append(event["content_block"])
            case "content_block_delta":
                assert opened == event["index"]
                delta, content = event["delta"], message["content"][opened]
                if delta["type"] == "input_json_delta":
                    inputs[opened] = inputs.get(opened, "") + delta["partial_json"]
                else:
                    name = delta["type"].removesuffix("_delta")
                    content[name] += delta[name]
            case "content_block_stop":
                opened = None
            case "message_delta":
                message |= event["delta"] | {name: event[name] for name in ("usage", "metrics") if name in event}
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)
    assert events[-1]["type"] == "message_stop"
    return message
