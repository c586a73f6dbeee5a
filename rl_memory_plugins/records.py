"""The records that ranks, engines and clients exchange, and that HTTP answers contain.

All are msgspec structs. They travel as msgpack between processes and as JSON over HTTP, never as pickles.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from rl_memory_plugins.capabilities import EVERYTHING, Capabilities
from rl_memory_plugins.tags import Content, Draft, TagState

INITIAL_VERSION = "default"
"""The version of the weights that an engine starts with, by the name that vLLM and SGLang give it."""

LONGEST_VERSION = 1024
"""The most characters of a weight version. Every status holds the version, and the status board is limited."""

LONGEST_ADAPTER = 256
"""The most characters of an adapter's name, and of its version."""


class TagStatus(msgspec.Struct, frozen=True):
    """One tag on one rank."""

    state: TagState
    bytes: int  # virtual size of the tag's blocks
    host_bytes: int = 0  # bytes of its content held in host memory


class RankStatus(msgspec.Struct, frozen=True):
    """The memory of one rank at the time of the record."""

    rank: int
    device: str
    allocator: str
    tags: dict[str, TagStatus]
    content: Content
    content_epoch: int
    device_free_bytes: int
    device_total_bytes: int
    host_arena_bytes: int  # host memory held by the arena alone, in use or kept for the next sleep
    notes: tuple[str, ...] = ()  # limits of this rank, for a person
    left: dict[str, int] = {}  # bytes that stay on the device while asleep, by cause
    draft: Draft | None = None  # whether the draft model goes with the weights; `None` without a draft model
    host_shared: dict[
        str, int
    ] = {}  # bytes of the copies that other ranks may map too, by a name that is the same there


class WeightsStatus(NamedTuple):
    """The part of `RankStatus` that changes when other code loads weights."""

    content: str
    content_epoch: int
    draft: str | None

    @classmethod
    def of(cls, rank: RankStatus) -> WeightsStatus:
        return cls(rank.content.value, rank.content_epoch, rank.draft and rank.draft.value)

    def changed(self, rank: RankStatus) -> RankStatus:
        """The status of the rank with this part."""
        return msgspec.structs.replace(
            rank,
            content=Content(self.content),
            content_epoch=self.content_epoch,
            draft=None if self.draft is None else Draft(self.draft),
        )


#: `EngineStatus.busy` of an engine whose ranks did not report their state. Any later command asks them again.
UNKNOWN = "status"

#: `EngineStatus.busy` of an engine on another host that does not answer: another client's transition may be under way.
UNANSWERED = "unanswered"


class AdapterStatus(msgspec.Struct, frozen=True):
    """One version of a LoRA adapter that `update_adapter` has sent. New requests of the name use it."""

    name: str
    version: str
    number: int  # of this version, in the engine's own tables
    bytes: int  # of its tensors, as sent


class EngineStatus(msgspec.Struct, frozen=True):
    """One engine (one data-parallel rank): its ranks, and the fields that the admission rule reads."""

    ranks: list[RankStatus]
    weight_version: str = INITIAL_VERSION
    paused: bool = False  # by sleep(level=0), or because the engine's own work after a wake failed
    busy: str = ""  # the operation under way: "", a key of `transition.STEPS`, `UNKNOWN` or `UNANSWERED`
    engine_rank: int = 0
    capabilities: Capabilities = EVERYTHING
    adapters: tuple[AdapterStatus, ...] = ()
    idle: bool = False  # asleep, or about to be, because no request came (`Sleep.idle_s`)

    @property
    def under_way(self) -> str:
        """The meaning of `busy`, for a message; empty if the engine is not busy."""
        if self.busy == UNKNOWN:
            return "its ranks did not report their state: call wake_up(), which asks them again"
        if self.busy == UNANSWERED:
            return "it does not answer: the transition of another client may be under way"
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
    """The weight version of all engines. They differ only if an update broke off between two engines."""
    return next((engine.weight_version for engine in engines), INITIAL_VERSION)


class TagChange(msgspec.Struct, frozen=True):
    """The effect of one transition on one tag of one rank."""

    rank: int
    tag: str
    state: TagState
    bytes_released: int = 0
    bytes_restored: int = 0
    bytes_copied: int = 0


class StepTime(msgspec.Struct, frozen=True):
    """When one step ran on one rank, by the wall clock of the rank's host."""

    step: str  # a key of `Report.seconds`
    rank: int | None  # `None` for a step of the engine as a whole
    start_ns: int  # in nanoseconds since 1970
    end_ns: int
    seconds: float  # less than from start to end if the step ran in several parts
    engine: int = 0  # the data-parallel engine


class Report(msgspec.Struct, frozen=True):
    """The report of one transition. A step that did not run took 0.0 seconds."""

    changes: list[TagChange]
    seconds: dict[str, float]  # by step; the slowest rank counts
    details: dict[str, Any] = {}
    steps: list[StepTime] = []  # those that ran, of each engine and each rank


T = TypeVar("T")


class Reply(msgspec.Struct, Generic[T]):
    """The answer of a rank or an engine: a result or an error record. It is returned, never raised."""

    rank: int
    result: Any = None
    error: dict[str, Any] | None = None
