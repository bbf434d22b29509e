"""The file of API keys and their limits.

TOML, one table per key, by the name that logs and metrics use:

  [team-a]
  sha256 = "…"                   # of the key; `outrider key` makes both
  rate = "600/minute"            # requests to the model, per second, minute or hour
  concurrency = 8                # choices at the same time: n times prompts, of all requests together
  tokens_per_minute = 100000     # of prompts and answers together, cached prompt tokens too
  tokens_per_day = 5000000       # the same; days begin at midnight UTC
  max_tokens_per_request = 8192  # the same, of one request
  admin = true                   # may also measure the server
  learn = false                  # its answers are not kept for the drafter to learn from

A missing limit does not apply; `admin` is false by default, `learn` true. The file does not hold the keys themselves:
they are random, so nobody can search for a key with a given plain hash.
"""

import contextlib
import hashlib
import hmac
import os
import re
import reprlib
import secrets
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from filelock import AcquireReturnProxy, FileLock

from outrider.storage.replacing import replace

from ...errors import UserError

PREFIX = "or-"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
SHA256 = re.compile(r"[0-9a-f]{64}")
RATE = re.compile(r"([1-9][0-9]{0,8})/(second|minute|hour)")
SECONDS = {"second": 1, "minute": 60, "hour": 3600}
NUMBERS = {
    "concurrency": "choices",
    "tokens_per_minute": "tokens",
    "tokens_per_day": "tokens",
    "max_tokens_per_request": "tokens",
}
"""Limits that are numbers, with their units."""
MOST = 10**15
"""Largest such number."""
FIELDS = ("sha256", "rate", *NUMBERS, "admin", "learn")
MAX_BYTES = 1 << 20
"""Largest file of keys: some ten thousand."""
LOCK_SECONDS = 10.0
"""Time for which a command waits for another one that writes to the same file."""


class BadKeys(UserError):
    """An unusable file of keys. The message gives the place and the reason."""


