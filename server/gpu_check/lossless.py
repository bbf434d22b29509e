"""Part C: `tests/lossless` on servers on this device, in float32, and that servers overlap steps and run graphs.

The tests are the repository's own; what they ask of a server is the same on a CPU.
"""

from __future__ import annotations

import re
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from ..errors import UserError
from .commands import PROMPTS, Commands
from .report import Measured

TESTS = Path("tests/lossless")
PASSES = re.compile(r'^sglang:cuda_graph_passes_total\{[^}]*mode="([a-z_]+)"[^}]*\} (\S+)', re.MULTILINE)
OVERLAPS = re.compile(r"disable_overlap_schedule'?(=|: )False")
"""In the log, of SGLang 0.5.17 and 0.5.21."""


@dataclass(frozen=True, slots=True)
class Tests:
    """Those of a file whose names pytest's -k chooses; tiny: of these, to try the step."""

    file: str
    chosen: str
    tiny: str

    def __call__(self, commands: Commands) -> Iterator[Measured]:
        if not (TESTS / self.file).is_file():
            raise UserError(f"{TESTS / self.file} is not here: part C runs in a checkout of the repository")
        name = f"{Path(self.file).stem}-{re.sub('[^a-z]+', '-', self.chosen)}"
        found = commands.folder / f"{name}.xml"
        found.unlink(missing_ok=True)
        choice = self.tiny if commands.tiny else self.chosen
        overlap = ["--overlap"] if commands.device.on.type == "cpu" else []  # elsewhere servers do by themselves
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS / self.file), *overlap]
        code = commands.run(name, [*command, "-k", choice, "--junitxml", str(found)])
        if code not in (0, 1):
            raise UserError(f"pytest ended with {code}: {commands.last_line(name)}")
        yield from outcomes(found)


def outcomes(path: Path) -> Iterator[Measured]:
    """Of a JUnit file: how many tests ran and failed, and which."""
    suite = next(ElementTree.parse(path).iter("testsuite"))
    tests, skipped, *bad = (int(suite.get(key, 0)) for key in ("tests", "skipped", "failures", "errors"))
    yield Measured("tests", tests - skipped, f"ran in {float(suite.get('time', 0)):.0f} s", at_least=1)
    yield Measured("tests", sum(bad), "failed", at_most=0)
    for case in suite.iter("testcase"):
        if any(case.find(kind) is not None for kind in ("failure", "error")):
            yield Measured(str(case.get("name")), 1, "failed", at_most=0)


greedy = Tests("test_greedy.py", "fifty_prompts or share_a_batch or too_small or end_with_the_context", "as_likely")
planned = Tests("test_greedy.py", "planned or denoising", "as_likely")
rules = Tests("test_greedy.py", "every_rule or logprobs or as_likely", "logprobs")
sampled = Tests("test_sampled.py", "exact_distribution or learnt or logprobs", "without_a_seed")
seeds = Tests("test_sampled.py", "seed or retraction", "choices_of_one")
CHECKS: tuple[Callable[[Commands], Iterator[Measured]], ...] = (greedy, planned, rules, sampled, seeds)


def running(commands: Commands) -> Iterator[Measured]:
    """A server as `outrider serve` starts it: its steps overlap, and verifications run as graphs."""
    small = ["--max-total-tokens", "4096"] if commands.tiny else []
    count, tokens = ("2", "8") if commands.tiny else ("32", "128")
    with commands.server("running", "--log-level", "info", *small) as url:
        load = ["--prompts", str(PROMPTS), "--concurrency", count, "--seconds", "2" if commands.tiny else "15"]
        commands.outrider("asked", "bench", "load", "--url", url, *load, "--warm-up", "1", "--new-tokens", tokens)
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
            passes = PASSES.findall(answer.read().decode())
    log = (commands.folder / "running.log").read_text(errors="replace")
    on_gpu = commands.device.on.type == "cuda"  # on a CPU neither is there
    yield Measured("overlap", float(bool(OVERLAPS.search(log))), "of 1 is on", at_least=1 if on_gpu else None)
    graphs = sum(float(value) for mode, value in passes if mode == "decode_cuda_graph")
    plain = sum(float(value) for mode, value in passes if mode == "decode_none")
    yield Measured("decode steps as graphs", graphs, f"beside {plain:.0f} others", at_least=1 if on_gpu else None)
