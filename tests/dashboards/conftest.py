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
RESET = """fragment => {
    history.replaceState(null, "", fragment || "#");
    AMT.MAX_MARKS = 3000;
    dispatchEvent(new HashChangeEvent("hashchange"));
    scrollTo(0, 0);
}"""


class Tabs:
    """Open tabs by page, width and colour scheme, and what went wrong in any of them."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser
        self.troubles: list[str] = []
        self.kept: dict[Path, Any] = {}
        self.contexts: list[Any] = []

    def open(self, path: Path, fragment: str = "", width: int = 1280, scheme: str = "light", keep: bool = False) -> Any:
        """Open a page; a kept one is only given another fragment, which loads nothing again."""
        if path in self.kept and keep:
            self.kept[path].evaluate(RESET, fragment)
            return self.kept[path]
        context = self.browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        tab = context.new_page()
        tab.set_default_timeout(20_000)
        tab.on("console", lambda message: self._trouble(message.type == "error", f"console: {message.text}"))
        tab.on("pageerror", lambda error: self._trouble(True, f"error: {error}"))
        tab.on("dialog", lambda dialog: self._trouble(True, f"dialog: {dialog.message}"))
        tab.on("request", lambda asked: self._trouble(not asked.url.startswith(LOCAL), f"request: {asked.url}"))
        tab.goto(f"{path.as_uri()}{fragment}")
        tab.wait_for_function("document.documentElement.dataset.renders > 0")
        if keep:
            self.kept[path] = tab
        else:
            self.contexts.append(context)
        return tab

    def _trouble(self, is_one: bool, text: str) -> None:
        if is_one:
            self.troubles.append(text)


LOCAL = ("file:", "data:", "blob:")


@pytest.fixture(scope="session")
def tabs(browser: Any) -> Tabs:
    """Tabs of the session."""
    return Tabs(browser)


@pytest.fixture
def open_page(tabs: Tabs, golden_page: Path) -> Iterator[Opener]:
    """Open a page; when the test ends there must have been no console error and no request beyond the file."""

    def opened(path: Path, fragment: str = "", width: int = 1280, scheme: str = "light", fresh: bool = False) -> Any:
        keep = path == golden_page and (width, scheme, fresh) == (1280, "light", False)
        return tabs.open(path, fragment, width, scheme, keep)

    yield opened
    for context in tabs.contexts:
        context.close()
    tabs.contexts.clear()
    troubles, tabs.troubles = tabs.troubles, []
    assert not troubles
