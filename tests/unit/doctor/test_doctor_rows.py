"""Every row of docs/troubleshooting.md is found by one check, or there is a reason why by none."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_memory_plugins.doctor import against
from rl_memory_plugins.doctor.rows import ROWS, FoundBy, NotFound
from rl_memory_plugins.doctor.table import LOCAL

DOCS = Path(__file__).parents[3] / "docs"
LOCAL_NAMES = [check.name for check in LOCAL]
NAMES = [*LOCAL_NAMES, *against.NAMES]


def rows(page: str) -> list[tuple[str, list[str]]]:
    """The section and the cells of each row of a page's tables, without their heads."""
    found, section, head = [], "", True
    for line in (DOCS / page).read_text().splitlines():
        if line.startswith("## "):
            section = line[3:].lower().replace(" ", "-")
        if not line.startswith("|"):
            head = True
        elif head:
            head = False  # the titles; the line below them has only dashes
        elif not set(line) <= set("|-: "):
            found.append((section, [cell.strip() for cell in line.strip("|").split("|")]))
    return found


def test_the_names_of_the_checks_differ():
    assert len(set(NAMES)) == len(NAMES)


def test_each_row_is_in_the_mapping_once_and_no_other():
    symptoms = [cells[0] for _, cells in rows("troubleshooting.md")]
    assert len(symptoms) > 40
    assert symptoms == list(ROWS)


@pytest.mark.parametrize("symptom", ROWS)
def test_a_row_names_a_check_that_exists_or_has_a_reason(symptom):
    found = ROWS[symptom]
    assert found.check in NAMES if isinstance(found, FoundBy) else len(found.reason) > 10


def test_the_page_says_by_which_check_a_row_is_found():
    for _, cells in rows("troubleshooting.md"):
        found = ROWS[cells[0]]
        assert cells[-1] == (f"`{found.check}`" if isinstance(found, FoundBy) else "-"), cells[0]


def test_the_page_of_the_doctor_lists_what_is_not_found():
    listed = {cells[0]: cells[1] for section, cells in rows("doctor.md") if section == "what-no-check-finds"}
    assert listed == {symptom: found.reason for symptom, found in ROWS.items() if isinstance(found, NotFound)}


def test_the_page_of_the_doctor_lists_all_checks():
    listed = [cells[0].strip("`") for section, cells in rows("doctor.md") if section in ("checks", "a-running-engine")]
    assert listed == NAMES


def test_checks_link_to_sections_that_exist():
    sections = {section for section, _ in rows("troubleshooting.md")}
    assert {check.section for check in LOCAL} | {section for _, section, _ in against.STATES} <= sections
