"""Logs of answers as training text: JSONL files, checked line by line.

A line is one of
- a chat, `{"messages": [..., {"role": "assistant", "content": "…"}]}`, with the answer as its last message;
- a request with its response, `{"request": {"messages" or "prompt": …}, "response": {"choices": […]}}`, as in OpenAI's
  API;
- a text with its continuation, `{"prompt": "…", "completion": "…"}`;
- tokens, `{"prompt_ids": […], "response_ids": […]}`, as a server with `--learn` keeps them.
All may have a `temperature`.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from .features import AnsweredText
from .prompts import BadLine
from .store import FeatureStore, Sequence, digest
from .target import TargetModel

SHAPES = "`messages`, `request` with `response`, `prompt` with `completion`, or `prompt_ids` with `response_ids`"
LEAST_AGREEMENT = 0.8
"""Smallest share of an answer's tokens that the target would choose at temperature 0, or has among its likeliest at
higher ones. Answers below it were not written by this target."""
LONGEST_PROMPT = 2048
"""Tokens of a prompt; answers to longer ones are not trained on."""
HELD_OUT = 8
"""One prompt in this many is never trained on."""
UNKNOWN_TEMPERATURE = 1.0
"""Temperature of answers for which the log does not state it."""


@dataclass
class LogReader:
    """Converts logged answers to token ids, in the target's chat template. skipped: valid but unusable answers, counted
    by reason."""

    target: TargetModel
    skipped: Counter[str] = field(default_factory=Counter)

    def read(self, paths: list[str]) -> Iterator[AnsweredText]:
        """Yield every answer of these files; raises BadLine for a line without a readable answer, and OSError."""
        for path in paths:
            size, name = Path(path).stat().st_size, f"log {Path(path).name}"
            with Path(path).open("rb") as lines, tqdm(total=size, desc=name, unit="B", unit_scale=True) as progress:
                for number, line in enumerate(lines, 1):
                    progress.update(len(line))
                    if line.strip():
                        yield from self._texts(line, f"{path}:{number}")

    def _texts(self, line: bytes, where: str) -> Iterator[AnsweredText]:
        try:
            row: Any = json.loads(line)
        except ValueError as error:
            if not line.endswith(b"\n"):
                self.skipped["half a last line"] += 1
                return
            raise BadLine(f"{where}: not JSON ({error})") from None
        if not isinstance(row, dict):
            raise BadLine(f"{where}: expected a JSON object, got {type(row).__name__}")
        request = row.get("request", row)
        if not isinstance(request, dict):
            raise BadLine(f"{where}: `request` must be an object")
        temperature = row.get("temperature", request.get("temperature", UNKNOWN_TEMPERATURE))
        if isinstance(temperature, bool) or not isinstance(temperature, int | float) or temperature < 0:
            raise BadLine(f"{where}: `temperature` must be a number of at least 0, got {temperature!r}")
        if "prompt_ids" in row:
            size = self.target.config.vocab_size
            pairs = [(_ids(row, "prompt_ids", size, where), _ids(row, "response_ids", size, where))]
        else:
            prompt = self._prompt(request, row, where)
            pairs = [(prompt, ids) for ids in self._answers(row, where)] if prompt else []
        for prompt, response in pairs:
            if not prompt or not response or len(prompt) > LONGEST_PROMPT:
                self.skipped[
                    "no text" if not prompt or not response else f"a prompt of more than {LONGEST_PROMPT} tokens"
                ] += 1
                continue
            yield AnsweredText(prompt + response, len(prompt), float(temperature), digest(prompt))

    def _prompt(self, request: dict[str, Any], row: dict[str, Any], where: str) -> list[int]:
        """Return the prompt's token ids; empty if it is not text alone, which is counted in `skipped`."""
        tokenizer = self.target.tokenizer
        if "messages" in request:
            messages = request["messages"]
            if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
                raise BadLine(f"{where}: `messages` must be a list of objects with `role` and `content`")
            if request is row:
                messages = messages[:-1]
            if not messages:
                raise BadLine(f"{where}: `messages` has no question before its answer")
            plain = [{**message, "content": _text(message.get("content"))} for message in messages]
            if any(message["content"] is None or message.get("tool_calls") for message in plain):
                self.skipped["images, sound or tool calls"] += 1
                return []
            if not tokenizer.chat_template:
                raise BadLine(f"{where}: the target has no chat template; give `prompt` and `completion`")
            try:
                encoded = tokenizer.apply_chat_template(
                    plain, tools=request.get("tools"), add_generation_prompt=True, return_dict=True
                )
            except Exception as error:  # whatever the template raises
                raise BadLine(f"{where}: the chat template refuses these messages ({error})") from None
            return list(encoded["input_ids"])
        if isinstance(request.get("prompt"), str):
            return list(tokenizer(request["prompt"])["input_ids"])
        raise BadLine(f"{where}: expected {SHAPES}")

    def _answers(self, row: dict[str, Any], where: str) -> Iterator[list[int]]:
        """Yield the token ids of each answer, with the token that ended it; empty where there is no text."""
        for text, ended in _answer_texts(row, where):
            ids = [] if text is None else self.target.tokenizer(text, add_special_tokens=False)["input_ids"]
            yield [*ids, self.target.tokenizer.eos_token_id] if ids and ended else list(ids)


