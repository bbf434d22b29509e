"""The file of `--lookup-store`, checked before anything slow begins."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

from outrider.drafters import corpora_file

from ..errors import UserError

if TYPE_CHECKING:
    from ..model.target import Model
    from .settings import Settings

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json")


def with_lookup_store(settings: Settings, model: Model) -> Settings:
    """Return settings with the digest of the tokenizer; raises UserError where the file cannot be used."""
    if settings.lookup_store is None:
        return settings
    if not settings.looks_across:
        raise UserError("--lookup-store keeps the texts of --lookup-across, which is off here; leave it out")
    path, tokenizer = settings.lookup_store.expanduser().absolute(), tokenizer_digest(model)
    try:
        corpora_file.read(path, tokenizer, int(model.config["vocab_size"]))
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--lookup-store {path} cannot be used: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"--lookup-store {path}: {error}; remove it, or name another file") from None
    return replace(settings, lookup_store=path, lookup_tokenizer=tokenizer)


def tokenizer_digest(model: Model) -> str:
    """Return 16 hex digits that identify a model's tokenizer: of its files, or of the model's name without files."""
    digest = hashlib.sha256(str(model.config.get("vocab_size")).encode())
    files = [] if model.folder is None else [model.folder / name for name in TOKENIZER_FILES]
    present = [file for file in files if file.is_file()]
    digest.update(b"" if present else model.name.encode())
    for file in present:
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]
