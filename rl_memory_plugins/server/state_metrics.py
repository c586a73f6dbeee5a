"""Gauges of the state as it is: rendered at each scrape from the published status, and kept nowhere.

Therefore the servers of an engine agree, and a former weight version leaves nothing behind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from rl_memory_plugins import admission
from rl_memory_plugins.records import UNANSWERED, UNKNOWN, EngineStatus
from rl_memory_plugins.tags import Content, TagState
from rl_memory_plugins.transition import STEPS

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

logger = logging.getLogger(__name__)

#: Of `EngineStatus.busy`.
OPERATIONS = (*STEPS, UNKNOWN, UNANSWERED)


class StateCollector(Collector):
    """The gauges of all engines of a server.

    Args:
        status: Returns the status without waiting; empty if it is not known.
    """

    def __init__(self, status: Callable[[], Iterable[EngineStatus]]) -> None:
        self._status = status

    def describe(self) -> Iterable[Metric]:
        return state_metrics([])

    def collect(self) -> Iterator[Metric]:
        try:
            engines = list(self._status())
        except Exception:  # the other metrics of the scrape are still true
            logger.exception("the status could not be read for the metrics")
            engines = []
        yield from state_metrics(engines)


def state_metrics(engines: list[EngineStatus]) -> list[Metric]:
    """The gauges of these engines; only `rl_memory_state_known` of none."""
    known = GaugeMetricFamily("rl_memory_state_known", "Whether the server knows the state of its engines.")
    known.add_metric([], bool(engines))
    shared = GaugeMetricFamily(
        "rl_memory_host_shared_bytes", "Host memory of copies that several ranks share; each copy counts once."
    )
    if engines:
        copies = {name: held for engine in engines for rank in engine.ranks for name, held in rank.host_shared.items()}
        shared.add_metric([], sum(copies.values()))
    return [known, *_of_engines(engines), *_of_ranks(engines), shared]


def _of_engines(engines: list[EngineStatus]) -> list[Metric]:
    admitting = _gauge("admitting", "Whether the engine admits generation requests.")
    reasons = _gauge("refusal_reason", "1 for the reason why the engine admits no requests.", "reason")
    sleeping = _gauge("sleeping", "Whether a tag is released on any rank, or the engine is paused.")
    idle = _gauge("idle", "Whether the engine sleeps because no request came, and a request may wake it.")
    under_way = _gauge("under_way", "1 for the operation that is under way.", "operation")
    content = _gauge("content_state", "1 for the content state of the weights; the worst of all ranks.", "state")
    version = InfoMetricFamily("rl_memory_weights", "The weight version.", labels=["engine"])
    for status in engines:
        engine = str(status.engine_rank)
        refusal = admission.refusal(status)
        reason = None if refusal is None else refusal.details["reason"]
        admitting.add_metric([engine], refusal is None)
        _one_of(reasons, [engine], admission.REASONS, reason)
        sleeping.add_metric([engine], admission.is_sleeping([status]))
        idle.add_metric([engine], status.idle)
        _one_of(under_way, [engine], OPERATIONS, status.busy)
        _one_of(content, [engine], Content, status.content)
        version.add_metric([engine], {"version": status.weight_version})
    return [admitting, reasons, sleeping, idle, under_way, content, version]


def _of_ranks(engines: list[EngineStatus]) -> list[Metric]:
    states = _gauge("tag_state", "1 for the state of the tag.", "rank", "tag", "state")
    sizes = _gauge("tag_bytes", "Size of the tag, wherever its content is.", "rank", "tag")
    resident = _gauge("resident_bytes", "Device memory of the tag.", "rank", "tag")
    host = _gauge("host_bytes", "Content of the tag that is held in host memory.", "rank", "tag")
    arena = _gauge("host_arena_bytes", "Host memory of the rank for copies, in use or kept for the next sleep.", "rank")
    left = _gauge("left_bytes", "Device memory that is left beside the tags during a sleep, by cause.", "rank", "cause")
    free = _gauge("device_free_bytes", "Free memory of the device when the latest transition ended.", "rank")
    total = _gauge("device_total_bytes", "Memory of the device.", "rank")
    for status in engines:
        for rank in status.ranks:
            place = [str(status.engine_rank), str(rank.rank)]
            for name, tag in rank.tags.items():
                labels = [*place, name]
                _one_of(states, labels, TagState, tag.state)
                sizes.add_metric(labels, tag.bytes)
                resident.add_metric(labels, tag.bytes if tag.state is TagState.RESIDENT else 0)
                host.add_metric(labels, tag.host_bytes)
            arena.add_metric(place, rank.host_arena_bytes)
            for cause, held in rank.left.items():
                left.add_metric([*place, cause], held)
            free.add_metric(place, rank.device_free_bytes)
            total.add_metric(place, rank.device_total_bytes)
    return [states, sizes, resident, host, arena, left, free, total]


def _gauge(name: str, documentation: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"rl_memory_{name}", documentation, labels=["engine", *labels])


def _one_of(gauge: GaugeMetricFamily, labels: list[str], values: Iterable[str], present: str | None) -> None:
    """Add a sample for each value: 1 for the present one, 0 for the others."""
    for value in values:
        gauge.add_metric([*labels, str(value)], value == present)
