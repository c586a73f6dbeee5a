"""Tags of a `PausableMemory` as a part of a handoff."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.records import Report, TagStatus
from rl_memory_plugins.tags import TagState
from rl_memory_plugins.trainer.offloading import Moved

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Pausable(Protocol):
    """The calls of `PausableMemory` that a handoff makes."""

    device: torch.device

    def sleep(self, tags: Collection[str] | None = None) -> Report: ...
    def wake(self, tags: Collection[str] | None = None) -> Report: ...
    def prepare_sleep(self, tags: Collection[str] | None = None) -> None: ...
    def prepare_wake(self, tags: Collection[str] | None = None) -> None: ...
    def drop_gradients(self) -> None: ...
    def synchronize(self) -> None: ...
    def begin(self) -> None: ...
    def commit(self, later: Collection[str] = (), *, tags: Collection[str] | None = None) -> Report: ...
    def commit_behind(self, then: Callable[[], object] = ...) -> Mapping[str, int]: ...
    def wait(self) -> None: ...
    def abort(self) -> None: ...
    def device_memory(self) -> tuple[str, int]: ...
    def status(self) -> Mapping[str, TagStatus]: ...
    @property
    def process_groups(self) -> Sequence[Any]: ...
    @property
    def drops_gradients(self) -> bool: ...


class PausablePart:
    """Tags of a `PausableMemory`, as a `parts.Movable`."""

    def __init__(self, memory: Pausable, tags: list[str]) -> None:
        self.memory = memory
        self.tags = tags

    def offload(self) -> Moved:
        """See `PausableMemory.sleep`."""
        return moved(self.memory.sleep(self.tags))

    def load(self) -> Moved:
        """See `PausableMemory.wake`."""
        return moved(self.memory.wake(self.tags))

    def is_awake(self) -> bool:
        """Whether all of the tags are on the device. Waits for those that still leave; raises as `wait` does."""
        self.memory.wait()
        status = self.memory.status()
        return all(status[tag].state is TagState.RESIDENT for tag in self.tags)

    def awake_bytes(self, device: torch.device) -> int:
        """Bytes of the tags that are on this device."""
        return sum(tag.bytes for tag in self._status(device) if tag.state is TagState.RESIDENT)

    def resident_bytes(self, device: torch.device) -> int:
        """Bytes of the tags that torch counts as its own on this device: also those of sleeping tags."""
        return sum(tag.bytes for tag in self._status(device))

    def _status(self, device: torch.device) -> list[TagStatus]:
        if device != self.memory.device:
            return []
        status = self.memory.status()  # asks the driver about every block
        return [status[tag] for tag in self.tags]


def tags_of(parts: Iterable[object]) -> dict[Pausable, list[str]]:
    """The tags of the parts by memory. Parts of other kinds are left out."""
    tags: dict[Pausable, list[str]] = {}
    for part in parts:
        if isinstance(part, PausablePart):
            tags.setdefault(part.memory, []).extend(part.tags)
    return tags


def require_awake_groups(weights: Iterable[object], others: Iterable[object], *, from_host: bool) -> None:
    """Check that process groups which sleep with parts of a handoff are awake while it sends the weights.

    Raises:
        InvalidRequestError: a group would sleep, and the source may gather the weights by it.
    """
    sending = [group for memory in tags_of(weights) for group in memory.process_groups]
    asleep = [group for memory in tags_of(others) for group in memory.process_groups if group not in sending]
    if asleep or (sending and from_host):
        raise InvalidRequestError(
            "a process group of a PausableMemory sleeps while the weights are sent: give process_groups to the memory "
            "whose tags are in `weights`, and leave out from_host; or leave out process_groups",
            field="from_host" if from_host else "others",
        )


def commit_all(
    memories: Iterable[Pausable],
    later: Mapping[Pausable, Collection[str]] = MappingProxyType({}),
    only: Mapping[Pausable, Collection[str]] = MappingProxyType({}),
) -> list[Moved]:
    """Commit what these memories have prepared, all of them even if one fails.

    The other ranks commit all of theirs, and memories with process groups wait for this rank.

    Args:
        memories: Memories with a prepared sleep or wake.
        later, only: By memory, as `later` and `tags` of `PausableMemory.commit`.

    Raises:
        Exception: the error of the first memory that failed.
    """
    moves, failures = _on_all(
        memories, lambda memory: moved(memory.commit(later.get(memory, ()), tags=only.get(memory)))
    )
    if failures:
        raise failures[0]
    return moves


def wait_for(memories: Iterable[Pausable]) -> None:
    """Wait for what leaves these memories, all of them even if one fails.

    Raises:
        Exception: the error of the first memory that failed.
    """
    _, failures = _on_all(memories, lambda memory: memory.wait())
    for other in failures[1:]:
        logger.warning("another memory failed to leave too: %s", other)
    if failures:
        raise failures[0]


def _on_all(memories: Iterable[Pausable], act: Callable[[Pausable], T]) -> tuple[list[T], list[Exception]]:
    """Call `act` for each memory, also after one has failed. Returns: the results and the errors."""
    results: list[T] = []
    failures: list[Exception] = []
    for memory in memories:
        try:
            results.append(act(memory))
        except Exception as error:
            failures.append(error)
    return results, failures


def moved(report: Report) -> Moved:
    """The bytes and seconds of a sleep or wake."""
    nbytes = sum(change.bytes_released + change.bytes_restored for change in report.changes)
    return Moved(nbytes, sum(report.seconds.values()))
