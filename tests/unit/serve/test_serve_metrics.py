"""The metrics of several engines in one answer."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rl_memory_plugins.serve.metrics import exposition

FIRST = """# HELP asked_total Requests.
# TYPE asked_total counter
asked_total{kind="x"} 3.0
# HELP seconds Time.
# TYPE seconds histogram
seconds_bucket{le="1.0"} 1.0
seconds_bucket{le="+Inf"} 2.0
seconds_count 2.0
seconds_sum 4.0
# HELP loaded Models.
# TYPE loaded gauge
loaded{model="inner"} 1.0
"""
SECOND = '# HELP asked_total Requests.\n# TYPE asked_total counter\nasked_total{kind="x"} 5.0\n'


def samples(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = list(text_string_to_metric_families(text.decode()))
    assert len({family.name for family in families}) == len(families)  # each family stands together
    return {(one.name, frozenset(one.labels.items())): one.value for family in families for one in family.samples}


def test_each_sample_has_its_model_and_each_family_stands_once() -> None:
    scrapes = {"a": FIRST, "b": SECOND, "c": "", "d": ""}
    up = {"a": True, "b": True, "c": False, "d": True}
    found = samples(exposition(scrapes, up, {"a": 0, "b": 2, "c": 1, "d": 0}))
    for name, labels, value in [
        ("asked_total", {"kind": "x", "model": "a"}, 3),
        ("asked_total", {"kind": "x", "model": "b"}, 5),
        ("seconds_bucket", {"le": "+Inf", "model": "a"}, 2),
        ("seconds_count", {"model": "a"}, 2),
        ("loaded", {"exported_model": "inner", "model": "a"}, 1),
        ("rl_memory_serve_engine_up", {"model": "a"}, 1),
        ("rl_memory_serve_engine_up", {"model": "c"}, 0),
        ("rl_memory_serve_engine_up", {"model": "d"}, 1),  # SGLang without --enable-metrics
        ("rl_memory_serve_restarts_total", {"model": "b"}, 2),
    ]:
        assert found[name, frozenset(labels.items())] == value, name


@pytest.mark.parametrize("bad", ["x{", "# TYPE x nonsense\nx 1.0\n", "x one\n", "<html>not found</html>\n"])
def test_metrics_that_cannot_be_read_are_missing_and_no_others(bad: str, caplog: pytest.LogCaptureFixture) -> None:
    found = samples(exposition({"a": bad, "b": SECOND}, {"a": True, "b": True}, {"a": 0, "b": 0}))
    assert found["asked_total", frozenset({("kind", "x"), ("model", "b")})] == 5
    assert found["rl_memory_serve_engine_up", frozenset({("model", "a")})] == 1
    assert {dict(labels)["model"] for name, labels in found if name.startswith("asked")} == {"b"}
    assert "model 'a': the metrics of its engine cannot be read" in caplog.text
