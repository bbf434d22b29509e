"""Sessions of a coding agent, for `outrider bench load --concurrency 1 --count 10 --arms planned across`.

    python tests/measure/sessions.py --out sessions.jsonl

Each session has ten turns. A turn is one prompt: a file, a tool's answer, a task. A session's two files, each with its
task, and two tool answers recur; prompts differ, since each states its turn.
"""

import argparse
import json
import random
from pathlib import Path

TURNS = 10
NOUNS = ["order", "parcel", "ticket", "invoice", "booking", "sensor", "player", "recipe", "account", "shift"]
VERBS = ["load", "count", "merge", "filter", "rename", "archive", "price", "split", "check", "group"]
FIELDS = ["name", "city", "status", "total", "weight", "owner", "date", "score"]
TASKS = (
    "Explain what this file does, function by function.",
    "Say why the tool's answer looks as it does, and what you would do next.",
    "Write a test for each function of this file.",
)


def session(rng: random.Random) -> list[str]:
    """Return the prompts of one session."""
    files = [module(rng, noun) for noun in rng.sample(NOUNS, 2)]
    answers, tasks = [report(rng) for _ in range(2)], rng.sample(TASKS, 2)
    return [
        f"Turn {turn + 1} of {TURNS}. You are an agent that works on this file:\n```python\n{files[turn % 2]}```\n"
        f"The tool answered:\n{answers[turn // 2 % 2]}\n{tasks[turn % 2]}"
        for turn in range(TURNS)
    ]


def module(rng: random.Random, noun: str) -> str:
    """Return a small file of three functions."""
    functions = []
    for verb, field in zip(rng.sample(VERBS, 3), rng.sample(FIELDS, 3), strict=True):
        functions.append(
            f"def {verb}_{noun}s({noun}s, {field}):\n"
            f'    """{verb.capitalize()} the {noun}s whose {field} is the one given."""\n'
            f'    found = [{noun} for {noun} in {noun}s if {noun}["{field}"] == {field}]\n'
            f"    return {rng.choice(['found', 'len(found)', 'sorted(found, key=str)'])}\n"
        )
    return "\n\n".join(functions)


def report(rng: random.Random) -> str:
    """Return the end of a run of tests."""
    failed, passed = rng.randint(1, 4), rng.randint(5, 90)
    lines = [f"FAILED tests/test_{rng.choice(NOUNS)}.py::test_{rng.choice(VERBS)} - KeyError" for _ in range(failed)]
    return "\n".join([*lines, f"{failed} failed, {passed} passed in {rng.randint(10, 990) / 100:.2f}s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--sessions", type=int, default=20, help="sessions of ten turns (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    prompts = [prompt for _ in range(args.sessions) for prompt in session(rng)]
    args.out.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


if __name__ == "__main__":
    main()
