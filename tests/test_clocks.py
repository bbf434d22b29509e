"""The wall clock jumps, so no code waits, limits, or measures by it."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("drafters", "kernels", "profiles", "scheduler", "server", "storage")
WALL = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "datetime.datetime.now"}
SAYS_WHEN = {
    "drafters/learning/answers.py",
    "drafters/learning/progress.py",
    "server/bench/record.py",
    "server/http/learning.py",
    "server/http/answers/responses.py",
    "server/http/routes/openai.py",
    "server/http/keys/token_limits.py",
    "server/tune/result.py",
}
"""Files that may read the wall clock, for timestamps."""


def uses(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in WALL:
            yield ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (f"time.{alias.name}" for alias in node.names if f"time.{alias.name}" in WALL)


def test_the_wall_clock_is_read_for_timestamps_only() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    readers = {str(path.relative_to(ROOT)) for path in files if any(uses(path))}
    assert readers == SAYS_WHEN
