"""Finds out whether a loader writes at all. A record of every write makes loads of small tensors several times slower.

The detector sees the operators of its thread, and of the calls that this thread submits to thread pools. After the
first write it is in the way no longer: it leaves when the loader asks for its next tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from rl_memory_plugins.weights.pools import inside, intercepted
from rl_memory_plugins.weights.write_recorder import written_by

if TYPE_CHECKING:
    import torch

Storages = Callable[[int], bool]


class WriteDetector:
    """Notes whether code writes.

    Args:
        counts: Whether a write into the storage at an address counts; `None` if every write counts.

    Attributes:
        found: A write that counts has happened.
        others: The addresses of the other storages that were written.
    """

    def __init__(self, counts: Storages | None = None) -> None:
        self._counts = counts
        self.found = False
        self.others: set[int] = set()

    @property
    def found_any(self) -> bool:
        """Whether a write has happened, into whatever storage."""
        return self.found or bool(self.others)

    @contextmanager
    def detecting(self) -> Iterator[None]:
        """The body may write."""
        if self.found:
            yield
            return
        mode = _Mode(self)
        with intercepted(inside(self.detecting)):
            mode.__enter__()
            try:
                yield
            finally:
                mode.leave()

    def note(self, tensor: torch.Tensor) -> None:
        """Note a write into a tensor."""
        if tensor.is_meta:
            return
        address = tensor.untyped_storage().data_ptr()
        if self._counts is None or self._counts(address):
            self.found = True
        else:
            self.others.add(address)


class _Mode(TorchDispatchMode):  # type: ignore[misc]
    """The operators run unchanged."""

    def __init__(self, detector: WriteDetector) -> None:
        super().__init__()
        self._detector = detector
        self._entered = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._detector.found and func._schema.is_mutable:
            for tensor in written_by(func, args, kwargs):
                self._detector.note(tensor)
        return result

    def leave(self) -> None:
        if self._entered:
            self._entered = False
            self.__exit__(None, None, None)

    def leave_early(self) -> None:
        """Leave if a write was found and no other mode was entered since."""
        if self._detector.found and _get_current_dispatch_mode() is self:
            self.leave()


def leaving_early(weights: Iterable[Any]) -> Iterable[Any]:
    """The same weights, for a loader that runs under a detector. A list stays a list."""
    return _List(weights) if isinstance(weights, list) else _each(weights)


def _each(weights: Iterable[Any]) -> Iterator[Any]:
    for item in weights:
        mode = _get_current_dispatch_mode()
        if isinstance(mode, _Mode):
            mode.leave_early()
        yield item


class _List(list[Any]):
    def __iter__(self) -> Iterator[Any]:
        return _each(super().__iter__())
