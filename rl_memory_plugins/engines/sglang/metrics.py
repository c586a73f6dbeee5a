"""SGLang's own gauges of memory, kept true for what sleeps."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from rl_memory_plugins.tags import Tag

logger = logging.getLogger(__name__)

_GAUGES = {
    Tag.WEIGHTS: "weight_memory_usage_gb",
    Tag.KV_CACHE: "kv_cache_memory_usage_gb",
    Tag.CUDA_GRAPH: "graph_memory_usage_gb",
}


def show_usage(scheduler: Any, asleep: Collection[str]) -> None:
    """Let the gauges of sleeping memory be 0, and the others what they were at the start, when SGLang set them once.

    Args:
        asleep: The tags that sleep.
    """
    emit = getattr(scheduler, "emit_metrics_constants", None)
    if emit is None:  # older versions have no such gauges
        return
    try:
        emit()
        for tag in asleep:
            _set_to_zero(getattr(scheduler.metrics_collector, _GAUGES.get(Tag(tag), ""), None))
    except Exception:  # SGLang takes other collectors than its own; memory that sleeps is no fault of theirs
        logger.warning("SGLang's gauges of memory do not tell what sleeps", exc_info=True)


def _set_to_zero(gauge: Any) -> None:
    """Set all samples of a gauge of `prometheus_client`; gauges of other libraries cannot list theirs."""
    if hasattr(gauge, "collect"):
        for metric in gauge.collect():
            for sample in metric.samples:
                gauge.labels(**sample.labels).set(0)
