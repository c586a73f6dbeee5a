"""Whether what the engines wake fits on the devices beside what a trainer has there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from rl_memory_plugins.errors import OutOfMemoryError, RLMemoryError
from rl_memory_plugins.tags import PUBLIC_TAGS, Tag, TagState
from rl_memory_plugins.trainer.engine_handle import EngineHandle
from rl_memory_plugins.trainer.pausable_part import Pausable

ROOM_BYTES = 4 << 30
"""Bytes of a GPU that must be free beside the engines' weights. Both sides of an update allocate buffers."""


AMPLE_BYTES = 16 << 30
"""Bytes of a GPU that must be free beside awake engines if torch's cache of the trainer goes only while they wake, or
all of the trainer only behind them. Engines compute with memory that they do not count as asleep."""


class Needs(NamedTuple):
    """What the engines of one process need to wake, in bytes by device.

    Attributes:
        weights: For their weights; `None` if an engine has no way to tell. One that fails to tell needs nothing.
        everything: For all of their tags; `None` if an engine does not tell.
    """

    weights: dict[str, int] | None
    everything: dict[str, int] | None


class Room(NamedTuple):
    """What one process knows, in bytes by device.

    Attributes:
        needs: What its engines need.
        free: What is free on the devices of its memories.
        leaving: What its memories will free there: tags that sleep already free nothing.
        cache: What torch's cache of this process holds there, and an emptying would free.
        behind: Whether its parts can leave while the engines answer.
    """

    needs: Needs
    free: dict[str, int]
    leaving: dict[str, int]
    cache: dict[str, int]
    behind: bool = False


def needs_of(engines: Sequence[EngineHandle]) -> Needs:
    """Ask the engines of this process."""
    weights: dict[str, int] = {}
    everything: dict[str, int] = {}
    all_tell = True
    for engine in engines:
        ask = getattr(engine, "asleep_bytes", None)
        if ask is None:
            return Needs(None, None)
        try:
            asleep = {tag: ask(tag.value) for tag in PUBLIC_TAGS}
        except Exception:  # as any call of an engine may fail, e.g. with an error of Ray
            all_tell = False
            continue  # it will hardly wake; and if it does and lacks memory, it wakes again later
        _add(weights, asleep[Tag.WEIGHTS])
        for of_tag in asleep.values():
            _add(everything, of_tag)
    return Needs(weights, everything if all_tell else None)


def room(needs: Needs, memories: Mapping[Pausable, Iterable[str]], *, behind: bool = False) -> Room:
    """What this process knows now. `memories`: the tags that will leave, by memory."""
    free: dict[str, int] = {}
    leaving: dict[str, int] = {}
    cache: dict[str, int] = {}
    for memory, tags in memories.items():
        device, free_bytes = memory.device_memory()
        status = memory.status()
        free[device], cache[device] = free_bytes, cached_bytes(memory.device)
        awake = [status[tag] for tag in set(tags) if status[tag].state is TagState.RESIDENT]
        leaving[device] = leaving.get(device, 0) + sum(tag.bytes for tag in awake)
    return Room(needs, free, leaving, cache, behind)


def cached_bytes(device: torch.device) -> int:
    """Bytes that torch's cache holds on this device in this process."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def suffices(rooms: Sequence[Room]) -> bool:
    """Whether all engines can wake their weights, by what all processes know."""
    needed: dict[str, int] = {}
    for one in rooms:
        if one.needs.weights is None:
            return False
        _add(needed, one.needs.weights.items())
    free = _free(rooms)
    return all(nbytes + ROOM_BYTES <= free[device] for device, nbytes in needed.items() if device in free)


def is_ample(rooms: Sequence[Room]) -> bool:
    """Whether the trainer's caches can stay until the engines wake all of their memory."""
    return suffices(rooms) and _all_fit(rooms)


def cache_may_stay(rooms: Sequence[Room]) -> bool:
    """Whether the trainer's caches can stay, as by `is_ample`, and do not keep the engines from opening early.

    To empty a cache before the copies takes milliseconds, and to wait for the copies may take seconds.
    """
    emptied = [one._replace(leaving=one.cache) for one in rooms]
    return is_ample(rooms) and (holds_all(rooms) or not (_leave_behind(rooms) and _all_fit(emptied)))


def holds_all(rooms: Sequence[Room]) -> bool:
    """Whether the engines can open beside all that the trainer has, which then leaves behind them."""
    return _leave_behind(rooms) and _all_fit([one._replace(leaving={}) for one in rooms])


def _leave_behind(rooms: Iterable[Room]) -> bool:
    return all(one.behind for one in rooms)


def _all_fit(rooms: Iterable[Room]) -> bool:
    """Whether all of the engines fit once `leaving` has gone, with ample room."""
    needed: dict[str, int] = {}
    freed: dict[str, int] = {}
    for one in rooms:
        if one.needs.everything is None:
            return False
        _add(needed, one.needs.everything.items())
        _add(freed, one.leaving.items())
    free = _free(rooms)
    return all(needed.get(device, 0) + AMPLE_BYTES <= free[device] + freed.get(device, 0) for device in free)


def _free(rooms: Iterable[Room]) -> dict[str, int]:
    free: dict[str, int] = {}
    for one in rooms:
        for device, nbytes in one.free.items():
            free[_memory(device)] = min(nbytes, free.get(_memory(device), nbytes))
    return free


def _add(total: dict[str, int], more: Iterable[tuple[str, int]]) -> None:
    for device, nbytes in more:
        total[_memory(device)] = total.get(_memory(device), 0) + nbytes


def _memory(device: str) -> str:
    return "cpu" if device.startswith("cpu:") else device  # the ranks of a CPU share one memory


def lacks_memory(error: RLMemoryError) -> bool:
    """Whether an engine or the trainer has run out of memory. Errors of updates carry torch's type as a detail."""
    if isinstance(error, OutOfMemoryError) or error.details.get("type") == "OutOfMemoryError":
        return True
    # CUDA and NCCL allocate memory outside torch's allocator, and their errors have no type of their own.
    by_driver = error.details.get("type") in ("AcceleratorError", "DistBackendError", "RuntimeError")
    return by_driver and "out of memory" in error.message
