"""Keep each key's tokens of the day in a file, which survives restarts.

JSON: the day, and tokens by the keys' names. Running requests count with all the tokens that they took, so that killing
the server returns none of them. The file is written every few seconds and at the end; a kill loses the use since the
last write.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock
from pydantic import BaseModel, NonNegativeInt

from outrider.kernels.cache import cache_root
from outrider.storage.replacing import replace

from ...errors import UserError
from ...settings.settings import Settings

if TYPE_CHECKING:
    from .access import Access

logger = logging.getLogger(__name__)

WRITE_SECONDS = 5.0
"""Time between two writes, if something has changed."""
MAX_BYTES = 1 << 22
FIRST_DAY = datetime.date(1970, 1, 1)


class Usage(BaseModel):
    """Content of the file: tokens of a day by the keys' names."""

    day: datetime.date
    tokens: dict[str, NonNegativeInt]


class UsageFile:
    """The file of one server: no other may write to it meanwhile.

    path: made with its folder if missing. Raises UserError if it cannot be read, has another format, or belongs to
    another server.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._failed = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(path.parent / f".{path.name}.lock", mode=0o600)
            self._lock.acquire(timeout=0)
        except TimeoutError:
            raise UserError(
                f"another server keeps its usage in {path}; name a file of its own with --usage-file"
            ) from None
        except OSError as error:
            raise UserError(
                f"cannot write {path}: {error.strerror or error}; name another file with --usage-file"
            ) from None
        self.day, self.used = read(path)  # locked, so that another server has written its last
        self._written: tuple[int, Mapping[str, int]] = self.day, self.used

    @classmethod
    def of(cls, settings: Settings) -> UsageFile | None:
        """Return the settings' file or the default one. None without keys, or, with a warning, if the default fails."""
        if settings.api_keys is None:
            return None
        if settings.usage_file is not None:
            return cls(settings.usage_file)
        try:
            return cls(cache_root() / "usage" / f"{settings.port}.json")
        except UserError as error:
            logger.warning("a restart will forget the keys' usage of today: %s", error)
            return None

    def used_on(self, day: int) -> Mapping[str, int]:
        """Return used tokens by key, for a start on that day. A file from the future counts: the clock was set back."""
        return self.used if self.day >= day else {}

    async def keep(self, access: Access) -> None:
        """Write changes every few seconds until cancelled."""
        while True:
            await asyncio.sleep(WRITE_SECONDS)
            await asyncio.to_thread(self.write, access.used_today())

    def write(self, usage: tuple[int, Mapping[str, int]]) -> None:
        """Write `Access.used_today` if it has changed. Of failures in a row only the first is logged."""
        if usage == self._written:
            return
        day, used = usage
        content = Usage(day=FIRST_DAY + datetime.timedelta(days=day), tokens=dict(used))
        try:
            replace({self.path: content.model_dump_json(indent=1) + "\n"}, mode=0o600)
        except OSError as error:
            if not self._failed:
                logger.error("cannot write %s: %s; a restart would forget it", self.path, error.strerror or error)
            self._failed = True
        else:
            self._written, self._failed = usage, False

    def close(self, access: Access) -> None:
        self.write(access.used_today())
        self._lock.release()


def read(path: Path) -> tuple[int, dict[str, int]]:
    """Return the day, see `token_limits.day_of`, and tokens by name; raises UserError."""
    try:
        with path.open("rb") as file:
            usage = Usage.model_validate_json(file.read(MAX_BYTES), strict=True)
        return (usage.day - FIRST_DAY).days, usage.tokens
    except FileNotFoundError:
        return 0, {}
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise UserError(f"{path} is no file of usage, or damaged; remove it, and today's usage is forgotten") from None
