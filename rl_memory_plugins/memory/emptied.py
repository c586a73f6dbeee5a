"""The copies of storages that are empty: an `Offloader` has moved them, or a move has run out of device memory."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple


class HostCopy(NamedTuple):
    content: Any  # uint8, [bytes]
    buffer: Any = None  # keeps the memory of the content; `None` if a move has left the storage empty


host_copies: weakref.WeakKeyDictionary[Any, HostCopy] = weakref.WeakKeyDictionary()
"""The copy of each emptied storage. A copy lives as long as its storage, even if the offloader is deleted."""


def nbytes_left_by_move(storage: Any) -> int:
    """The bytes of the copy if a move has left the storage empty, else 0."""
    copy = host_copies.get(storage)
    return 0 if copy is None or copy.buffer is not None else int(copy.content.nbytes)
