"""The parts of `integration.bench_turns` that need no engine."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from integration import bench_turns, records
from integration.bench_turns import Run, Swaps, bounded, means, percentile
from integration.engines.base import EngineKind, Launch
from integration.models import weight_bytes


def test_percentiles_are_measured_values() -> None:
    values = [float(number) for number in range(200, 0, -1)]
    assert percentile(values, 0.5) == 100
    assert percentile(values, 0.99) == 198
    assert percentile([3.0], 0.5) == 3


def test_the_mean_of_transitions_is_that_of_the_swaps_alone_and_of_both_servers() -> None:
    key, other = ("sleep", "total"), ("update_weights", "total")
    before = [{key: (5.0, 1.0), other: (1.0, 1.0)}, {}]
    after = [{key: (6.0, 3.0), other: (1.0, 1.0)}, {key: (0.5, 1.0)}]
    assert means(before, after) == {key: 0.5}


def test_swaps_alternate_and_notice_another_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    seconds = iter([0.5, 0.1, 0.7, 0.1, 0.5, 0.1] + [0.5] * 4)

    def first_token(server: Any) -> tuple[float, list[int]]:
        asked.append(server)
        return next(seconds), [len(asked) if len(asked) > 6 else {"a": 1, "b": 2}[server]]

    monkeypatch.setattr(bench_turns, "first_token", first_token)
    monkeypatch.setattr(bench_turns, "REST_S", 0)
    prepared: list[tuple[Any, Any]] = []

    def before(awake: Any, asleep: Any) -> dict[str, float]:
        prepared.append((awake, asleep))
        return {"sleep_s": 2.0}

    swaps = Swaps(["a", "b"], [[1], [2]], before)  # type: ignore[list-item]
    swaps.run(3, 1000)
    assert asked == ["b", "b", "a", "a", "b", "b"]
    assert prepared == [("a", "b"), ("b", "a"), ("a", "b")]
    assert swaps.seconds["swap_s"] == pytest.approx([0.4, 0.6, 0.4], abs=0.1)
    assert swaps.seconds["sleep_s"] == [2.0] * 3
    assert swaps.identical
    swaps.run(0, 0)  # no fewer than two
    assert not swaps.identical


class Engine:
    """Stands in for a server: notes the control calls, and answers."""

    calls: ClassVar[list[tuple[str, str]]] = []

    def __init__(self, kind: EngineKind, launch: Launch, log: Path) -> None:
        self.kind, self.name = kind, log.stem
        self.http = httpx.Client(transport=httpx.MockTransport(self._answer), base_url="http://engine")

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.calls.append((self.name, request.url.raw_path.decode()))
        return httpx.Response(200, json={})

    def __enter__(self) -> Engine:
        self.calls.append((self.name, "start"))
        return self

    def stop(self) -> None:
        self.calls.append((self.name, "stop"))


def test_an_engine_sleeps_before_the_other_wakes_and_a_restart_stops_the_awake_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_turns, "Server", Engine)
    monkeypatch.setattr(bench_turns, "first_token", lambda server: (0.1, [1]))
    monkeypatch.setattr(bench_turns, "REST_S", 0)
    monkeypatch.setattr(bench_turns, "described", lambda *words, **more: {"subject": words[3]})
    monkeypatch.setattr(Engine, "calls", [])
    given = {"engine": "vllm", "model": "tiny", "subject": ["native", "restart"], "device": "cpu", "memory": 0.85}
    given |= {"eager": False, "swaps": 2, "seconds": 0.0, "commit": "", "out": tmp_path / "out.json"}
    run = Run(argparse.Namespace(**given), tmp_path, (2e9, 1e9))
    run.native()
    a, b, new = "turns-vllm-native-a", "turns-vllm-native-b", "turns-vllm-restart-b"
    sleep, wake = "/sleep?level=1", "/wake_up"
    assert Engine.calls == [
        *((a, "start"), (a, sleep), (b, "start"), (b, sleep), (a, wake)),  # then two swaps
        *((a, sleep), (b, wake), (b, sleep), (a, wake), (b, "stop")),
    ]
    Engine.calls.clear()
    run.restart()
    run.stop()
    assert Engine.calls == [(a, "stop"), (new, "start"), (new, "stop")]
    found = {(one["subject"], one["metric"]): one for one in records.read(tmp_path / "out.json")}
    nbytes = weight_bytes("tiny")
    limit = found["native", "swap_limit_s"]
    assert (limit["bytes_out"], limit["bytes_in"]) == (nbytes, nbytes)
    assert limit["median"] == pytest.approx(nbytes * 1.5e-9)
    assert found["native", "first_token_s"]["p99"] >= 0.1
    assert len(found["native", "swap_s"]["by_step"]) == 2
    assert found["restart", "swaps"]["median"] == 1


def test_a_subject_ends_in_time() -> None:
    with pytest.raises(TimeoutError), bounded(0.05):
        time.sleep(60)
