#!/usr/bin/env python3
"""Words that make English hard to read, per 1,000 words of docstrings and comments, against limits.

    .ci/plain.py              print folders above a limit, exit 1 if there are any
    .ci/plain.py --worst 30   print the sentences with most of these words

A word is right in places; the rate shows a habit. Write the sentence anew instead of replacing the word.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMITS = {
    "what": 0.6, "those": 0.8, "whose": 0.5, "behind": 0.4, "beside": 0.3, "nothing": 0.6, "nobody": 0.2,
    "so many": 0.1, "asked": 0.5, "told": 0.2, "theirs": 0.1, "others": 0.5, "stand": 0.3, "stands": 0.3,
}  # fmt: skip
"""Three times the rates of other projects of this field, such as mini-sglang."""
FEWEST = 150
"""Words of a folder that is judged; below, a single word would be a habit."""
LEAST_HITS = 2.5
"""Hits that any folder may have."""


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring and comment."""
    source = path.read_text()
    if path.suffix != ".py":
        for comment in re.finditer(r"(?:^[ \t]*//[^\n]*\n)+|/\*.*?\*/", source, re.MULTILINE | re.DOTALL):
            yield source.count("\n", 0, comment.start()) + 1, re.sub(r"//+|/?\*+/?", " ", comment.group())
        return
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def hits(text: str) -> Counter[str]:
    return Counter({word: len(re.findall(rf"\b{word}\b", text, re.IGNORECASE)) for word in LIMITS})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="print N sentences, the worst first")
    args = parser.parse_args()
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    words, counts, sentences = Counter[str](), defaultdict[str, Counter[str]](Counter), list[tuple[int, str]]()
    for name in tracked:
        if not name.endswith((".py", ".cpp", ".h", ".js")) or "vendor" in name:
            continue
        folder = "/".join(name.split("/")[:-1][:2])
        for line, text in texts(ROOT / name):
            words[folder] += len(text.split())
            counts[folder] += hits(text)
            for sentence in re.split(r"(?<=[.!?:;])\s+", text):
                sentences.append((hits(sentence).total(), f"{name}:{line}: {' '.join(sentence.split())[:200]}"))
    if args.worst:
        print(*(text for count, text in sorted(sentences, reverse=True)[: args.worst] if count), sep="\n")
        return 0
    excesses = [
        f"{folder}: {count} × {word!r} in {words[folder]} words, at most {most:.0f}"
        for folder in sorted(words)
        if words[folder] >= FEWEST
        for word, count in counts[folder].items()
        if count > (most := max(LIMITS[word] * words[folder] / 1000, LEAST_HITS))
    ]
    print(*excesses, sep="\n", end="\n" if excesses else "")
    if excesses:
        print("write these sentences anew: .ci/plain.py --worst 30")
    return bool(excesses)


if __name__ == "__main__":
    sys.exit(main())
