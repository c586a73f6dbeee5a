"""A headless Chromium of this machine, for the tests and the pictures of the status page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SIZE = {"width": 1280, "height": 900}


def missing() -> str:
    """What there must be for a browser and is not, as a sentence; empty if nothing is missing."""
    if find_spec("playwright") is None:
        return "Playwright is missing: pip install playwright"
    if _executable() is None:
        return f"no browser is on the PATH ({', '.join(NAMES)}): apt-get install chromium"
    return ""


def _executable() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Visit:
    """A page in a browser, with the addresses that it asked for and the errors in its console."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.asked: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("console", lambda said: self.complaints.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))


@contextmanager
def visiting(scheme: str = "light") -> Iterator[Visit]:
    """An empty page in a browser of its own.

    Playwright occupies the thread's event loop until the end: `asyncio.run` must not be called in the body.

    Args:
        scheme: Of the colours: `light` or `dark`.
    """
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_executable())
        try:
            yield Visit(browser.new_page(color_scheme=scheme, viewport=SIZE))  # type: ignore[arg-type]
        finally:
            browser.close()
