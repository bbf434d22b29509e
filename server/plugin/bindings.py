"""Names of modules that are bound to another module's definitions."""

import contextlib
import sys
from collections import defaultdict
from types import ModuleType


class Bindings:
    """Replaces objects that modules have imported by name, found in one pass over the modules. SGLang's
    `_propagate_patch` looks at every name of every module for each hook: a second of each process's start."""

    def __init__(self) -> None:
        self._read: dict[int, ModuleType] = {}
        self._places: defaultdict[int, list[tuple[ModuleType, str]]] = defaultdict(list)
        """Names that an object has or had, by its id."""

    def replace(self, original: object, new: object, source: object) -> int:
        """Bind names of modules other than `source` to `new` where they are bound to `original`; return how many."""
        for module in list(sys.modules.values()):
            if isinstance(module, ModuleType) and id(module) not in self._read:
                self._read[id(module)] = module
                for name, value in list(vars(module).items()):
                    if callable(value):
                        self._places[id(value)].append((module, name))
        places, count = self._places.pop(id(original), []), 0
        for module, name in places:
            if module is not source and vars(module).get(name) is original:
                with contextlib.suppress(AttributeError, TypeError):
                    setattr(module, name, new)
                    count += 1
        self._places[id(new)] += places  # another hook's original may be this one's `new`
        return count
