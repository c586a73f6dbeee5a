"""The metrics of several engines in one answer: each sample gets the name of its model."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from rl_memory_plugins.extras import needs

with needs("serve"):
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
    from prometheus_client.metrics_core import Metric
    from prometheus_client.parser import text_string_to_metric_families
    from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

logger = logging.getLogger(__name__)

CONTENT_TYPE = CONTENT_TYPE_LATEST

LABEL = "model"


class Merged(Collector):
    """
    Args:
        scrapes: What each engine answers at `/metrics`, by the model's name; empty for an engine that has none. One
            that is not in the format of Prometheus is logged, and counts as empty.
        up: Whether each engine is healthy.
        restarts: How often each engine has been started again.
    """

    def __init__(self, scrapes: Mapping[str, str], up: Mapping[str, bool], restarts: Mapping[str, int]) -> None:
        self._scrapes = scrapes
        self._up = up
        self._restarts = restarts

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("rl_memory_serve_engine_up", "1 if the engine is healthy.", labels=[LABEL])
        restarts = CounterMetricFamily(
            "rl_memory_serve_restarts", "Tries to start the engine, after the first one.", labels=[LABEL]
        )
        families: dict[str, Metric] = {}
        for model, text in self._scrapes.items():
            up.add_metric([model], float(self._up[model]))
            restarts.add_metric([model], self._restarts[model])
            for family in _families(text, model):
                into = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                into.samples += _labelled(family, model)
        yield up
        yield restarts
        yield from families.values()


def _families(text: str, model: str) -> list[Metric]:
    try:
        return list(text_string_to_metric_families(text))
    except Exception as error:  # the parser has no type of its own
        logger.warning("model %r: the metrics of its engine cannot be read: %s", model, error)
        return []


def _labelled(family: Metric, model: str) -> Iterable[Sample]:
    for sample in family.samples:
        # As Prometheus itself treats a label that it adds.
        own = {f"exported_{LABEL}" if name == LABEL else name: value for name, value in sample.labels.items()}
        yield sample._replace(labels={**own, LABEL: model})


def exposition(scrapes: Mapping[str, str], up: Mapping[str, bool], restarts: Mapping[str, int]) -> bytes:
    """The text of all metrics; see `Merged`."""
    registry = CollectorRegistry()
    registry.register(Merged(scrapes, up, restarts))
    return generate_latest(registry)