@dataclass(frozen=True, slots=True)
class RequestRate:
    """Limit on requests in any window of `seconds`."""

    requests: int
    seconds: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse "600/minute"; raises ValueError."""
        match = RATE.fullmatch(text)
        if match is None:
            raise ValueError(f"a rate is a number per second, minute or hour, like 600/minute, not {text!r}")
        return cls(int(match[1]), SECONDS[match[2]])

    def __str__(self) -> str:
        return f"{self.requests}/{next(name for name, seconds in SECONDS.items() if seconds == self.seconds)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """digest: SHA-256 of the key. The limits are as in the file; None is without limit."""

    name: str
    digest: bytes
    rate: RequestRate | None = None
    concurrency: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    max_tokens_per_request: int | None = None
    admin: bool = False
    learn: bool = True

    def is_key(self, digest: bytes) -> bool:
        """Compare in constant time, so that timing reveals nothing about the key."""
        return hmac.compare_digest(self.digest, digest)


def digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def new() -> str:
    """Return a key: 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def read(path: Path) -> tuple[Key, ...]:
    """Return the keys of a file. Raises BadKeys for anything else."""
    try:
        tables = tomllib.loads(_content(path).decode("utf-8"))
    except OSError as error:
        raise BadKeys(f"the file of API keys {path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # no TOML, no UTF-8, or a number of thousands of digits
        raise BadKeys(f"{path} is not TOML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise BadKeys(f"{path} is not TOML of keys: it is nested too deeply") from None
    if not tables:
        raise BadKeys(f"{path} holds no keys; add one: outrider key NAME --api-keys {path}")
    keys = tuple(_key(path, name, table) for name, table in tables.items())
    if len({key.digest for key in keys}) < len(keys):
        raise BadKeys(f"two keys of {path} have the same sha256")
    return keys


def _content(path: Path) -> bytes:
    """Read the file without waiting for a pipe. Raises OSError, or BadKeys if it is no file or too large."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise BadKeys(f"the file of API keys {path} is not a file")
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise BadKeys(f"{path} is larger than {MAX_BYTES} bytes, too large for a file of API keys")
    return content


def add(path: Path, key: Key) -> None:
    """Add a key to the file, or make the file; replaces it atomically. Raises BadKeys, and UserError."""
    if not NAME.fullmatch(key.name):
        raise UserError(f"a key's name is up to 64 letters, digits, dashes and underscores, not {key.name!r}")
    with _locked(path):
        before = _content(path).decode("utf-8", errors="replace") if path.exists() else ""
        if before.strip() and any(known.name == key.name for known in read(path)):
            raise UserError(
                f"{path} has a key {key.name} already; remove it (outrider key {key.name} --api-keys {path} --remove), "
                "or choose another name"
            )
        lines = [f"[{key.name}]", f'sha256 = "{key.digest.hex()}"']
        lines += [f'rate = "{key.rate}"'] if key.rate else []
        lines += [f"{name} = {value}" for name in NUMBERS if (value := getattr(key, name)) is not None]
        lines += ["admin = true"] if key.admin else []
        lines += [] if key.learn else ["learn = false"]
        text = f"{before.rstrip()}\n\n" if before.strip() else ""
        _replace(path, text + "\n".join(lines) + "\n")


def remove(path: Path, name: str) -> None:
    """Remove the key's table from the file and leave the rest as it is. Raises BadKeys, and UserError."""
    with _locked(path):
        known = [key.name for key in read(path)]
        if name not in known:
            raise UserError(f"{path} has no key {name}; it has {', '.join(known)}")
        if known == [name]:
            raise UserError(
                f"{name} is the only key of {path}, and a server goes on with the keys it had where a file has none; "
                "add another one first, or stop the server and delete the file"
            )
        before = _content(path).decode("utf-8")
        after = _without(before, name)
        left = tomllib.loads(before)
        del left[name]
        if tomllib.loads(after) != left:
            raise UserError(f"key {name} is not written as `outrider key` does; remove it from {path} by hand")
        _replace(path, after)


def _without(text: str, name: str) -> str:
    """Return the text without the table [name]. Comments after its last field stay: they are the next table's."""
    kept: list[str] = []
    inside, rest = False, 0
    for line in text.splitlines(keepends=True):
        content = line.strip()
        if content.startswith("["):
            inside = re.match(rf"\[\s*[\"']?{re.escape(name)}[\"']?\s*\]", content) is not None
            rest = len(kept)
        elif inside and content and not content.startswith("#"):
            del kept[rest:]  # comments between its fields
            continue
        if not (inside and content.startswith("[")):
            kept.append(line)
    return "".join(kept).lstrip("\n")


def _locked(path: Path) -> AcquireReturnProxy:
    """Return the file's lock for a `with`, so that two commands at once see each other's changes."""
    try:
        return FileLock(path.parent / f".{path.name}.lock", timeout=LOCK_SECONDS, mode=0o600).acquire()
    except TimeoutError:
        raise UserError(f"another command has been writing to {path} for {LOCK_SECONDS:g} seconds") from None
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None


def _replace(path: Path, text: str) -> None:
    target = path.resolve()  # a link to the file stays one
    try:
        before = target.stat() if target.exists() else None
        replace({target: text}, mode=before.st_mode & 0o777 if before else 0o600)
        if before is not None:
            with contextlib.suppress(PermissionError):
                os.chown(target, before.st_uid, before.st_gid)  # else the server could not read what root has written
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None


def _shown(value: Any) -> str:
    """Return a value in short form, for a message."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python writes no numbers of thousands of digits
        return "one of thousands of digits"


def _key(path: Path, name: str, table: Any) -> Key:
    def wrong(field: str, expected: str) -> BadKeys:
        return BadKeys(f"{path}: {field} of key {name} is {expected}, not {_shown(table[field])}")

    if not isinstance(table, Mapping):
        raise BadKeys(f"{path}: {name} is no table; a key begins with a line [{name}]")
    if not NAME.fullmatch(name):
        raise BadKeys(f"{path}: a key's name is up to 64 letters, digits, dashes and underscores, not {_shown(name)}")
    if unknown := [field for field in table if field not in FIELDS]:
        raise BadKeys(f"{path}: key {name} has {_shown(unknown[0])}; known are {', '.join(FIELDS)}")
    if "sha256" not in table:
        raise BadKeys(f"{path}: key {name} lacks sha256; make a key: outrider key NAME --api-keys {path}")
    if not isinstance(table["sha256"], str) or not SHA256.fullmatch(table["sha256"]):
        raise BadKeys(f"{path}: sha256 of key {name} is not 64 hexadecimal digits in lower case")
    rate, flags = table.get("rate"), {"admin": table.get("admin", False), "learn": table.get("learn", True)}
    if rate is not None:
        try:
            rate = RequestRate.parse(str(rate))
        except ValueError:
            raise wrong("rate", 'a number per second, minute or hour, like "600/minute"') from None
    numbers: dict[str, Any] = {field: table.get(field) for field in NUMBERS}
    for field, number in numbers.items():
        if number is not None and not (type(number) is int and 1 <= number <= MOST):
            raise wrong(field, f"a number of {NUMBERS[field]} from 1 on")
    for field, flag in flags.items():
        if not isinstance(flag, bool):
            raise wrong(field, "true or false")
    return Key(name=name, digest=bytes.fromhex(table["sha256"]), rate=rate, **flags, **numbers)
