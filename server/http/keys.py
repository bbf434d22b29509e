"""API keys in a file: who may ask, how often, and how much at a time.

TOML, one table per key, by the name that stands for it in logs and metrics:

  [team-a]
  sha256 = "…"           # of the key; `outrider key` makes both
  rate = "600/minute"    # requests to the model, per second, minute or hour; without: any number
  concurrency = 8        # requests at the same time; without: any number
  admin = true           # may also measure the server; without: may not

The keys themselves are in no file. They are random, so a plain hash of them cannot be searched.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.server.errors import UserError

PREFIX = "or-"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
SHA256 = re.compile(r"[0-9a-f]{64}")
RATE = re.compile(r"([1-9][0-9]{0,8})/(second|minute|hour)")
SECONDS = {"second": 1, "minute": 60, "hour": 3600}
FIELDS = ("sha256", "rate", "concurrency", "admin")


class BadKeys(UserError):
    """A file of keys that cannot be used; the message says where and why."""


@dataclass(frozen=True, slots=True)
class Rate:
    """So many requests in any stretch of so many seconds."""

    requests: int
    seconds: int

    @classmethod
    def parse(cls, text: str) -> Rate:
        """Of "600/minute"; raises ValueError."""
        found = RATE.fullmatch(text)
        if found is None:
            raise ValueError(f"a rate is a number per second, minute or hour, like 600/minute, not {text!r}")
        return cls(int(found[1]), SECONDS[found[2]])

    def __str__(self) -> str:
        return f"{self.requests}/{next(name for name, seconds in SECONDS.items() if seconds == self.seconds)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """digest: SHA-256 of the key. rate, concurrency: None is without limit."""

    name: str
    digest: bytes
    rate: Rate | None = None
    concurrency: int | None = None
    admin: bool = False

    def is_key(self, digest: bytes) -> bool:
        """In constant time, so that a wrong key tells nothing about the right one."""
        return hmac.compare_digest(self.digest, digest)


def digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def new() -> str:
    """A key: 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def read(path: Path) -> tuple[Key, ...]:
    """The keys of a file; raises BadKeys."""
    try:
        with path.open("rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        raise BadKeys(f"the file of API keys {path} cannot be read: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadKeys(f"{path} is not TOML: {error}") from None
    if not tables:
        raise BadKeys(f"{path} holds no keys; add one: outrider key NAME --api-keys {path}")
    found = tuple(_key(path, name, table) for name, table in tables.items())
    if len({key.digest for key in found}) < len(found):
        raise BadKeys(f"two keys of {path} have the same sha256")
    return found


def add(path: Path, key: Key) -> None:
    """Add a key to the file, which need not exist; it is replaced at once. Raises BadKeys, and UserError."""
    if not NAME.fullmatch(key.name):
        raise UserError(f"a key's name is up to 64 letters, digits, dashes and underscores, not {key.name!r}")
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    if before.strip() and any(other.name == key.name for other in read(path)):
        raise UserError(f"{path} has a key {key.name} already; remove its table there, or choose another name")
    lines = [f"[{key.name}]", f'sha256 = "{key.digest.hex()}"']
    lines += [f'rate = "{key.rate}"'] if key.rate else []
    lines += [f"concurrency = {key.concurrency}"] if key.concurrency else []
    lines += ["admin = true"] if key.admin else []
    text = f"{before.rstrip()}\n\n" if before.strip() else ""
    try:
        _replace(path, text + "\n".join(lines) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None


def _replace(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # for this user alone
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            if path.exists():
                os.fchmod(file.fileno(), path.stat().st_mode & 0o777)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _key(path: Path, name: str, table: Any) -> Key:
    def wrong(field: str, expected: str) -> BadKeys:
        return BadKeys(f"{path}: {field} of key {name} is {expected}, not {table[field]!r}")

    if not isinstance(table, Mapping):
        raise BadKeys(f"{path}: {name} is no table; a key begins with a line [{name}]")
    if not NAME.fullmatch(name):
        raise BadKeys(f"{path}: a key's name is up to 64 letters, digits, dashes and underscores, not {name!r}")
    if unknown := [field for field in table if field not in FIELDS]:
        raise BadKeys(f"{path}: key {name} has {unknown[0]!r}; known are {', '.join(FIELDS)}")
    if "sha256" not in table:
        raise BadKeys(f"{path}: key {name} lacks sha256; make a key: outrider key NAME --api-keys {path}")
    if not isinstance(table["sha256"], str) or not SHA256.fullmatch(table["sha256"]):
        raise BadKeys(f"{path}: sha256 of key {name} is not 64 hexadecimal digits in lower case")
    rate, concurrency, admin = table.get("rate"), table.get("concurrency"), table.get("admin", False)
    if rate is not None:
        try:
            rate = Rate.parse(str(rate))
        except ValueError:
            raise wrong("rate", 'a number per second, minute or hour, like "600/minute"') from None
    if concurrency is not None and (type(concurrency) is not int or concurrency < 1):
        raise wrong("concurrency", "a number of requests from 1 on")
    if not isinstance(admin, bool):
        raise wrong("admin", "true or false")
    return Key(name=name, digest=bytes.fromhex(table["sha256"]), rate=rate, concurrency=concurrency, admin=admin)
