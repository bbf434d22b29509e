"""Changes to SGLang that must succeed: SGLang itself only logs a failing hook or plugin."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from sglang.srt.plugins import hook_registry
from sglang.srt.plugins.hook_registry import HookRegistry

from .bindings import Bindings

PLUGIN = "outrider"
"""Name of our entry point, which SGLang stores with each hook."""
replaced: list[str] = []
"""Names of functions and classes that `replace` has replaced, as `module.Class.name`."""


class NotApplied(RuntimeError):
    """Outrider does not fit this version of SGLang."""


def replace(owner: type | ModuleType, name: str, new: Any) -> None:
    """Replace `owner.name` by `new`. Raises NotApplied if the class or module does not define it: it would never be
    read."""
    kind = "module" if isinstance(owner, ModuleType) else "class"
    full = f"{owner.__name__ if isinstance(owner, ModuleType) else f'{owner.__module__}.{owner.__qualname__}'}.{name}"
    if name not in vars(owner):
        raise NotApplied(_message(full, f"the {kind} does not define it"))
    if callable(new):
        replaced.append(full)
    setattr(owner, name, new)


@contextmanager
def fatal_failures() -> Iterator[None]:
    """Make failures while registering our hooks fatal. SGLang applies hooks next, and then raises NotApplied if the
    registration has failed or a hook of ours cannot be applied."""
    original, failures = HookRegistry.apply_hooks, list[Exception]()

    def apply_hooks(cls: type[HookRegistry]) -> None:
        if failures:
            raise NotApplied(f"Outrider's plugin failed: {failures[0]!r}") from failures[0]
        propagate, hook_registry._propagate_patch = hook_registry._propagate_patch, Bindings().replace
        for target, hooks in sorted(cls._hooks.items(), key=cls._target_sort_key):
            if target in cls._patched or not any(source and source.plugin_name == PLUGIN for *_, source in hooks):
                continue
            try:
                cls._apply_target(target, hooks)
            except Exception as error:
                raise NotApplied(_message(target, repr(error))) from error
            cls._patched.add(target)
        hook_registry._propagate_patch = propagate
        original()

    HookRegistry.apply_hooks = classmethod(apply_hooks)
    try:
        yield
    except Exception as error:
        failures.append(error)
        raise


def _message(name: str, reason: str) -> str:
    from importlib.metadata import version

    return (
        f"SGLang {version('sglang')} has no place for Outrider's {name} ({reason}); "
        "install the version that `outrider doctor` calls tested"
    )
