"""Pages of golden bundles, and one browser for all tests of the page."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "profiler"))  # the golden bundles' builder

import golden
from browser import chromium, running_browser

from alphamoe_dashboards.build import build
from alphamoe_dashboards.page_data import read_page


@pytest.fixture(scope="session")
def golden_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound run of four ranks and three executions."""
    return golden.build(tmp_path_factory.mktemp("bundles") / "golden-run")


@pytest.fixture(scope="session")
def golden_page(golden_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the golden run."""
    return build([golden_run], tmp_path_factory.mktemp("pages") / "golden.html")[0]


@pytest.fixture(scope="session")
def golden_data(golden_page: Path) -> dict[str, Any]:
    """What is inside the golden page, unpacked as the page does it."""
    return read_page(golden_page.read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One headless Chromium for the session."""
    if chromium() is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed: it is in the dev extra")
    with running_browser() as running:
        yield running


Opener = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any) -> Iterator[Opener]:
    """Open a page; when the test ends there must have been no console error and no request beyond the file."""
    contexts, troubles = [], []

    def told(message: Any) -> None:
        if message.type == "error":
            troubles.append(f"console: {message.text}")

    def asked(request: Any) -> None:
        if not request.url.startswith(("file:", "data:", "blob:")):
            troubles.append(f"request: {request.url}")

    def opened(path: Path, fragment: str = "", width: int = 1280, scheme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        tab = context.new_page()
        tab.set_default_timeout(20_000)
        tab.on("console", told)
        tab.on("pageerror", lambda error: troubles.append(f"error: {error}"))
        tab.on("request", asked)
        tab.on("dialog", lambda dialog: troubles.append(f"dialog: {dialog.message}"))
        tab.goto(f"{path.as_uri()}{fragment}")
        tab.wait_for_function("document.documentElement.dataset.renders > 0")
        return tab

    yield opened
    for context in contexts:
        context.close()
    assert not troubles
