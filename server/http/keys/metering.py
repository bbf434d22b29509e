"""Hook into SGLang's tokenizer manager to count a request's choices and check its limits.

We replace two parts: the check of a prompt when its tokens are known, and the table of choices in the engine. A choice
enters the table before it is sent, and leaves it when the engine has ended it, even if no client waits for it.
"""

from typing import Any

from ..errors import ApiError
from . import admission
from .admission import RequestAdmission


class ChoiceTable(dict[str, Any]):
    """SGLang's `rid_to_state`; an entry belongs to the request that was current when it was added."""

    def __init__(self) -> None:
        super().__init__()
        self.owners: dict[str, RequestAdmission] = {}
        self.requests: set[RequestAdmission] = set()
        """Counted requests, until the engine is done with them."""

    @property
    def under_way(self) -> int:
        """Choices that wait or run in the engine, our own measurements included."""
        return len(self) - len(self.owners) + sum(request.places for request in self.requests)

    def add_request(self, request: RequestAdmission) -> None:
        self.requests.add(request)
        request.on_released.append(self.requests.discard)

    def __setitem__(self, request_id: str, state: Any) -> None:
        super().__setitem__(request_id, state)
        if (owner := admission.current()) is not None and state.obj.log_metrics:
            self.owners[request_id] = owner
            owner.forget = self.pop
            owner.opened(request_id, state)

    def update(self, *states: Any, **more: Any) -> None:
        """Add the choices of a request one by one: SGLang calls `update`, and a dict's own bypasses `__setitem__`."""
        for request_id, state in dict(*states, **more).items():
            self[request_id] = state

    def __delitem__(self, request_id: str) -> None:
        super().__delitem__(request_id)
        if (owner := self.owners.pop(request_id, None)) is not None:
            owner.closed(request_id)

    def pop(self, request_id: str, *default: Any) -> Any:
        if request_id not in self and default:
            return default[0]
        state = self[request_id]
        del self[request_id]
        return state


def meter(manager: Any, context_length: int, most: int | None) -> ChoiceTable:
    """Count requests and check their limits in SGLang's tokenizer manager, and bound each answer to the rest of the
    context.

    manager: SGLang's tokenizer manager, before its first request. context_length: tokens that a prompt and its answer
    can have. most: tokens that a request may have, its prompts and answers together; None is any number.
    """
    table = ChoiceTable()
    table.update(manager.rid_to_state)
    manager.rid_to_state = table
    check = manager._validate_one_request

    def check_and_reserve(obj: Any, input_ids: list[int]) -> None:
        parameters, prompt = obj.sampling_params, len(input_ids)
        if (wanted := parameters.get("max_new_tokens")) is not None:
            longest = max(1, manager.context_len - manager.num_reserved_tokens - prompt)
            parameters = obj.sampling_params = {**parameters, "max_new_tokens": min(wanted, longest)}
        check(obj, input_ids)
        if (current := admission.current()) is None or not obj.log_metrics:
            return  # a measurement of our own
        try:
            answer = current.reserve(
                prompt, parameters.get("n") or 1, parameters.get("max_new_tokens"), context_length - prompt, most
            )
        except ApiError as refusal:
            current.refusal = refusal
            raise ValueError(refusal.message) from None
        # A copy: prompts of one request share their parameters.
        obj.sampling_params = {**parameters, "max_new_tokens": answer}

    manager._validate_one_request = check_and_reserve
    return table
