"""One request's share of its key's limits and of the queue, from its arrival to the last of its tokens.

A request counts as one choice on arrival. When its body is read, `add_choices` adds the rest. When its prompts are
counted, `reserve` takes the most tokens that it may need. When its answer has ended and the engine is done with it, the
unused tokens are returned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from ..errors import ApiError
from .access import KeyUsage
from .token_limits import Grant


@dataclass(slots=True)
class Tokens:
    """Counts as in an answer's usage: `prompt` includes `cached`."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0

    def fields(self) -> dict[str, int]:
        """Return the fields of the request's log line; empty if the engine did no work for it."""
        if not self.prompt:
            return {}
        return {"prompt_tokens": self.prompt, "cached_tokens": self.cached, "completion_tokens": self.completion}


@dataclass(slots=True, eq=False)
class RequestAdmission:
    """A request's share of its key's limits.

    key_usage: None if no key is needed. on_released: called once the engine is done with the request. refusal: the
    error that kept it from the engine; SGLang's handlers pass only its text on. forget: makes SGLang forget a choice.
    """

    key_usage: KeyUsage | None
    refusal: ApiError | None = None
    forget: Callable[[str], None] = field(default=lambda request_id: None)
    on_released: list[Callable[[RequestAdmission], None]] = field(default_factory=list)
    choices: int = 1
    prompts: int = 1
    _reserved_choices: int = 0
    _reserved: int = 0
    _prompt_tokens: int = 0
    _grants: list[tuple[Grant, Grant]] = field(default_factory=list)
    _generated: dict[str, int] = field(default_factory=dict)
    _cached: dict[str, int] = field(default_factory=dict)
    _open: dict[str, Any] = field(default_factory=dict)
    _finished: int = 0
    _passes: int = 0  # for several choices without seeds SGLang first reads each prompt as a separate request
    _ended: bool = False

    def add_choices(self, n: int, prompts: int) -> None:
        """Count n choices for each prompt. Raises ApiError beyond the key's limit."""
        if self.key_usage is not None and n * prompts > 1:
            self.key_usage.add_choices(n * prompts - 1)
        self.choices, self.prompts = n * prompts, prompts

    def reserve(self, prompt: int, samples: int, answer: int | None, room: int, most: int | None) -> int | None:
        """Take the tokens of a prompt and of `samples` answers to it. Returns the most tokens of an answer; None: any.

        answer: requested tokens. room: tokens that the context leaves for it. most: limit of any request. Raises
        ApiError if the key has fewer tokens left, or could never answer the request.
        """
        n = self.choices // self.prompts
        if samples < n and self._reserved_choices % n:
            prompt = 0  # sent again for a choice with its own seed; usage counts it once
        if samples > 1:
            self._passes += 1
        if limits := self._limits(most):
            limit, who = min(limits)
            if answer is None:  # an equal share of the limit's rest for each choice
                share = (limit - self._reserved) * samples // max(samples, self.choices - self._reserved_choices)
                answer = max(1, min(room, (share - prompt) // samples))
            tokens = prompt + samples * answer
            if self._reserved + tokens > limit:
                raise ApiError(
                    f"the request may take {self._reserved + tokens} tokens, its prompts and the longest answers that "
                    f"it asks for (max_tokens), and {who} may have {limit}; ask for less",
                    param="max_tokens",
                    code="request_too_many_tokens",
                )
            if self.key_usage is not None:
                self._grants.append(self.key_usage.take(tokens))
            self._reserved += tokens
        self._reserved_choices += samples
        self._prompt_tokens += prompt
        return answer

    def _limits(self, most: int | None) -> list[tuple[int, str]]:
        """Return the limits on the tokens of one request, each with its name for messages."""
        bounds = [(most, "a request to this server")] if most is not None else []
        if self.key_usage is not None:
            name = f"one of key {self.key_usage.key.name}"
            limits = [self.key_usage.key.max_tokens_per_request, *(budget.limit for budget in self.key_usage.budgets)]
            bounds += [(limit, name) for limit in limits if limit is not None]
        return bounds

    def opened(self, request_id: str, state: Any) -> None:
        """Record that SGLang has begun a choice. state: SGLang's."""
        self._open[request_id] = state

    def closed(self, request_id: str) -> None:
        """Record that SGLang has forgotten a choice, which it does when the engine has ended it."""
        state = self._open.pop(request_id)
        if state.dispatched:
            self._finished += 1
            self._generated.setdefault(request_id, len(state.output_ids))
        self._settle_if_released()

    def answered(self, request_id: str, cached: int, completion: int, *, first_pass: bool = False) -> None:
        """Record SGLang's counts of a whole answer. first_pass: see `_passes`; later ones find its prompt cached."""
        self._generated[request_id] = 0 if first_pass else completion
        if first_pass or not self._passes:
            self._cached[request_id] = cached

    def never_read(self, request_id: str) -> None:
        """Record that a choice timed out in the queue, before its prompt was read."""
        self._generated.pop(request_id, None)

    @property
    def places(self) -> int:
        """Choices that wait or run in the engine."""
        if self._ended:
            return len(self._open)
        return max(0, min(self.choices, self.choices + self._passes - self._finished))

    @property
    def tokens(self) -> Tokens:
        """Tokens counted so far."""
        generated = sum(self._generated.values())
        running = [len(state.output_ids) for state in self._open.values() if state.dispatched]
        if not (self._generated or running):
            return Tokens()
        return Tokens(
            self._prompt_tokens, min(self._prompt_tokens, sum(self._cached.values())), generated + sum(running)
        )

    def end(self) -> None:
        """Record the end of the answer, however it came. The engine has aborted its remaining choices."""
        for request_id, state in list(self._open.items()):
            if not state.dispatched:  # SGLang keeps unneeded ones that it made for `n`
                self.forget(request_id)
        self._ended = True
        if self.key_usage is not None:
            self.key_usage.end(self.choices)
        self._settle_if_released()

    def _settle_if_released(self) -> None:
        if not self._ended or self._open:
            return
        used = self.tokens
        if self.key_usage is not None:
            self.key_usage.settle(self._grants, used.prompt + used.completion)
            self._grants.clear()
        while self.on_released:
            self.on_released.pop()(self)


_current: ContextVar[RequestAdmission | None] = ContextVar("admission", default=None)


def current() -> RequestAdmission | None:
    """Return the admission of the current request; None outside any."""
    return _current.get()


@contextlib.contextmanager
def admitted(key_usage: KeyUsage | None) -> Iterator[RequestAdmission]:
    """Hold a key's place until the answer ends. A stream ends with its last byte or when its client leaves."""
    if key_usage is not None:
        key_usage.begin()
    admission = RequestAdmission(key_usage)
    token = _current.set(admission)
    try:
        yield admission
    finally:
        _current.reset(token)
        admission.end()
