"""Events are numbered from 1, bounded, and shared by processes."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import msgspec
import pytest
from histories import event

from rl_memory_plugins.timeline.records import Event
from rl_memory_plugins.timeline.ring import EventRing


def add(ring: EventRing, count: int = 1, **fields: object) -> None:
    for _ in range(count):
        ring.append(lambda seq: event(seq, **fields))  # type: ignore[arg-type]


def numbers(ring: EventRing, since: int = 0) -> list[int]:
    return [one.seq for one in events(ring, since)]


def events(ring: EventRing, since: int) -> list[Event]:
    return [msgspec.json.decode(line, type=Event) for line in ring.after(since)[2]]


def test_events_are_numbered_from_one_and_asked_for_by_the_last_number() -> None:
    ring = EventRing()
    assert ring.after(0)[1:] == (0, [])
    add(ring, 3, error="HostMemoryError", message="line\nof \u00e9")
    name, last, _ = ring.after(1)
    assert (last, numbers(ring, 1)) == (3, [2, 3])
    assert events(ring, 1)[0] == event(2, error="HostMemoryError", message="line\nof \u00e9")
    assert ring.after(3) == (name, 3, [])


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
    assert file.stat().st_size <= 4096


def test_an_event_larger_than_the_ring_is_kept_alone(tmp_path: Path) -> None:
    ring = EventRing(str(tmp_path / "ring"), kept_bytes=4096)
    add(ring, 3)
    add(ring, message="m" * 5000)
    assert numbers(ring)[-1] == 4
    add(ring)
    assert numbers(ring)[-1] == 5


@pytest.mark.parametrize("writes", range(5))
def test_a_writer_that_dies_leaves_whole_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int) -> None:
    """It dies after so many writes: in one of the event, or in one of those that make room for it."""
    ring = EventRing(str(tmp_path / "ring"), kept_bytes=1500)
    add(ring, 4)
    whole, left = os.pwrite, iter(range(writes))

    def pwrite(handle: int, content: bytes, at: int) -> int:
        if next(left, None) is not None:
            return whole(handle, content, at)
        if len(content) > 24:  # a header is written at once
            whole(handle, content[: len(content) // 2], at)
        raise KeyboardInterrupt

    with monkeypatch.context() as dying, pytest.raises(KeyboardInterrupt):
        dying.setattr(os, "pwrite", pwrite)
        while True:
            add(ring)
    known = numbers(ring)
    add(ring)
    found = numbers(ring)
    assert found[-1] == ring.after(0)[1]
    assert found == [*known, found[-1]][-len(found) :], "what was there stays, but for older events that made room"
    assert found == list(range(found[0], found[-1] + 1))


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
