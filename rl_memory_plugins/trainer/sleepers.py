"""The memories of this process in which tensors can be asleep."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from rl_memory_plugins.trainer.sleeping_content import remnants

if TYPE_CHECKING:
    import torch


class Sleeper(Protocol):
    """Memory of tensors that can be asleep: `PausableMemory`.

    Attributes:
        may_sleep: Whether something of it may be asleep, or its content on its way.
    """

    @property
    def may_sleep(self) -> bool: ...

    def host_bytes(self, storage: Any) -> torch.Tensor | None:
        """The content of a sleeping storage in host memory, uint8, [bytes]; `None` if the storage is not asleep."""

    def owned(self) -> Callable[[int], bool]:
        """A function that tells whether an address belongs to a tag of this memory, awake or asleep."""

    def await_leaving(self) -> None:
        """Wait until device memory that leaves behind an earlier call is free. Raises nothing."""


class Sleepers:
    """The memories that exist. Unlike those of a `WeakSet`, they can be looked at while another thread makes one.

    An update looks at them for each of its tensors, which a `WeakValueDictionary` makes ten times as slow.
    """

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[Sleeper]] = {}  # by id

    def add(self, sleeper: Sleeper) -> None:
        key = id(sleeper)

        def ended(reference: weakref.ref[Sleeper]) -> None:
            if self._references.get(key) is reference:  # not if another memory has its id already
                del self._references[key]

        self._references[key] = weakref.ref(sleeper, ended)

    def discard(self, sleeper: Sleeper) -> None:
        self._references.pop(id(sleeper), None)

    def __bool__(self) -> bool:
        return bool(self._references)

    def __iter__(self) -> Iterator[Sleeper]:
        found = [reference() for reference in list(self._references.values())]
        return iter([sleeper for sleeper in found if sleeper is not None])


sleepers = Sleepers()
"""The memories that exist."""


def all_sleepers() -> list[Sleeper]:
    """All that `host_view` and `owned_elsewhere` ask: also what sleeps of memories that have ended."""
    return [*sleepers, *remnants]


def that_may_sleep() -> list[Sleeper]:
    """Those of `all_sleepers` of which something may be asleep."""
    if not sleepers and not remnants:  # the common case of an update, for each of its tensors
        return []
    return [sleeper for sleeper in all_sleepers() if sleeper.may_sleep]


def owned_elsewhere(own: Sleeper | None = None) -> Callable[[int], bool]:
    """A function that tells whether an address belongs to a memory other than `own`."""
    others = [sleeper.owned() for sleeper in all_sleepers() if sleeper is not own]
    return lambda address: any(is_owned(address) for is_owned in others)


def await_leaving() -> None:
    """Wait for all that still leaves in this process behind earlier calls, before device memory counts as lacking.

    What fails to leave is an error of the next call of its own memory.
    """
    for sleeper in all_sleepers():
        sleeper.await_leaving()
