"""Records that `--json` wrote."""

import json
from pathlib import Path
from typing import Any

from outrider.server.errors import UserError


def read_record(path: Path) -> dict[str, Any]:
    """Read a record; raises UserError for other files."""
    try:
        found: Any = json.loads(path.read_text())
        missing = {"question", "command", "date", "versions", "machine", "weights", "results"} - found.keys()
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is no record of `outrider bench --json`: {error}") from None
    if missing:
        raise UserError(f"{path} is no record of `outrider bench --json`: it lacks {', '.join(sorted(missing))}")
    return dict(found)
