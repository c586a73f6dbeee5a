"""Whether the engines' weights fit on the devices beside all that a trainer has there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rl_memory_plugins.errors import OutOfMemoryError, RLMemoryError
from rl_memory_plugins.tags import Tag
from rl_memory_plugins.trainer.engine_handle import EngineHandle
from rl_memory_plugins.trainer.pausable_part import Pausable

ROOM_BYTES = 4 << 30
"""Bytes of a GPU that must be free beside the engines' weights. Both sides of an update allocate buffers."""


class Room(NamedTuple):
    """What one process knows, in bytes by device.

    Attributes:
        needed: What its engines need to wake their weights; `None` if an engine does not tell.
        free: What is free on the devices of its memories.
    """

    needed: dict[str, int] | None
    free: dict[str, int]


def room(engines: Sequence[EngineHandle], memories: Iterable[Pausable]) -> Room:
    """What this process knows."""
    free = dict(memory.device_memory() for memory in memories)
    needed: dict[str, int] = {}
    for engine in engines:
        ask = getattr(engine, "asleep_bytes", None)
        if ask is None:
            return Room(None, free)
        try:
            asleep = ask(Tag.WEIGHTS.value)
        except RLMemoryError:
            continue  # it will hardly wake; and if it does and lacks memory, it wakes again later
        for device, nbytes in asleep:
            needed[device] = needed.get(device, 0) + nbytes
    return Room(needed, free)


def suffices(rooms: Iterable[Room]) -> bool:
    """Whether all engines can wake their weights, by what all processes know."""
    needed: dict[str, int] = {}
    free: dict[str, int] = {}
    for one in rooms:
        if one.needed is None:
            return False
        for device, nbytes in one.needed.items():
            needed[_memory(device)] = needed.get(_memory(device), 0) + nbytes
        for device, nbytes in one.free.items():
            free[_memory(device)] = min(nbytes, free.get(_memory(device), nbytes))
    return all(nbytes + ROOM_BYTES <= free[device] for device, nbytes in needed.items() if device in free)


def _memory(device: str) -> str:
    return "cpu" if device.startswith("cpu:") else device  # the ranks of a CPU share one memory


def lacks_memory(error: RLMemoryError) -> bool:
    """Whether an engine or the trainer has run out of memory. Errors of updates carry torch's type as a detail."""
    if isinstance(error, OutOfMemoryError) or error.details.get("type") == "OutOfMemoryError":
        return True
    # CUDA and NCCL allocate memory outside torch's allocator, and their errors have no type of their own.
    by_driver = error.details.get("type") in ("AcceleratorError", "DistBackendError", "RuntimeError")
    return by_driver and "out of memory" in error.message
