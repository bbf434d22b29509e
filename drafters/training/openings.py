"""First words of the prompts that a target writes itself.

A target that is left alone asks about few things, and a drafter learns few. A phrase and a word drawn from the
vocabulary lead it elsewhere every time.
"""

from __future__ import annotations

import random
import re
from importlib import resources
from typing import Any

WORD = re.compile("[Ġ▁]([a-z]{5,12})")
"""A word of the vocabulary, behind either sign for a space."""


def drawn_openings(tokenizer: Any, count: int, seed: int) -> list[str]:
    """`count` openings, "" for none among them: phrases of openings.txt, a random word in place of a final "…"."""
    phrases = ["", *resources.files(__package__).joinpath("openings.txt").read_text("utf-8").splitlines()]
    words = sorted(found[1] for token in tokenizer.get_vocab() if (found := WORD.fullmatch(token)))
    draw = random.Random(seed)
    return [draw.choice(phrases).replace("…", draw.choice(words or [""])).strip() for _ in range(count)]
