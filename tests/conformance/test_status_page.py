"""The status page of a real server, in a real browser."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from integration.browser import Visit
from integration.engines.base import Server
from rl_memory_plugins.errors import ManifestError
from tests.browser import shows, visit  # noqa: F401
from tests.conformance.conftest import PROMPT, Weights
from tests.conformance.trainers import broken_update, push

MARKUP = "<img src=x onerror=\"document.title='owned'\">"
"""A text that runs a script where a page takes texts for markup."""


@pytest.fixture
def opened(server: Server, visit: Visit) -> Visit:  # noqa: F811
    visit.page.goto(f"{server.url}/v1/rl_memory/ui")
    if server.launch.api_key:
        visit.page.get_by_role("textbox", name="Key").fill(server.launch.api_key)
        visit.page.get_by_role("button", name="Use this key").click()
    shows(visit, "state", "admitted", "valid")
    return visit


def own(visit: Visit, server: Server) -> None:  # noqa: F811
    """The page asked its own server alone, showed no key in an address, and ran no script of anybody else."""
    assert all(address.startswith(f"{server.url}/v1/rl_memory/") for address in visit.asked), visit.asked
    key = server.launch.api_key
    assert not [address for address in visit.asked if key and key in address]
    without_key = "Failed to load resource: the server responded with a status of 401"
    assert not [said for said in visit.complaints if not (key and said.startswith(without_key))], visit.complaints
    assert visit.page.title() == "Engine memory"
    assert visit.page.locator("img, iframe, object, main script").count() == 0


def test_the_page_shows_a_sleep_a_failed_update_and_a_wake(server: Server, weights: Weights, opened: Visit) -> None:
    shows(opened, "software", server.kind.name, "torch", "rl_memory_plugins")
    tags = opened.page.locator("#tags tbody tr")
    assert tags.count() == server.launch.ranks
    server.control.sleep(2)
    shows(opened, "state", "refused: asleep", "stale")
    shows(opened, "tags", "discarded")
    shows(opened, "transitions", "sleep", "level 2", "release")
    server.control.wake_up(["weights"])
    broken_update(server, weights.other)
    shows(opened, "state", "failed")
    shows(opened, "transitions", "WeightUpdateError", "send a complete update")
    push(server, weights.other, weight_version=MARKUP)
    server.control.wake_up()
    shows(opened, "state", "admitted", "valid", MARKUP)
    shows(opened, "transitions", "update_weights", "wake_up", MARKUP)
    shows(opened, "versions", MARKUP, "loaded")
    assert "resident" in tags.first.inner_text() and "discarded" not in tags.first.inner_text()
    own(opened, server)


def test_markup_in_an_error_stays_a_text(server: Server, weights: Weights, opened: Visit) -> None:
    tensors = {**weights.first.state_dict(), MARKUP: torch.zeros(2)}
    with pytest.raises(ManifestError):
        push(server, tensors)
    shows(opened, "transitions", "ManifestError", MARKUP)
    shows(opened, "state", "admitted")
    own(opened, server)


def test_a_page_in_the_dark_and_a_chart_by_keys(server: Server, opened: Visit) -> None:
    light = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    opened.page.emulate_media(color_scheme="dark")
    assert opened.page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    server.control.sleep(1)
    shows(opened, "state", "refused: asleep")
    chart = opened.page.locator("#device-chart svg")
    chart.focus()
    chart.press("ArrowLeft")  # the beginning of the sleep
    chart.press("ArrowLeft")  # the beginning of the time before
    spoken = opened.page.locator("#device-chart [role=status]").inner_text()
    assert "ago" in spoken and "Weights 0 B" not in spoken and "Weights" in spoken
    own(opened, server)


def test_a_server_that_does_not_answer(server: Server, opened: Visit, first_tokens: list[int]) -> None:
    process = server.processes()[0].pid
    os.kill(process, signal.SIGSTOP)
    try:
        shows(opened, "problem", "The engine does not answer", "The last answer came at")
    finally:
        os.kill(process, signal.SIGCONT)
    opened.page.locator("#problem").wait_for(state="hidden")
    shows(opened, "state", "admitted")
    assert server.generate(PROMPT) == first_tokens
