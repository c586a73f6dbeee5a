"""Two-phase calls over many ranks or engines: all of them prepare; only if all succeed, all of them act."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rl_memory_plugins.errors import RLMemoryError, from_record
from rl_memory_plugins.records import Reply


class RankGroup(Protocol):
    """The ranks of one engine, as its controller reaches them."""

    def call(self, method: str, **arguments: Any) -> list[Reply[Any]]:
        """Run a method of `RankAgent` on every rank. Returns one reply of each, in the order of ranks. Never raises."""


def prepare(ranks: RankGroup, operation: str, **arguments: Any) -> None:
    """Run the first phase of `operation` on all ranks. If a rank fails, abort the operation on all ranks.

    Raises:
        RLMemoryError: the error of the first rank that failed; `rank` and `failed_ranks` in its details name the ranks.
    """
    call_or_undo(ranks, f"prepare_{operation}", lambda: abort(ranks, operation), **arguments)


def call_or_undo(ranks: RankGroup, method: str, undo: Callable[[], object], /, **arguments: Any) -> list[Reply[Any]]:
    """Run a method on all ranks. If a rank fails, or is interrupted, run `undo`, and raise as `prepare` does."""
    try:
        return raise_failures(ranks.call(method, **arguments))
    except BaseException as error:
        if isinstance(error, RLMemoryError) or not isinstance(error, Exception):
            undo()
        raise


def commit(ranks: RankGroup, operation: str) -> list[Reply[Any]]:
    """Run the second phase. Raises as `prepare` does, but undoes nothing."""
    return raise_failures(ranks.call(f"commit_{operation}"))


def abort(ranks: RankGroup, operation: str) -> None:
    ranks.call(f"abort_{operation}")


_NO_CONNECTION = ("unreachable", "certificate")


def raise_failures(replies: Sequence[Reply[Any]], participant: str = "rank") -> list[Reply[Any]]:
    """Return the replies.

    Raises:
        RLMemoryError: the first error among the replies; its details name every participant that failed. A rank that
            cannot reach the trainer counts before ranks that only saw the trainer give up.
    """
    failed = [reply for reply in replies if reply.error is not None]
    if not failed:
        return list(replies)
    errors = {reply.rank: from_record(reply.error) for reply in failed if reply.error is not None}
    first = min(errors, key=lambda rank: errors[rank].details.get("reason") not in _NO_CONNECTION)
    error = errors[first]
    error.details.setdefault(participant, first)
    error.details.setdefault(f"failed_{participant}s", [reply.rank for reply in failed])
    raise error


def raise_engine_failures(replies: Sequence[Reply[Any]]) -> list[Reply[Any]]:
    """`raise_failures` for the replies of data-parallel engines."""
    return raise_failures(replies, "engine_rank")
