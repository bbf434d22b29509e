"""Profiles on disk: a folder `NAME/` with `profile.json` (fingerprint and measured grid) and `calibration.json`, or
`draft-graphs.json` of a block-diffusion model.

The user's folder is searched first, then the profiles that ship with Outrider.
"""

import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.scheduler.cost.model import StepCost
from outrider.scheduler.cost.prefill import PrefillPoint
from outrider.scheduler.cost.step_times import Point
from outrider.storage.replacing import replace

from .fingerprint import Fingerprint

logger = logging.getLogger(__name__)

SCHEMA = 3
PROFILE = "profile.json"
CALIBRATION = "calibration.json"
GRAPHS = "draft-graphs.json"
SHIPPED = Path(__file__).parent / "shipped"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class ProfileError(ValueError):
    """A profile that cannot be used. The message gives the reason and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The measurements of one engine.

    prefills: measured chunks of prompts; without any, chunks that are served tell instead.
    thorough: False: a quick one, to be refined. measured_at: ISO 8601, UTC. measured_how: the command, for people.
    folder: where it lies; None until it is saved.
    """

    name: str
    fingerprint: Fingerprint
    points: tuple[Point, ...]
    thorough: bool
    measured_at: str
    measured_how: str
    prefills: tuple[PrefillPoint, ...] = ()
    folder: Path | None = None

    @property
    def calibration(self) -> Path | None:
        """Path of the calibration; None where there is none."""
        return self._file(CALIBRATION)

    @property
    def graphs(self) -> Path | None:
        """Path of the draft graphs, see `draft_graphs`; None where there are none."""
        return self._file(GRAPHS)

    def _file(self, name: str) -> Path | None:
        path = self.folder / name if self.folder else None
        return path if path and path.is_file() else None

    def cost(self) -> StepCost:
        """Return a cost model of its own: its drift is not shared."""
        return StepCost(self.points)


def save(
    profile: Profile, root: Path, calibration: dict[str, Any] | None, graphs: list[dict[str, Any]] | None = None
) -> Profile:
    """Write the profile to `root`/NAME/, over one of the same name; the profile with its folder.

    A reader finds an old or a new file, also after a kill. Without `calibration` or `graphs` former ones are removed.
    Raises OSError and then keeps the old files.
    """
    if not NAME.fullmatch(profile.name):
        raise ProfileError(f"a profile's name is letters, digits, dots, dashes and underscores, not {profile.name!r}")
    folder = root / profile.name
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "schema": SCHEMA,
        "thorough": profile.thorough,
        "measured_at": profile.measured_at,
        "measured_how": profile.measured_how,
        "fingerprint": profile.fingerprint.to_json(),
        "points": [point.to_json() for point in profile.points],
        "prefills": [point.to_json() for point in profile.prefills],
    }
    beside: dict[str, Any] = {CALIBRATION: calibration, GRAPHS: graphs}
    files = {folder / name: _json(data) for name, data in beside.items() if data is not None}
    replace(files | {folder / PROFILE: _json(content)})
    for name, data in beside.items():
        if data is None:
            (folder / name).unlink(missing_ok=True)
    return read(folder)


def read(folder: Path) -> Profile:
    """Read the profile in `folder`. Raises ProfileError with the reason if it is damaged."""
    path = folder / PROFILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if (schema := content["schema"]) != SCHEMA:
            raise ValueError(f"it has schema {schema!r}, this version of Outrider reads {SCHEMA}")
        return Profile(
            name=folder.name,
            fingerprint=Fingerprint(**content["fingerprint"]),
            points=StepCost(map(Point.from_json, content["points"])).points,
            thorough=content["thorough"] is True,
            measured_at=str(content["measured_at"]),
            measured_how=str(content["measured_how"]),
            prefills=tuple(map(PrefillPoint.from_json, content["prefills"])),
            folder=folder,
        )
    except FileNotFoundError:
        raise ProfileError(f"{folder} is no profile: it has no {PROFILE}; measure one: outrider tune") from None
    except OSError as error:
        raise ProfileError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise ProfileError(
            f"{path} is damaged ({reason}); delete its folder and measure anew: outrider tune"
        ) from error


def load(wanted: str, here: Fingerprint, roots: Sequence[Path]) -> Profile:
    """Return the profile that the user named, by path or by name in one of `roots`.

    Raises ProfileError with each difference if it was measured on another engine than this one.
    """
    profile = locate(wanted, roots)
    if differ := profile.fingerprint.differences(here):
        raise ProfileError(
            f"profile {profile.name} was measured on another engine and is not used. It has {'; '.join(differ)}. "
            "Measure this one: outrider tune"
        )
    return profile


def locate(wanted: str, roots: Sequence[Path]) -> Profile:
    """Return the profile that the user named, whatever engine it was measured on."""
    path = Path(wanted).expanduser()
    if path.name == PROFILE and path.is_file():
        return read(path.parent)
    if (path / PROFILE).is_file() or (path.is_dir() and not NAME.fullmatch(wanted)):
        return read(path)
    if NAME.fullmatch(wanted):
        for root in roots:
            if (root / wanted).is_dir():
                return read(root / wanted)
    known = sorted({folder.name for root in roots for folder in _folders(root)})
    raise ProfileError(
        f"there is no profile {wanted}; known are {', '.join(known) or 'none'}. Measure one: outrider tune"
    )


def find(here: Fingerprint, roots: Sequence[Path]) -> Profile | None:
    """Return the latest fitting profile of the first root that has one; skip damaged profiles with a warning."""
    for root in roots:
        fitting = [profile for profile in readable(root) if not profile.fingerprint.differences(here)]
        if fitting:
            return max(fitting, key=lambda p: (p.measured_at, p.name))
    return None


def readable(root: Path) -> Iterator[Profile]:
    """Yield all profiles in one of the roots; skip damaged ones with a warning."""
    for folder in _folders(root):
        try:
            yield read(folder)
        except ProfileError as error:
            logger.warning("passed over a profile: %s", error)


def _json(content: Any) -> str:
    return json.dumps(content, indent=1) + "\n"


def _folders(root: Path) -> list[Path]:
    return sorted(path.parent for path in root.glob(f"*/{PROFILE}"))
