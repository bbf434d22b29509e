"""Finds optional calls in the source, and makes them fail in servers."""

import ast
import importlib
import itertools
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from metrics_page import MetricsPage
from running import Server, changed, wait_until

from outrider.server.plugin.decode import optional
from outrider.server.plugin.decode.boundary import PARTS
from outrider.server.plugin.decode.metrics import SpeculationMetrics
from outrider.server.plugin.decode.optional.part import OptionalPart

PLUGIN = Path(__file__).parents[2] / "server" / "plugin"
PLACES = ("before", "within", "after")
PARTS_OF_WORKER = {"drafter", "planning", "part", "by_owner", "exchange", "drafting"}
"""Names of the optional parts, as attributes."""


def optional_calls() -> set[str]:
    """Part and name of all calls through `Boundary.run`."""
    calls = set()
    for path in PLUGIN.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("optional.run", "run")):
                part = node.args[0] if node.args else None
                if ast.unparse(part or node) == "part.part":
                    calls |= {f"{part.part}:{node.args[2].attr}" for part in parts_with(node.args[2].attr)}
                    continue
                if isinstance(part, ast.Constant) and part.value in PARTS:
                    call = node.args[2]
                    name = call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "lambda")
                    calls.add(f"{part.value}:{name}")
                else:
                    assert not ast.unparse(node.func).endswith("optional.run"), f"{path}:{node.lineno}: which part?"
    return calls


def parts_with(method: str) -> list[type[OptionalPart]]:
    """The optional parts that define a method of their interface."""
    for module in pkgutil.iter_modules(optional.__path__, f"{optional.__name__}."):
        importlib.import_module(module.name)
    ours = [part for part in OptionalPart.__subclasses__() if part.__module__.startswith(optional.__name__)]
    return [part for part in {SpeculationMetrics, *ours} if getattr(part, method) is not getattr(OptionalPart, method)]


def direct_calls(path: Path, inside: set[str]) -> set[str]:
    """Function and call for each call of an optional part in a module, except in functions called `inside`."""
    calls = set()
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef) and function.name not in inside:
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and PARTS_OF_WORKER & {*ast.unparse(node.func).split(".")[:-1]}:
                    calls.add(f"{function.name}: {ast.unparse(node.func)}")
    return calls


class Failures:
    """Makes optional calls fail in a server started with `environment`. metrics: its port for them, if separate."""

    def __init__(self, file: Path, metrics: int | None = None) -> None:
        self.file, self.metrics, self._numbers = file, metrics, itertools.count(1)
        file.write_text("")

    @property
    def environment(self) -> dict[str, str]:
        return changed("failures", "hurries") | {"OUTRIDER_TEST_FAILURES": str(self.file)}

    def plant(self, call: str, place: str) -> None:
        self.file.write_text(f"{next(self._numbers)} {call} {place}")

    def of_each(
        self, server: Server, calls: Iterable[str], use: Callable[[], None], places: Sequence[str] = PLACES
    ) -> None:
        """Make each call fail at each place while `use` runs, which asserts that no text changes. The metrics must
        count the failures, and the log name the cause."""
        server.may_fail = True
        for call, place in itertools.product(sorted(calls), places):
            before, lines = self.counted(server), len(server.failures())
            self.plant(call, place)
            use()
            wait_until(lambda: self.counted(server) != before, 20)  # noqa: B023
            self.plant("nothing", "before")
            part, now = call.partition(":")[0], self.counted(server)
            failed = {name: int(now[name] - before[name]) for name in now if now[name] != before[name]}
            assert failed.keys() == {part} or place == "within", failed  # it may be within another part
            said = server.failures()[lines:]
            assert len(said) == sum(min(count, max(PARTS[name], 1)) for name, count in failed.items()), said
            assert all(f"planted {place}" in line and line.split()[0] in failed for line in said), said
            print(f"{call:36} {place:7} failures: {sum(failed.values())}, texts changed: 0")

    def counted(self, server: Server) -> dict[str, float]:
        """Failures so far, by part."""
        page = MetricsPage(f"http://127.0.0.1:{self.metrics or server.port}")
        return {part: page.value("outrider_speculation_failures_total", part=part) for part in PARTS}
