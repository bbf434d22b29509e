"""File that keeps the texts of `corpora.py` across restarts: a line of JSON, then the tokens of all corpora.

The line has the tokenizer's digest, each corpus's hashed name and number of tokens, and the digest of all tokens.
Tokens are int32, little-endian, with -1 before each text.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from outrider.storage.replacing import replacing

from .corpora import Name

KIND = "outrider lookup texts 1"
MODE = 0o600
Texts = list[tuple[Name, torch.Tensor]]


def write(path: Path, corpora: Iterable[tuple[Name, torch.Tensor]], tokenizer: str) -> None:
    """Replace the file. Raises OSError."""
    texts = list(corpora)
    tokens = b"".join(contents.numpy().astype("<i4").tobytes() for _, contents in texts)
    head = {
        "kind": KIND,
        "tokenizer": tokenizer,
        "corpora": [[*name, len(contents)] for name, contents in texts],
        "sha256": hashlib.sha256(tokens).hexdigest(),
    }
    with replacing(path, MODE, alone=True) as temporary, temporary.open("wb") as file:
        file.write(json.dumps(head).encode() + b"\n" + tokens)


def read(path: Path, tokenizer: str, vocab_size: int) -> Texts:
    """Read the corpora in the order in which they were written; return none where there is no file. Raises OSError, and
    ValueError where the file has another format or tokenizer, or is damaged."""
    try:
        line, _, tokens = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return []
    try:
        head = json.loads(line)
        kind, stored_tokenizer, digest = head["kind"], head["tokenizer"], head["sha256"]
        names = [(Name(str(owner), str(whole)), int(count)) for owner, whole, count in head["corpora"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError("it is no file of texts to look up") from None
    if kind != KIND:
        raise ValueError(f"it is {kind!r}, expected {KIND!r}")
    if stored_tokenizer != tokenizer:
        raise ValueError("its texts are of another model's tokenizer")
    counts = [count for _, count in names]
    if hashlib.sha256(tokens).hexdigest() != digest or min(counts, default=0) < 0 or 4 * sum(counts) != len(tokens):
        raise ValueError("it is damaged")
    each = torch.from_numpy(np.frombuffer(bytearray(tokens), "<i4").astype(np.int32)).split(counts) if counts else ()
    if any(int(part.max()) >= vocab_size or int(part.min()) < -1 for part in each if len(part)):
        raise ValueError(f"it has tokens beyond the vocabulary of {vocab_size}")
    return [(name, part) for (name, _), part in zip(names, each, strict=True)]
