"""The fixture of tests in a real browser. `--need-browser` lets them fail where there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from integration.browser import Visit, missing, visiting

SHOWN_MS = 60_000
"""The longest wait for what the page must show. It asks every two seconds; shared machines pause at any moment."""


@pytest.fixture
def visit(request: pytest.FixtureRequest) -> Iterator[Visit]:
    reason = missing()
    if reason and request.config.getoption("--need-browser"):
        pytest.fail(reason)
    if reason:
        pytest.skip(f"{reason}. Nothing of the status page was tested in a browser.")
    with visiting() as visit:
        visit.page.set_default_timeout(SHOWN_MS)
        yield visit


def shows(visit: Visit, where: str, *texts: str) -> None:
    """Wait until the element with this id shows all these texts, in any order."""
    from playwright.sync_api import expect

    for text in texts:
        expect(visit.page.locator(f"#{where}")).to_contain_text(text, timeout=SHOWN_MS)
