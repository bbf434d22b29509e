"""Load tests of small servers in this process."""

import psutil
import pytest


@pytest.fixture
def childless(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small server runs in this process, whose children are other tests' servers: none of them is its own, and to
    measure their memory takes seconds."""
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive=False: [])
