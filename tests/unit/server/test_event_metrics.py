"""What is counted, under which labels, and that each event counts once."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from fake_control import FakeControl
from fastapi.testclient import TestClient
from prometheus_client import REGISTRY, CollectorRegistry

from rl_memory_plugins import commands, errors, operations
from rl_memory_plugins.errors import (
    DeviceMemoryError,
    EngineAsleepError,
    EngineFaultError,
    HostMemoryError,
    InvalidRequestError,
    RLMemoryError,
    StateConflictError,
)
from rl_memory_plugins.observing import trying_again
from rl_memory_plugins.records import Reply, Report
from rl_memory_plugins.server import event_metrics
from rl_memory_plugins.server.event_metrics import TYPES, EventMetrics
from rl_memory_plugins.tags import Tag

UPDATE = commands.UpdateWeights({"*": "/s"}, "token")


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def events(registry: CollectorRegistry) -> EventMetrics:
    return EventMetrics(registry)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"rl_memory_{name}", labels)


def received(transport: str, size: int, **seconds: float) -> dict[str, Any]:
    return {"transport": transport, "bytes": size, "seconds": seconds}


def test_the_steps_of_a_sleep_count_by_its_level(events: EventMetrics, registry: CollectorRegistry) -> None:
    events.completed(commands.Sleep(), Report([], {"drain": 0.02, "backup": 0.0, "total": 2.0}))
    events.completed(commands.Sleep(), Report([], {"drain": 0.0, "backup": 0.5, "total": 3.0}))
    labels = {"operation": "sleep", "level": "1"}
    assert value(registry, "transition_seconds_count", step="total", **labels) == 2
    assert value(registry, "transition_seconds_sum", step="total", **labels) == 5
    assert value(registry, "transition_seconds_bucket", step="total", le="1.0", **labels) == 0
    assert value(registry, "transition_seconds_bucket", step="total", le="3.0", **labels) == 2
    for step in ("drain", "backup"):
        assert value(registry, "transition_seconds_count", step=step, **labels) == 1, "a step that did not run"


def test_transitions_without_a_level_have_an_empty_one(events: EventMetrics, registry: CollectorRegistry) -> None:
    events.completed(commands.WakeUp(), Report([], {"total": 1.0}))
    assert value(registry, "transition_seconds_count", operation="wake_up", level="", step="total") == 1


def test_updates_count_by_transport(events: EventMetrics, registry: CollectorRegistry) -> None:
    """The bytes of all ranks; of the seconds those of the slowest rank, as ranks receive side by side."""
    engines = [
        {"ranks": [received("shm", 10, connect=1.0, load=1.0), received("tcp", 20, connect=1.0, load=8.0)]},
        {"ranks": [received("shm", 10, connect=1.0, load=2.0)]},
    ]
    events.completed(UPDATE, Report([], {"total": 9.5}, {"engines": engines}))
    events.completed(UPDATE, Report([], {"total": 3.0}, {"ranks": [received("shm", 5, load=4.0)]}))
    for transport, size, times, seconds in (("shm", 25, 2, 7.0), ("tcp", 20, 1, 9.0)):
        labels = {"operation": "update_weights", "transport": transport}
        assert value(registry, "update_bytes_total", **labels) == size
        assert value(registry, "update_seconds_count", **labels) == times
        assert value(registry, "update_seconds_sum", **labels) == seconds


def test_refusals_count_by_reason(events: EventMetrics, registry: CollectorRegistry) -> None:
    assert value(registry, "refusals_total", reason="failed") == 0, "so that the first one is an increase"
    events.refused(EngineAsleepError("closed", reason="failed"))
    events.refused(InvalidRequestError("the adapter has been removed"))
    assert value(registry, "refusals_total", reason="failed") == 1
    assert value(registry, "refusals_total", reason="other") == 1


def test_errors_begin_at_zero_and_count_by_type(events: EventMetrics, registry: CollectorRegistry) -> None:
    for error in TYPES:
        assert value(registry, "errors_total", type=error) == 0
    events.answered_error(HostMemoryError("full"))
    assert value(registry, "errors_total", type="HostMemoryError") == 1


def test_the_types_are_those_that_a_server_can_answer() -> None:
    found = {name for name, error in vars(errors).items() if isinstance(error, type)}
    assert set(TYPES) < found
    clients = {"NoAnswerError", "EngineLostError"}
    assert {name for name in found if name.endswith("Error")} - set(TYPES) - clients == {
        "RLMemoryError",
        "OutOfMemoryError",
    }


def run(control: FakeControl, command: commands.Transition) -> Any:
    return asyncio.run(control.run(control.transition(command)))


def test_a_transition_counts_once_when_all_engines_have_run_it(
    events: EventMetrics, registry: CollectorRegistry
) -> None:
    class TwoEngines(FakeControl):
        def status_now(self) -> Any:
            [status] = super().status_now()
            return [status, msgspec.structs.replace(status, engine_rank=1)]

        async def _call(self, command: commands.AnyCommand) -> list[Reply[Any]]:
            if isinstance(command, commands.Decide):
                result: Any = Report([], {"drain": 0.5, "total": 1.0})
            elif isinstance(command, commands.Resume):
                result = None
            else:
                result = {"held": True}
            return [Reply(rank, msgspec.to_builtins(result)) for rank in range(2)]

    control = TwoEngines()
    control.observer = events
    run(control, operations.sleep(2, mode="keep"))
    assert value(registry, "transition_seconds_count", operation="sleep", level="2", step="total") == 1


def test_a_failed_transition_counts_by_its_error(events: EventMetrics, registry: CollectorRegistry) -> None:
    control = FakeControl()
    control.observer = events
    for failure, name in ((HostMemoryError("full"), "HostMemoryError"), (OSError("gone"), "EngineFaultError")):
        control.failure = failure
        with pytest.raises(type(failure)):
            run(control, operations.sleep())
        assert value(registry, "transition_failures_total", operation="sleep", type=name) == 1
    assert value(registry, "transition_seconds_count", operation="sleep", level="1", step="total") is None


def test_a_transition_that_an_update_keeps_out_counts_as_failed(
    events: EventMetrics, registry: CollectorRegistry
) -> None:
    control = FakeControl()
    control.observer = events
    [status] = control.status_now()
    control.engines = [msgspec.structs.replace(status, busy="update_weights")]
    with pytest.raises(StateConflictError):
        run(control, operations.wake_up())
    assert value(registry, "transition_failures_total", operation="wake_up", type="StateConflictError") == 1


def test_an_engine_that_turns_out_not_to_be_idle_is_no_failure(
    events: EventMetrics, registry: CollectorRegistry
) -> None:
    control = FakeControl()
    control.observer = events
    for failure, count in ((StateConflictError("it had requests"), 0), (HostMemoryError("full"), 1)):
        control.failure = failure
        with pytest.raises(type(failure)):
            run(control, operations.sleep_if_idle(5.0))
        assert value(registry, "transition_failures_total", operation="sleep", type=failure.code) == count


def test_a_wake_that_is_tried_again_for_a_request_is_no_failure(
    events: EventMetrics, registry: CollectorRegistry
) -> None:
    control = FakeControl()
    control.observer = events
    failure: RLMemoryError
    for failure, retries, failures in ((DeviceMemoryError("full"), 1, 0), (EngineFaultError("broken"), 1, 1)):
        control.failure = failure
        with pytest.raises(type(failure)), trying_again():
            run(control, operations.wake_up())
        assert value(registry, "wake_retries_total") == retries
        assert value(registry, "transition_failures_total", operation="wake_up", type=failure.code) == failures
    control.failure = DeviceMemoryError("full")
    with pytest.raises(DeviceMemoryError):
        run(control, operations.wake_up())
    assert value(registry, "wake_retries_total") == 1
    assert value(registry, "transition_failures_total", operation="wake_up", type="DeviceMemoryError") == 1


def test_a_metric_that_cannot_be_written_changes_no_answer(
    events: EventMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    events.completed(UPDATE, Report([], {}, {"ranks": [{"transport": "shm"}]}))
    assert "could not be counted" in caplog.text


def test_the_metrics_of_a_process_are_made_once() -> None:
    """A second app in the process would register the same names again."""
    assert event_metrics.event_metrics() is event_metrics.event_metrics()


@pytest.fixture
def control() -> FakeControl:
    return FakeControl()


@pytest.mark.parametrize(
    ("method", "path", "name", "labels"),
    [
        ("POST", "/generate", "refusals_total", {"reason": "asleep"}),
        ("POST", "/sleep?level=9", "errors_total", {"type": "InvalidRequestError"}),
        ("GET", "/v1/rl_memory/memory", "", {}),
    ],
)
def test_an_app_counts_each_refusal_and_each_error_once(
    client: TestClient, control: FakeControl, method: str, path: str, name: str, labels: dict[str, str]
) -> None:
    """In the registry that the engine's `/metrics` shows."""

    def totals() -> dict[str, float]:
        return {
            f"{sample.name} {sorted(sample.labels.items())}": sample.value
            for family in REGISTRY.collect()
            if family.name in ("rl_memory_refusals", "rl_memory_errors")
            for sample in family.samples
            if sample.name.endswith("_total")
        }

    control.asleep = {Tag.WEIGHTS}
    event_metrics.event_metrics()  # as an enabled engine does
    before = totals()
    client.request(method, path)
    after = totals()
    grown = {sample: after[sample] - before[sample] for sample in after if after[sample] != before[sample]}
    assert grown == ({f"rl_memory_{name} {sorted(labels.items())}": 1} if name else {})
