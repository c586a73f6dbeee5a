"""Events are numbered from 1, bounded, and shared by processes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from histories import BASE_NS, EXAMPLE, event

from rl_memory_plugins.timeline.records import Event
from rl_memory_plugins.timeline.ring import EventRing


def add(ring: EventRing, count: int = 1, **fields: object) -> None:
    for _ in range(count):
        ring.append(lambda seq: event(seq, **fields))  # type: ignore[arg-type]


def numbers(ring: EventRing, since: int = 0) -> list[int]:
    return [one.seq for one in events(ring, since)]


def events(ring: EventRing, since: int) -> list[Event]:
    return [msgspec.json.decode(line, type=Event) for line in ring.after(since)[3]]


def test_events_are_numbered_from_one_and_asked_for_by_the_last_number() -> None:
    ring = EventRing()
    assert ring.after(0)[1:] == (0, 0, [])
    add(ring, 3, error="WeightUpdateError", message="line\nof \u00e9")
    name, last, dropped, _ = ring.after(1)
    assert (last, dropped, numbers(ring, 1)) == (3, 0, [2, 3])
    assert events(ring, 1)[0] == event(2, error="WeightUpdateError", message="line\nof \u00e9")
    assert ring.after(3) == (name, 3, 0, [])


def test_a_number_of_a_former_timeline_begins_at_the_first_event() -> None:
    ring = EventRing()
    add(ring, 2)
    assert numbers(ring, since=500) == [1, 2]
    assert EventRing().after(0)[0] != ring.after(0)[0], "each has its own name"


def test_a_full_ring_keeps_the_newer_events(tmp_path: Path) -> None:
    file = tmp_path / "ring"
    ring = EventRing(str(file), kept_bytes=4096)
    add(ring, 100)
    kept = numbers(ring)
    assert 1 < len(kept) < 100
    assert kept == list(range(101 - len(kept), 101))
    assert ring.after(0)[2] == 100 - len(kept)
    assert file.stat().st_size <= 4096


def test_an_event_larger_than_the_ring_is_kept_alone(tmp_path: Path) -> None:
    ring = EventRing(str(tmp_path / "ring"), kept_bytes=4096)
    add(ring, 3)
    add(ring, message="m" * 5000)
    assert numbers(ring)[-1] == 4
    add(ring)
    assert numbers(ring)[-1] == 5


def refused(ring: EventRing, count: int = 1, start_ns: int = BASE_NS, **fields: object) -> None:
    for _ in range(count):
        add(ring, start_ns=start_ns, steps=[], outcome="failed", **{"error": "StateConflictError", **fields})
        start_ns += 10


def test_equal_refusals_are_one_event_with_the_number_of_the_last() -> None:
    ring = EventRing()
    add(ring)
    refused(ring, 64)
    [slept, flood] = events(ring, 0)
    assert (slept.seq, flood.seq, flood.first_seq, flood.count) == (1, 65, 2, 64)
    assert (flood.start_ns, flood.duration_ns) == (BASE_NS, 63 * 10 + 1000), "from the first call to the last"
    assert numbers(ring, since=40) == [65], "who knows some of them is told of the others"
    assert ring.after(65)[3] == []


def test_refusals_of_several_kinds_that_alternate() -> None:
    ring = EventRing()
    for number in range(50):
        refused(ring, message=f"{number} bytes are free", error="DeviceMemoryError")
        refused(ring, operation="wake_up")
        refused(ring, level=number % 2)
    found = events(ring, 0)
    assert [(one.operation, one.level, one.count) for one in found] == [
        ("sleep", 0, 25),
        ("sleep", None, 50),
        ("wake_up", None, 50),
        ("sleep", 1, 25),
    ]
    assert found[1].message == "49 bytes are free"
    assert [one.seq for one in found] == sorted(one.seq for one in found)


@pytest.mark.parametrize(
    "fields",
    [
        {"error": "WeightUpdateError"},  # it may have changed something
        {"message": "another reason"},
        {"tags": ["weights"]},
        {"weight_version": "v2"},
        {"after": [EXAMPLE.events[0].after[0]], "before": [EXAMPLE.events[0].before[0]]},
    ],
)
def test_calls_that_are_not_equal_stay_apart(fields: dict[str, object]) -> None:
    ring = EventRing()
    refused(ring)
    refused(ring, **fields)  # type: ignore[arg-type]
    refused(ring, **fields)  # type: ignore[arg-type]
    assert events(ring, 0)[0].count == 1 and len(numbers(ring)) == (3 if len({"error", "after"} & {*fields}) else 2)


def test_a_transition_that_completes_parts_refusals() -> None:
    ring = EventRing()
    refused(ring, 5)
    add(ring)
    refused(ring, 5)
    assert [(one.seq, one.count) for one in events(ring, 0)] == [(5, 5), (6, 1), (11, 5)]


@pytest.mark.parametrize("seen", [True, False], ids=["a transition that failed", "one that bypassed the server"])
def test_memory_that_has_moved_parts_refusals(seen: bool) -> None:
    awake, asleep = EXAMPLE.events[0].before, EXAMPLE.events[0].after
    assert awake[0].tags != asleep[0].tags
    ring = EventRing()
    refused(ring, 2, operation="update_weights", before=awake, after=awake)
    if seen:
        refused(ring, error="EngineFaultError", before=awake, after=asleep)
    refused(ring, 3, operation="update_weights", before=asleep, after=asleep)
    kept = [one for one in events(ring, 0) if one.operation == "update_weights"]
    assert [one.count for one in kept] == [2, 3]
    assert all(one.before == one.after for one in kept), "no refused call shows memory that another one has moved"


def test_a_flood_drops_no_transition(tmp_path: Path) -> None:
    file = tmp_path / "ring"
    ring = EventRing(str(file), kept_bytes=128 << 10)
    memory = [*EXAMPLE.events[0].after] * 8
    for _ in range(8):
        add(ring, before=memory, after=memory)
        refused(ring, 200, before=memory, after=memory)
    assert [one.count for one in events(ring, 0)] == [1, 200] * 8
    assert ring.after(0)[2] == 0, "nothing was dropped"


def test_a_full_ring_goes_on_with_a_flood(tmp_path: Path) -> None:
    file = tmp_path / "ring"
    ring = EventRing(str(file), kept_bytes=2048)
    for number in range(40):
        refused(ring, 3, tags=["t" * (number % 7)])
        assert numbers(ring)[-1] == 3 * number + 3 and file.stat().st_size <= 2048
    assert sum(one.count for one in events(ring, 0)) < 120


def test_a_kept_event_may_stand_for_calls_before_the_last_one_that_is_gone(tmp_path: Path) -> None:
    ring = EventRing(str(tmp_path / "ring"), kept_bytes=4096)
    while not (dropped := ring.after(0)[2]):
        refused(ring, tags=[str(ring.after(0)[1])])
        refused(ring, operation="wake_up")
    wakes = events(ring, 0)[-1]
    assert (wakes.operation, wakes.first_seq, wakes.count) == ("wake_up", 2, wakes.seq // 2)
    assert wakes.first_seq < dropped < wakes.seq


def die_after(writes: int, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Act again and again until the writer dies, in the middle of a write, after so many whole ones."""
    whole, left = os.pwrite, iter(range(writes))

    def pwrite(handle: int, content: bytes, at: int) -> int:
        if next(left, None) is not None:
            return whole(handle, content, at)
        if len(content) > 32:  # a header is written at once
            whole(handle, content[: len(content) // 2], at)
        raise KeyboardInterrupt

    with monkeypatch.context() as dying, pytest.raises(KeyboardInterrupt):
        dying.setattr(os, "pwrite", pwrite)
        while True:
            act()


@pytest.mark.parametrize("writes", range(5))
def test_a_writer_that_dies_leaves_whole_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int) -> None:
    """It dies after so many writes: in one of the event, or in one of those that make room for it."""
    ring = EventRing(str(tmp_path / "ring"), kept_bytes=1500)
    add(ring, 4)
    die_after(writes, monkeypatch, lambda: add(ring))
    known = numbers(ring)
    add(ring)
    found = numbers(ring)
    assert found[-1] == ring.after(0)[1]
    assert found == [*known, found[-1]][-len(found) :], "what was there stays, but for older events that made room"
    assert found == list(range(found[0], found[-1] + 1))


@pytest.mark.parametrize("writes", range(3))
def test_a_writer_that_dies_while_it_counts_a_refusal_loses_refusals_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    ring = EventRing(str(tmp_path / "ring"))
    add(ring, 2)
    refused(ring, 3)
    refused(ring, 3, operation="wake_up")
    die_after(writes, monkeypatch, lambda: refused(ring))
    assert [one.error for one in events(ring, 0)][:2] == [None, None]
    refused(ring)
    add(ring)
    found = events(ring, 0)
    assert [one.seq for one in found] == sorted({one.seq for one in found}) and found[-1].error is None


def append_many(path: str, count: int) -> None:
    add(EventRing(path), count)


def test_processes_share_a_ring(tmp_path: Path) -> None:
    path = str(tmp_path / "ring")
    ring = EventRing(path)
    context = multiprocessing.get_context("fork")
    others = [context.Process(target=append_many, args=(path, 50)) for _ in range(3)]
    for other in others:
        other.start()
    add(ring, 50)
    for other in others:
        other.join()
        assert other.exitcode == 0
    assert numbers(ring) == list(range(1, 201))
    assert ring.after(0)[0] == EventRing(path).after(0)[0]


def test_a_ring_that_cannot_be_opened_says_so(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        EventRing(str(tmp_path / "no folder" / "ring"))
