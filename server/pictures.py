"""A blank figure to draw on, saved as a file.

`plot_…` functions elsewhere draw on the figure; only this module needs matplotlib, which is optional.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def available() -> bool:
    """Return True if matplotlib is installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def require(flag: str) -> None:
    """Raise UserError if matplotlib is missing for the picture of `flag`. Call it before a long measurement."""
    if not available():
        raise UserError(f"{flag} needs matplotlib: pip install matplotlib, or leave {flag} out")


@contextmanager
def figure(path: Path) -> Iterator[Figure]:
    """Yield a blank figure, saved to `path` when the block ends, in the format of its suffix (PNG without one).

    The same drawing gives the same SVG.
    """
    import matplotlib
    from matplotlib.figure import Figure

    blank = Figure(layout="tight")
    yield blank
    with matplotlib.rc_context({"svg.hashsalt": "outrider", "svg.fonttype": "none"}):
        blank.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
