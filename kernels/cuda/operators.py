"""Registers functions as operators `torch.ops.outrider_cuda`, with fake implementations.

A decode step calls them between its graphs. `torch.library.custom_op` wraps each call in Python code of its own.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])
NAMESPACE = "outrider_cuda"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""The functions, by the names of their operators."""


def operator(*mutated: str) -> Callable[[Function], Function]:
    """Register a typed function as the operator of its name, for all devices. mutated: arguments that it writes to.

    The function must not return its arguments or views of them.
    """

    def register(function: Function) -> Function:
        name = function.__name__
        LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=mutated))
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        FUNCTIONS[f"{NAMESPACE}::{name}"] = function
        return function

    return register


def fake(function: Callable[..., Any]) -> Callable[[Function], Function]:
    """Register the fake implementation of an operator's `function`: it makes results of the same shapes and types."""
    register: Callable[[Function], Function] = torch.library.register_fake(
        f"{NAMESPACE}::{function.__name__}", lib=LIBRARY
    )
    return register
