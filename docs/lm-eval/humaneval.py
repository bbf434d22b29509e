"""Tests whether an answer's function passes its tests: pass@1 of HumanEval, for lm-eval (`humaneval.yaml`).

The program runs in its own process, in an empty folder, with little memory, a few seconds, and no file that it may
write to. It can still read its user's files: run lm-eval where that does no harm.
"""

import re
import resource
import subprocess
import sys
import tempfile
from typing import Any

SECONDS, BYTES = 5, 1 << 29
PASSED = 77
"""Exit status after the tests: a program that ends itself earlier does not have it."""
CODE = re.compile(r"```(?:python)?\n(.*?)(?:```|\Z)", re.DOTALL)


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    return {"pass@1": float(passes(program(doc, results[0])))}


def program(doc: dict[str, Any], answer: str) -> str:
    """Return the problem's own beginning, for its imports, the answer's first block of code, and the tests."""
    fenced = CODE.search(answer)
    code = fenced.group(1) if fenced else answer
    end = f"check({doc['entry_point']})\nraise SystemExit({PASSED})\n"
    return "\n\n".join((doc["prompt"] + "\n    pass", code, doc["test"], end))


def passes(source: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-"], input=source, text=True, cwd=folder, env={}, preexec_fn=_limit,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=2 * SECONDS,
            )  # fmt: skip
        except (subprocess.TimeoutExpired, UnicodeEncodeError):
            return False
    return done.returncode == PASSED


def _limit() -> None:
    limits = {resource.RLIMIT_CPU: SECONDS, resource.RLIMIT_AS: BYTES, resource.RLIMIT_FSIZE: 0}
    for what, most in limits.items():
        resource.setrlimit(what, (most, most))