def _answer_texts(row: dict[str, Any], where: str) -> Iterator[tuple[str | None, bool]]:
    """Yield each answer's text (None if it is not text alone), and whether it ended by itself."""
    if "response" in row:
        response = row["response"]
        choices = response.get("choices") if isinstance(response, dict) else None
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise BadLine(f"{where}: `response` must be an object with a list of `choices`")
        for choice in choices:
            message = choice.get("message", {"content": choice.get("text")})
            if not isinstance(message, dict):
                raise BadLine(f"{where}: a choice's `message` must be an object")
            text = None if message.get("tool_calls") else _text(message.get("content"))
            yield text, choice.get("finish_reason", "stop") == "stop"
    elif "messages" in row:
        last = row["messages"][-1]
        if last["role"] != "assistant":
            raise BadLine(f"{where}: the last message must be the assistant's answer, and is by {last['role']!r}")
        yield None if last.get("tool_calls") else _text(last.get("content")), True
    elif isinstance(row.get("completion"), str):
        yield row["completion"], True
    else:
        raise BadLine(f"{where}: expected {SHAPES}")


def _text(content: Any) -> str | None:
    """Return a message's text; None if it is not text alone."""
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        strings = [text for text in texts if isinstance(text, str)]
        return "".join(strings) if len(strings) == len(content) else None
    return content if isinstance(content, str) else None


def _ids(row: dict[str, Any], name: str, size: int, where: str) -> list[int]:
    ids = row.get(name)
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < size for i in ids):
        raise BadLine(f"{where}: `{name}` must be a list of the target's token ids, below {size}")
    return ids


def held_out(prompt: str) -> bool:
    """Return True if answers to the prompt with this digest are kept for the gate, and never trained on."""
    return int(prompt, 16) % HELD_OUT == 0


def held_out_prompts(store: FeatureStore, count: int) -> list[int]:
    """Return all answers to the first `count` held-out prompts; adding answers does not change which prompts these
    are."""
    prompts = list(dict.fromkeys(entry.source for entry in store.entries if held_out(entry.source)))[:count]
    return [i for i, entry in enumerate(store.entries) if entry.source in set(prompts)]


def agreement(sequence: Sequence, temperature: float) -> float:
    """Return the share of an answer's tokens that the target would write."""
    return float(_likely(sequence, temperature).float().mean())


def under_rules(sequence: Sequence, temperature: float) -> Sequence:
    """Return an answer with the target's distribution under its request's rules, such as a grammar: tokens that it
    would not write without them get probability 1."""
    forced, ids, probs = ~_likely(sequence, temperature), sequence.top_ids.clone(), sequence.top_probs.clone()
    ids[forced, 0] = sequence.tokens[sequence.prompt :][forced].to(ids.dtype)
    probs[forced] = torch.eye(1, probs.shape[1], dtype=probs.dtype)
    return replace(sequence, top_ids=ids, top_probs=probs)


def _likely(sequence: Sequence, temperature: float) -> torch.Tensor:
    """Return [S - prompt] bool, tokens that the target would write: its likeliest at 0, else one of the likeliest."""
    likely = sequence.top_ids[:, :1] if temperature == 0 else sequence.top_ids
    return (sequence.tokens[sequence.prompt :, None] == likely).any(-1)
