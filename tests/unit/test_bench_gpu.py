"""What `bench_gpu` compares and records, with a subject that has no engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from integration import bench_gpu, gpu_subjects, records
from integration.offline import Token


class Subject(gpu_subjects.Subject):
    """Answers every prompt with one token, which a sleep changes if `changed` is true. The first batch has another."""

    plugin, can_discard = False, True

    def __init__(self, changed: bool) -> None:
        self._changed = changed
        self._batches = 0
        self.sleeps: list[int] = []

    def _token(self) -> int:
        return 7 if self._changed and self.sleeps else 3

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        self._batches += 1
        return [[5 if self._batches == 1 else self._token()] * tokens for _ in prompts]

    def scored(self, prompts: list[list[int]], tokens: int) -> list[list[Token]]:
        likeliest = {3: -0.25, 7: -0.75}
        return [[Token(self._token(), likeliest)] * tokens for _ in prompts]

    def sleep(self, level: int) -> None:
        self.sleeps.append(level)
        self.note_steps(f"sleep {level}", SimpleNamespace(seconds={"release": 0.002 * level}))

    def wake(self, tags: list[str] | None = None) -> None: ...

    def touch(self) -> None: ...

    def close(self) -> None: ...


def measured(subject: Subject, out: Path, levels: list[int]) -> dict[str, Any]:
    bench_gpu.Bench(subject, [100.0, 100.0], records.Records(out, {}), levels).run(2, 0)
    return {record["metric"]: record for record in records.read(out)}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(bench_gpu, "ASLEEP_S", 0)
    monkeypatch.setattr(bench_gpu, "gpus_used_mib", lambda: [150.0, 175.0])


def test_the_first_batch_is_not_compared(tmp_path: Path) -> None:
    found = measured(Subject(changed=False), tmp_path / "out.json", [1, 2])
    assert found["tokens_identical"]["min"] == 1
    assert found["difference"]["max"] == found["difference_awake"]["max"] == 0


def test_answers_that_a_sleep_changes_show_in_tokens_and_in_log_probabilities(tmp_path: Path) -> None:
    found = measured(Subject(changed=True), tmp_path / "out.json", [1])
    assert found["tokens_identical"]["max"] == 0
    assert found["difference"]["median"] == pytest.approx(0.5)
    assert found["difference_awake"]["max"] == 0


def test_the_fullest_gpu_counts_and_the_steps_are_those_of_the_operation(tmp_path: Path) -> None:
    found = measured(Subject(changed=False), tmp_path / "out.json", [1, 2])
    assert found["gpu_left_mib"]["median"] == 75
    assert found["sleep_l1_first_s"]["steps_ms"] == {"release": 2.0}
    assert found["sleep_l2_s"]["steps_ms"] == {"release": 4.0}
    assert "steps_ms" not in found["wake_kv_s"]


def test_without_level_1_no_sleep_keeps_the_weights(tmp_path: Path) -> None:
    subject = Subject(changed=False)
    found = measured(subject, tmp_path / "out.json", [2])
    assert subject.sleeps == [2, 2]
    assert "sleep_l1_first_s" not in found
    assert found["request_s"]["n"] == found["request_start_s"]["n"] == bench_gpu.REQUESTS


class Sessions:
    """SGLang's calls, which refuse an update outside a session."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def begin_weight_update(self) -> tuple[bool, str]:
        self.calls.append("begin")
        return True, ""

    def update_weights_from_tensor(self, named: list[Any]) -> tuple[bool, str]:
        self.calls.append("update")
        return self.calls[-2:] == ["begin", "update"], "must run in a session"

    def end_weight_update(self) -> tuple[bool, str]:
        self.calls.append("end")
        return True, ""


class Refusing:
    """SGLang's calls, without sessions."""

    def update_weights_from_tensor(self, named: list[Any]) -> tuple[bool, str]:
        return False, "no such tensor"


def sglang(engine: Any) -> gpu_subjects.SglangSubject:
    subject = gpu_subjects.SglangSubject.__new__(gpu_subjects.SglangSubject)
    subject.engine, subject._hidden, subject._touched = engine, 8, 0
    return subject


def test_sglang_s_weights_change_in_a_session_where_there_are_sessions() -> None:
    sessions = Sessions()
    sglang(sessions).touch()
    assert sessions.calls == ["begin", "update", "end"]


def test_weights_that_do_not_change_are_an_error() -> None:
    """A sleep after such a touch would count as a sleep with changed weights."""
    with pytest.raises(RuntimeError, match="no such tensor"):
        sglang(Refusing()).touch()


@pytest.mark.parametrize(("plugin", "pauses"), [(True, 3), (False, 0)])
def test_host_memory_is_prepared_once_no_more_becomes_resident(monkeypatch, plugin: bool, pauses: int) -> None:
    """What is still being made counts as held."""
    subject, held, waited = Subject(changed=False), iter([100.0, 3000.0, 6000.0, 6010.0]), []
    monkeypatch.setattr(subject, "plugin", plugin)
    monkeypatch.setattr(gpu_subjects, "host_held_mib", lambda: next(held))
    monkeypatch.setattr(gpu_subjects.time, "sleep", waited.append)
    subject.settle()
    assert len(waited) == pauses
