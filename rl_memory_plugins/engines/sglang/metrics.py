"""SGLang's own gauges of memory, kept true for what sleeps."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rl_memory_plugins.tags import Tag

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
    emit()
    for tag in asleep:
        gauge: Any = getattr(scheduler.metrics_collector, _GAUGES.get(Tag(tag), ""), None)
        if gauge is None:
            continue
        for metric in gauge.collect():
            for sample in metric.samples:
                gauge.labels(**sample.labels).set(0)
