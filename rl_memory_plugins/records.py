"""The records that travel between ranks, engine and client, and that HTTP answers are made of.

All are msgspec structs: they encode to msgpack between processes and to JSON for HTTP, never to pickle.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import msgspec

from rl_memory_plugins.tags import Content, TagState

INITIAL_VERSION = "initial"
"""Of the weights that an engine starts with."""

LONGEST_VERSION = 1024
"""Characters of a weight version: it stands in every status, for which there is so much room."""


class TagStatus(msgspec.Struct, frozen=True):
    """One tag on one rank."""

    state: TagState
    bytes: int  # virtual size of the tag's blocks
    host_bytes: int = 0  # bytes of its content held in host memory


class RankStatus(msgspec.Struct, frozen=True):
    """One rank's memory, as it was when the record was made."""

    rank: int
    device: str
    allocator: str
    tags: dict[str, TagStatus]
    content: Content
    content_epoch: int
    device_free_bytes: int
    device_total_bytes: int
    host_arena_bytes: int  # host memory held by the arena, in use or kept for the next sleep
    notes: tuple[str, ...] = ()  # what this rank cannot do, in words, e.g. why graphs are not pausable
    left: dict[str, int] = {}  # what stays on the device while asleep, by cause, in bytes


#: What keeps an engine busy whose ranks did not say how they are; any later command asks them again.
UNKNOWN = "status"

#: What may keep an engine on another host busy that does not answer: a transition of another client, or a long step.
UNANSWERED = "unanswered"


class EngineStatus(msgspec.Struct, frozen=True):
    """One engine (one data-parallel rank): its ranks, and what the admission rule looks at."""

    ranks: list[RankStatus]
    weight_version: str = INITIAL_VERSION
    paused: bool = False  # by sleep(level=0), or by a wake whose work in the engine failed
    busy: str = ""  # the operation under way: "", "sleep", "wake_up", "update_weights"; or `UNKNOWN`, `UNANSWERED`
    engine_rank: int = 0

    @property
    def under_way(self) -> str:
        """What `busy` means, for a message; empty if nothing keeps the engine busy."""
        if self.busy == UNKNOWN:
            return "its ranks did not say how they are: wake_up() asks them again"
        if self.busy == UNANSWERED:
            return "it does not answer: another client's transition may be under way"
        return f"{self.busy} is under way" if self.busy else ""

    @property
    def content(self) -> Content:
        """The worst content state of all ranks."""
        order = [Content.VALID, Content.STALE, Content.UPDATING, Content.FAILED]
        return max((rank.content for rank in self.ranks), key=order.index, default=Content.VALID)

    def asleep_tags(self) -> list[str]:
        """The tags that are not resident on every rank."""
        asleep = {name for rank in self.ranks for name, tag in rank.tags.items() if tag.state is not TagState.RESIDENT}
        return sorted(asleep)


def weight_version(engines: Iterable[EngineStatus]) -> str:
    """The version of all engines' weights; they differ only when an update broke off between them."""
    return next((engine.weight_version for engine in engines), INITIAL_VERSION)


class TagChange(msgspec.Struct, frozen=True):
    """What one transition did to one tag on one rank."""

    rank: int
    tag: str
    state: TagState
    bytes_released: int = 0
    bytes_restored: int = 0
    bytes_copied: int = 0


class Report(msgspec.Struct, frozen=True):
    """The answer to a transition. A step that did not run reports 0.0 seconds."""

    changes: list[TagChange]
    seconds: dict[str, float]  # by step; the slowest rank counts
    details: dict[str, Any] = {}


T = TypeVar("T")


class Reply(msgspec.Struct, Generic[T]):
    """What a rank or an engine answers: a result or an error record. It is returned, never raised."""

    rank: int
    result: Any = None
    error: dict[str, Any] | None = None
