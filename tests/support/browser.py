"""Debian's Chromium, driven by Playwright."""

import contextlib
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

expect.set_options(timeout=60_000)  # milliseconds: other work runs beside the tests


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A browser without a window; the test is skipped where none is installed.

    While it is open Playwright's event loop runs in this thread, where `asyncio.run` then fails.
    """
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("no chromium here; on Debian: apt-get install chromium")
    with sync_playwright() as playwright:
        # Without its sandbox, which root may not have.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
