"""Names on the Hugging Face hub, and its errors."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.profiles.fingerprint import WEIGHT_FILES

from ..errors import UserError

NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@contextmanager
def hub_errors(name: str, flag: str) -> Iterator[None]:
    """Turn errors of a hub download into a UserError of one line. flag: the flag that has the value `name`."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    missing = f"there is no folder {name!r}, and as a name on the Hugging Face hub"
    try:
        yield
    except GatedRepoError:
        raise UserError(f"model {name} is gated: accept its terms on the hub and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise UserError(f"{missing} it is not known either (if it is private, set HF_TOKEN)") from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        why = "HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") else "the hub cannot be reached"
        raise UserError(f"{missing} it is not in the local cache, and {why}; give {flag} a folder") from None
    except (HfHubHTTPError, OSError) as error:
        raise UserError(f"{missing} it cannot be loaded: {str(error).splitlines()[0]}") from None


def cached(name: str) -> Path | None:
    """Return the folder of a repository in the local cache, if its weights are there. Uses no network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    return folder if any(next(folder.glob(pattern), None) for pattern in WEIGHT_FILES) else None
