"""The tables of the pages are those of the committed results."""

from __future__ import annotations

import pytest

from integration import report

TEXTS = report.texts()


@pytest.mark.parametrize("place", TEXTS, ids=lambda place: f"{place.page.name}-{place.name}")
def test_a_page_shows_the_committed_results(place):
    text = place.page.read_text()
    assert [text.count(marker) for marker in place.markers] == [1, 1]
    assert place.replaced(text, TEXTS[place]) == text, "run `python -m integration.report`"


def test_the_first_page_has_five_rows():
    [page] = [lines for place, lines in TEXTS.items() if place.page.name == "index.md"]
    assert len(page) == 2 + 5
