"""The HTML page needs nothing from elsewhere, and shows what happened."""

from __future__ import annotations

import re
import xml.etree.ElementTree as xml
from html.parser import HTMLParser

import msgspec
import pytest
from histories import BASE_NS, EXAMPLE, event, handoff, history

from rl_memory_plugins.timeline.history import History, stretches_of
from rl_memory_plugins.timeline.page import html_page
from rl_memory_plugins.timeline.picture import STEPS as COLOURS
from rl_memory_plugins.timeline.picture import Curve, curves_of, pictures, utc
from rl_memory_plugins.timeline.records import RankMemory, Step
from rl_memory_plugins.transition import STEPS

#: Attributes and texts by which a page loads something.
LOADS = {"src", "href", "xlink:href", "action", "data", "poster", "srcset", "background"}


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.loaded += [f"{tag} {name}={value}" for name, value in attributes if name in LOADS]


def test_the_page_loads_nothing() -> None:
    text = html_page(history())
    tags = Tags(text)
    assert tags.loaded == []
    assert not {"script", "link", "img", "iframe", "object", "embed", "use", "image"} & set(tags.names)
    assert "url(" not in text and "@import" not in text
    assert "default-src 'none'" in text


def test_the_page_has_a_picture_of_each_device_and_a_row_for_each_transition() -> None:
    text = html_page(history())
    assert text.count("<svg") == 1, "engines and a trainer on one GPU share a picture"
    rows = re.findall(r"<tr.*?</tr>", text)
    assert len(rows) == 1 + 4 + 2
    failed = [row for row in rows if row.startswith('<tr class="failed">')]
    assert len(failed) == 3
    assert "DeviceMemoryError: 15231233024 bytes are needed, 1048576 are free" in failed[1]
    assert "sleep 2 of kv_cache, weights, cuda_graph" in text and "release 0.103 to 0.408 s" in text
    assert "wake_up of weights, 3 calls" in text
    assert "55.1 GiB → 0 B" in text


def test_calls_up_to_the_last_one_that_is_gone_are_not_all_kept() -> None:
    text = html_page(History({"a": msgspec.structs.replace(EXAMPLE, dropped=40)}))
    assert "a: not all of the first 40 calls are kept" in text
    assert "are kept" not in html_page(history())


def test_names_cannot_bring_elements_into_the_page() -> None:
    bad = "<script>alert(1)</script>"
    timeline = msgspec.structs.replace(
        EXAMPLE, events=[event(1, error="E", message=bad, weight_version=bad), *EXAMPLE.events]
    )
    text = html_page(History({bad: timeline}, {bad: [handoff(bad, device=bad)]}))
    assert "script" not in Tags(text).names


def test_each_picture_is_well_formed_and_names_its_owners() -> None:
    [picture] = pictures(history()).values()
    root = xml.fromstring(picture)
    texts = {text.text for text in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"weights (http://a:1, engine 0 rank 0)", "trainer (trainer.jsonl)"} <= texts
    titles = [title.text or "" for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert any("DeviceMemoryError" in title for title in titles)
    assert any(title.startswith("sleep 2: 0.412 s, drain 0.060 s") for title in titles)
    assert "release of sleep: 0.103 s to 0.408 s" in titles


def test_steps_reach_from_the_first_rank_to_the_last_and_name_the_slowest() -> None:
    ran = [Step("load", BASE_NS + 100, 200, rank=0), Step("load", BASE_NS + 200, 700, rank=1)]
    taken = event(1, operation="update_weights", steps=ran)
    [stretch] = stretches_of(taken)
    assert (stretch.start_ns - BASE_NS, stretch.duration_ns, stretch.longest.rank) == (100, 800, 1)
    [picture] = pictures(History({"a": msgspec.structs.replace(EXAMPLE, events=[taken])})).values()
    assert "load of update_weights: 0.000 s to 0.000 s, longest in engine 0 rank 1" in picture


@pytest.mark.parametrize("operation", STEPS)
def test_each_step_of_an_operation_has_a_colour_of_its_own(operation: str) -> None:
    steps = [step for step in STEPS[operation] if step != "total"]
    assert len({COLOURS[step] for step in steps}) == len(steps)


def test_a_curve_holds_its_value_until_the_next_point() -> None:
    curve = Curve("weights", "#000", [(10, 5), (20, 0), (20, 7)])
    assert [curve.at(moment) for moment in (0, 10, 19, 20, 99)] == [0, 5, 5, 7, 7]


def test_curves_of_a_device_hold_all_its_owners() -> None:
    curves = curves_of(history())["cuda:0"]
    held = {curve.name: curve.at(BASE_NS + 1_000_000_000) for curve in curves}
    assert held["weights (http://a:1, engine 0 rank 0)"] == 0
    assert held["left: context (http://b:2, engine 0 rank 0)"] == 613416960
    assert held["trainer (trainer.jsonl)"] == 7 << 30


@pytest.mark.parametrize("number", [0, 3000])
def test_pictures_of_no_and_of_many_events(number: int) -> None:
    [before], [after] = EXAMPLE.events[0].before, EXAMPLE.events[0].after
    states: list[RankMemory] = [before, after]
    events = [
        event(place, BASE_NS + place * 10**9, 10**8, before=[states[place % 2]], after=[states[(place + 1) % 2]])
        for place in range(number)
    ]
    [picture] = pictures(History({"a": msgspec.structs.replace(EXAMPLE, events=events)})).values()
    assert xml.fromstring(picture).tag.endswith("svg")


def test_no_engine_is_known_yet() -> None:
    assert "<svg" not in html_page(History({"a": msgspec.structs.replace(EXAMPLE, events=[], present=None)}))


def test_a_moment_for_a_person() -> None:
    assert utc(1_790_000_000_123_456_789) == "2026-09-21 14:13:20.123"
