"""The tables of the pages are those of the committed results."""

from __future__ import annotations

import pytest

from integration import report

TEXTS = report.texts()


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_a_page_shows_the_committed_results(page):
    text = page.read_text()
    assert text.count(report.BEGIN) == text.count(report.END) == 1
    assert report.replaced(text, TEXTS[page]) == text, "run `python -m integration.report`"


def test_the_first_page_has_five_rows():
    [page] = [lines for path, lines in TEXTS.items() if path.name == "index.md"]
    assert len(page) == 2 + 5
