"""SGLang's gauges of memory tell what sleeps."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Gauge

from integration.engines.base import Server
from rl_memory_plugins.engines.sglang.metrics import show_usage

NAMES = ("weight", "kv_cache", "graph")


def usage(server: Server) -> dict[str, list[float]]:
    """The values of SGLang's gauges by the name of what they measure."""
    from prometheus_client.parser import text_string_to_metric_families

    found = defaultdict(list)
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        for sample in family.samples:
            if sample.name in {f"sglang:{name}_memory_usage_gb" for name in NAMES}:
                found[sample.name.removeprefix("sglang:").removesuffix("_memory_usage_gb")].append(sample.value)
    return found


def test_what_sleeps_uses_no_memory(server: Server) -> None:
    awake = usage(server)
    assert awake["kv_cache"][0] > 0

    server.control.sleep(1, tags=["kv_cache"])
    assert usage(server) == {**awake, "kv_cache": [0.0]}
    server.control.sleep(1)
    assert {value for values in usage(server).values() for value in values} == {0.0}
    server.control.wake_up(tags=["weights"])
    assert usage(server) == {**awake, "kv_cache": [0.0]} | {"graph": usage(server)["graph"]}
    server.control.wake_up()
    assert usage(server) == awake


@pytest.mark.parametrize(
    ("asleep", "expected"),
    [
        ([], [5.0, 3.0, 1.0, 2.0]),
        (["weights"], [0.0, 3.0, 1.0, 2.0]),
        (["cuda_graph"], [5.0, 3.0, 0.0, 0.0]),
        (["kv_cache", "weights"], [0.0, 0.0, 1.0, 2.0]),
    ],
)
def test_each_gauge_follows_its_own_tag(asleep: list[str], expected: list[float]) -> None:
    registry = CollectorRegistry()
    weight, kv_cache = (Gauge(name, "", ["tp_rank"], registry=registry) for name in NAMES[:2])
    graph = Gauge("graph", "", ["tp_rank", "phase"], registry=registry)

    def emit() -> None:
        weight.labels("0").set(5)
        kv_cache.labels("0").set(3)
        graph.labels("0", "decode").set(1)
        graph.labels("0", "prefill").set(2)

    collector = SimpleNamespace(
        weight_memory_usage_gb=weight, kv_cache_memory_usage_gb=kv_cache, graph_memory_usage_gb=graph
    )
    scheduler = SimpleNamespace(emit_metrics_constants=emit, metrics_collector=collector)
    show_usage(scheduler, ["weights", "kv_cache", "cuda_graph"])

    show_usage(scheduler, asleep)

    assert [
        sample.value for one in (weight, kv_cache, graph) for m in one.collect() for sample in m.samples
    ] == expected


def test_an_older_scheduler_has_no_such_gauges() -> None:
    show_usage(SimpleNamespace(), ["weights"])


class OtherGauge:
    """As Ray's: values can be set, and not listed."""

    def labels(self, **labels: str) -> OtherGauge:
        raise RuntimeError(f"labels {labels}")


def test_a_collector_of_another_kind_fails_no_transition(caplog: pytest.LogCaptureFixture) -> None:
    collector = SimpleNamespace(weight_memory_usage_gb=OtherGauge(), kv_cache_memory_usage_gb=None)
    show_usage(SimpleNamespace(emit_metrics_constants=lambda: None, metrics_collector=collector), ["weights"])
    assert not caplog.records

    def emit() -> None:
        raise RuntimeError("no collector")

    show_usage(SimpleNamespace(emit_metrics_constants=emit, metrics_collector=collector), ["weights"])
    assert "do not tell what sleeps" in caplog.text
