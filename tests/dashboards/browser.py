"""A headless Chromium for tests: no network, console errors and requests are kept."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


def chromium() -> str | None:
    """Return the path of Debian's Chromium, None where it is not installed."""
    return shutil.which("chromium")


@contextmanager
def running_browser() -> Iterator[Any]:
    """Start one browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium(), headless=True, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def browser_page(width: int = 1280) -> Iterator[Any]:
    """Start a browser and open one empty tab."""
    with running_browser() as browser:
        yield browser.new_context(viewport={"width": width, "height": 900}).new_page()
