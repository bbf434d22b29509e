"""Load tests of small servers in this process."""

import psutil
import pytest


@pytest.fixture
def childless(monkeypatch: pytest.MonkeyPatch) -> None:
    """The children here are other tests' servers, and measuring their memory takes seconds."""
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive=False: [])
