"""The metrics of this package at the engine's own `/metrics`, as a monitor reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.engines.base import Server
from integration.waiting import wait_until
from rl_memory_plugins.errors import DeviceMemoryError, InvalidRequestError
from rl_memory_plugins.trainer import ModelSource
from rl_memory_plugins.transition import STEPS
from tests.conformance.conftest import PROMPT, Weights
from tests.conformance.test_faults import last
from tests.conformance.trainers import broken_update, push
from tests.monitoring import OF_PROMETHEUS, Scrape, documented, expressions, names_in, scrape

OF_SLEEPING_GPUS = {"rl_memory_left_bytes"}


def assert_as_the_status(server: Server, shown: Scrape) -> None:
    """The gauges say what `GET /memory` says, of each rank of each engine."""
    memory = server.control.memory()
    engines = {str(engine["engine_rank"]): engine for engine in memory["engines"]}
    assert len(engines) == server.launch.dp
    assert {labels["engine"] for labels, _ in shown.samples("admitting")} == set(engines)
    assert sum(len(engine["ranks"]) for engine in engines.values()) == server.launch.ranks
    assert shown.total("admitting") == (len(engines) if memory["admitting"] else 0)
    assert shown.present("refusal_reason", "reason") == ({memory["reason"]} - {None})
    for number, engine in engines.items():
        assert shown.present("weights_info", "version", engine=number) == {engine["weight_version"]}
        for rank in engine["ranks"]:
            place = {"engine": number, "rank": str(rank["rank"])}
            assert shown.total("host_arena_bytes", **place) == rank["host_arena_bytes"]
            for tag, found in rank["tags"].items():
                assert shown.present("tag_state", "state", tag=tag, **place) == {found["state"]}
                assert shown.total("tag_bytes", tag=tag, **place) == found["bytes"]
                assert shown.total("host_bytes", tag=tag, **place) == found["host_bytes"]
                is_resident = found["state"] == "resident"
                assert shown.total("resident_bytes", tag=tag, **place) == (found["bytes"] if is_resident else 0)


def test_a_sleep_of_each_level_and_its_wake(server: Server) -> None:
    for level, weights, content in ((1, "preserved", "valid"), (2, "discarded", "stale")):
        before = scrape(server)
        assert_as_the_status(server, before)
        assert before.total("resident_bytes", tag="weights") > 0
        server.control.sleep(level)
        asleep = scrape(server)
        assert_as_the_status(server, asleep)
        assert asleep.present("tag_state", "state", tag="weights") == {weights}
        assert asleep.present("content_state", "state") == {content}
        assert asleep.total("sleeping") == server.launch.dp
        assert asleep.total("resident_bytes") == 0
        server.control.wake_up()
        after = scrape(server)
        assert_as_the_status(server, after)
        for operation, label in (("sleep", str(level)), ("wake_up", "")):
            labels = {"operation": operation, "level": label, "step": "total"}
            grown = after.total("transition_seconds_count", **labels) - before.total(
                "transition_seconds_count", **labels
            )
            assert grown == 1, "all ranks and engines make one transition"


def test_the_steps_are_those_of_the_reports(server: Server) -> None:
    report = server.control.sleep(1)["report"]
    found = {labels["step"] for labels, _ in scrape(server).samples("transition_seconds_count", operation="sleep")}
    assert {step for step, seconds in report["seconds"].items() if seconds > 0} <= found <= set(STEPS["sleep"])


def test_a_scrape_during_an_update_whose_trainer_stalls(server: Server, weights: Weights) -> None:
    with broken_update(server, weights.other, stall=True) as update:
        during = scrape(server)
        assert update.runs(), "the scrape has not waited for the update"
        assert during.present("under_way", "operation") == {"update_weights"}
        assert during.present("refusal_reason", "reason") == {"updating"}
        assert server.post(PROMPT).status_code == 503
        refused = scrape(server)
        assert update.runs()
        assert (
            refused.total("refusals_total", reason="updating") == during.total("refusals_total", reason="updating") + 1
        )
    assert scrape(server).present("under_way", "operation") == set()


def test_updates_by_transport(server: Server, weights: Weights) -> None:
    before = scrape(server)
    push(server, weights.other, weight_version="metrics-1")
    push(server, weights.first, weight_version="metrics-2")
    after = scrape(server)
    [transport] = {
        labels["transport"]
        for labels, value in after.samples("update_seconds_count", operation="update_weights")
        if value > before.total("update_seconds_count", **labels)
    }
    labels = {"operation": "update_weights", "transport": transport}
    assert after.total("update_seconds_count", **labels) - before.total("update_seconds_count", **labels) == 2
    assert after.total("update_seconds_sum", **labels) > before.total("update_seconds_sum", **labels)
    sent = sum(tensor.nbytes for _, tensor in ModelSource(weights.first).tensors())
    grown = after.total("update_bytes_total", **labels) - before.total("update_bytes_total", **labels)
    assert grown == 2 * sent * server.launch.ranks
    assert after.present("weights_info", "version") == {"metrics-2"}, "former versions leave no series"


def test_refusals_and_errors(server: Server, fault_dir: Path) -> None:
    before = scrape(server)
    with pytest.raises(InvalidRequestError):
        server.control.sleep(7)
    server.control.sleep(1)
    assert server.post(PROMPT).status_code == 503
    (fault_dir / last("reserve", server)).touch()
    with pytest.raises(DeviceMemoryError):
        server.control.wake_up()
    after = scrape(server)

    def grown(name: str, **labels: str) -> float:
        return after.total(name, **labels) - before.total(name, **labels)

    assert grown("refusals_total") == grown("refusals_total", reason="asleep") == 1
    assert grown("errors_total", type="InvalidRequestError") == 1
    assert grown("errors_total", type="DeviceMemoryError") == 1
    assert grown("errors_total") == 2
    assert grown("transition_failures_total") == 1
    assert grown("transition_failures_total", operation="wake_up", type="DeviceMemoryError") == 1


def test_an_update_that_breaks_off(server: Server, weights: Weights) -> None:
    before = scrape(server)
    broken_update(server, weights.other)
    wait_until(lambda: scrape(server).present("content_state", "state") == {"failed"}, "the update has failed")
    after = scrape(server)
    assert after.present("refusal_reason", "reason") == {"failed"}
    failures = {"operation": "update_weights"}
    assert (
        after.total("transition_failures_total", **failures)
        == before.total("transition_failures_total", **failures) + 1
    )


def test_the_dashboard_and_the_alerts_name_what_a_server_shows(server: Server, weights: Weights) -> None:
    server.control.sleep(1)
    server.control.wake_up()
    push(server, weights.first)
    shown = scrape(server).labels
    assert set(shown) | OF_SLEEPING_GPUS == set(documented())
    for expression in expressions():
        for name, labels in names_in(expression).items():
            if name not in OF_SLEEPING_GPUS:
                assert labels - OF_PROMETHEUS <= shown[name], (expression, name)


def test_a_monitor_that_prefers_open_metrics(server: Server) -> None:
    """Prometheus does. The engine decides which format it answers."""
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.3"
    answer = server.http.get("/metrics", headers={"Accept": accept}).raise_for_status()
    is_open = answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.count("# EOF") == answer.text.endswith("\n# EOF\n") == is_open
    assert answer.text.count("# TYPE rl_memory_admitting gauge") == 1
