"""The state of a fleet, in one table."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from rl_memory_plugins.byte_size import size
from rl_memory_plugins.errors import RLMemoryError
from rl_memory_plugins.extras import needs
from rl_memory_plugins.memory.threads import in_parallel
from rl_memory_plugins.ray.handle import EngineActorHandle
from rl_memory_plugins.tags import TagState

if TYPE_CHECKING:
    from rich.table import Table

    from rl_memory_plugins.ray.fleet import EngineFleet


class EngineState(msgspec.Struct, frozen=True):
    """One engine of a fleet.

    Attributes:
        number: Its place in the fleet.
        node, pid: Where its actor runs; empty and 0 if it does not answer.
        state: `serves`; `closed`, with the reason of the admission rule; `empty` or `starting` without an engine;
            `joining` if it waits for the weights of the others; or `lost`, with the error.
        content, weight_version: Of its weights; empty without an engine.
        resident_bytes, asleep_bytes: Of its tags, on all ranks.
    """

    number: int
    state: str
    reason: str = ""
    node: str = ""
    pid: int = 0
    content: str = ""
    weight_version: str = ""
    resident_bytes: int = 0
    asleep_bytes: int = 0


def status(fleet: EngineFleet) -> list[EngineState]:
    """The state of every engine. Waits for no transition, and raises for no engine that is lost."""
    return in_parallel([partial(_state, engine) for engine in fleet.engines], "rl-memory-status")


def table(states: list[EngineState]) -> Table:
    """The states for a person. `rich.print(table(status(fleet)))` prints it."""
    with needs("cli"):
        from rich.table import Table

    found = Table("engine", "node", "pid", "state", "weights", "version", "resident", "asleep")
    for one in states:
        state = f"{one.state} ({one.reason})" if one.reason else one.state
        sizes = map(size, (one.resident_bytes, one.asleep_bytes))
        found.add_row(str(one.number), one.node, str(one.pid or ""), state, one.content, one.weight_version, *sizes)
    return found


def _state(engine: EngineActorHandle) -> EngineState:
    try:
        about = engine.about()
    except RLMemoryError as error:
        return EngineState(engine.number, "lost", error.code)
    place: dict[str, Any] = {"node": about.node, "pid": about.pid}
    if about.phase in ("empty", "starting"):
        return EngineState(engine.number, about.phase, **place)
    try:
        memory = engine.memory()
    except RLMemoryError as error:
        return EngineState(engine.number, "lost", error.code, **place)
    return EngineState(
        engine.number,
        "joining" if about.phase == "joining" else "serves" if memory["admitting"] else "closed",
        memory["reason"] or "",
        content=memory["content"],
        weight_version=memory["weight_version"],
        resident_bytes=_bytes(memory, resident=True),
        asleep_bytes=_bytes(memory, resident=False),
        **place,
    )


def _bytes(memory: dict[str, Any], *, resident: bool) -> int:
    tags = [tag for engine in memory["engines"] for rank in engine["ranks"] for tag in rank["tags"].values()]
    return sum(tag["bytes"] for tag in tags if (tag["state"] == TagState.RESIDENT.value) == resident)
