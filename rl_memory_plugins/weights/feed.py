"""The tensors of one update on their way into the engine's own loader."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Feed:
    """An iterator of names and tensors. Each tensor is a copy, which the loader may keep, unless it is lent.

    Args:
        tensors: The iterator itself.
    """

    def __init__(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._tensors = tensors
        self._lent: Collection[str] = ()
        self._finish: Callable[[], None] = lambda: None

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        return next(self._tensors)

    def lend(self, names: Collection[str], finish: Callable[[], None]) -> None:
        """Called by the loader: tensors of these names need not be copies.

        Args:
            names: The names.
            finish: Queues on the current stream all that still has to be read of lent tensors. It is called before the
                trainer writes to their memory.
        """
        self._lent, self._finish = names, finish

    def lends(self, name: str) -> bool:
        return name in self._lent

    def finish(self) -> None:
        """Nothing of lent tensors is read by what is queued later."""
        self._finish()
