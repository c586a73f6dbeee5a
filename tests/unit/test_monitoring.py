"""docs/monitoring.md, the dashboard and the alerts name the metrics that there are."""

from __future__ import annotations

import json
import re

import msgspec
import pytest
from fake_control import rank_status
from prometheus_client import CollectorRegistry, generate_latest

from rl_memory_plugins import commands
from rl_memory_plugins.admission import REASONS
from rl_memory_plugins.errors import EngineAsleepError, HostMemoryError
from rl_memory_plugins.records import EngineStatus, Report
from rl_memory_plugins.server.event_metrics import EventMetrics
from rl_memory_plugins.server.state_metrics import StateCollector
from tests.monitoring import (
    ALERTS,
    DASHBOARD,
    DOCS,
    OF_PROMETHEUS,
    Scrape,
    alerts,
    documented,
    expressions,
    names_in,
    panels_of,
)


@pytest.fixture(scope="module")
def registry() -> CollectorRegistry:
    """All metrics, each with a sample."""
    registry = CollectorRegistry()
    asleep = msgspec.structs.replace(rank_status(), left={"context": 1})
    registry.register(StateCollector(lambda: [EngineStatus([asleep])]))
    events = EventMetrics(registry)
    received = {"transport": "shm", "bytes": 1, "seconds": {"load": 1.0}}
    update = commands.UpdateWeights({"*": "/s"}, "token")
    events.completed(update, Report([], {"total": 1.0}, {"ranks": [received]}))
    events.failed(update, HostMemoryError("full"))
    events.refused(EngineAsleepError("closed", reason="stale"))
    events.answered_error(HostMemoryError("full"))
    return registry


def test_the_page_lists_each_metric_with_its_labels(registry: CollectorRegistry) -> None:
    assert documented() == Scrape(generate_latest(registry).decode()).labels


def test_the_page_lists_each_type(registry: CollectorRegistry) -> None:
    listed = dict(re.findall(r"^\| `(rl_memory_\w+)` \| (\w+) \|", (DOCS / "monitoring.md").read_text(), re.MULTILINE))
    suffixes = {"counter": "_total", "info": "_info"}
    found = {metric.name + suffixes.get(metric.type, ""): metric.type for metric in registry.collect()}
    assert listed == {name: "gauge" if kind == "info" else kind for name, kind in found.items()}


def test_names_follow_the_conventions(registry: CollectorRegistry) -> None:
    for metric in registry.collect():
        assert re.fullmatch(r"rl_memory_[a-z_]+", metric.name), metric.name
        assert metric.documentation.endswith("."), metric.name
        if metric.type == "histogram":
            assert metric.name.endswith("_seconds")
        if "bytes" in metric.name:
            assert metric.name.endswith("_bytes")


def test_the_reasons_are_those_of_the_contract() -> None:
    table = (DOCS / "contract.md").read_text().split("\n## Admission\n")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)` ", table, re.MULTILINE)
    assert set(listed) == {*REASONS, "starting"}


@pytest.mark.parametrize("expression", expressions())
def test_the_dashboard_and_the_alerts_name_metrics_and_labels_that_there_are(expression: str) -> None:
    named = names_in(expression)
    assert named
    for name, labels in named.items():
        assert labels - OF_PROMETHEUS <= documented()[name], name


def test_all_metrics_but_those_of_the_device_are_on_the_dashboard_or_in_an_alert() -> None:
    used = {name for expression in expressions() for name in names_in(expression)}
    rest = {re.sub(r"_(bucket|count|sum)$", "", name) for name in set(documented()) - used}
    rest -= {re.sub(r"_(bucket|count|sum)$", "", name) for name in used}
    assert rest == {"rl_memory_device_free_bytes", "rl_memory_device_total_bytes", "rl_memory_tag_bytes"}


def test_the_check_of_names_can_fail() -> None:
    assert names_in('sum by (tag, job) (rl_memory_nothing{of="this"})') == {"rl_memory_nothing": {"of", "tag", "job"}}


def test_the_panels_do_not_overlap_and_have_their_own_numbers() -> None:
    panels = list(panels_of(json.loads(DASHBOARD.read_text())))
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_each_alert_is_looked_at() -> None:
    assert len(alerts()) == ALERTS.read_text().count("- alert:") > 0
