import contextlib
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

expect.set_options(timeout=60_000)  # milliseconds


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A headless browser, or a skipped test. While it is open, `asyncio.run` fails in this thread."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("no chromium here; on Debian: apt-get install chromium")
    with sync_playwright() as playwright:
        # Root may have no sandbox.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
