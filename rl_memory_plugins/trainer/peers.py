"""The processes of one trainer: what one finds out, all must know, or they wait for each other forever."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from rl_memory_plugins.errors import RLMemoryError, from_record

T = TypeVar("T")


class Peers:
    """The ranks of a process group, or this process alone where `torch.distributed` is not in use.

    Made on all ranks together.

    Args:
        group: All ranks that hold parts of the model; by default the whole world. Agreements go over a Gloo
            group of their own, made once: they wait for no GPU, and meet no collective of a source that failed
            on one rank.
    """

    def __init__(self, group: Any = None) -> None:
        import torch.distributed as dist

        self.rank, self.size = 0, 1
        if dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD if group is None else group
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
            if self.size > 1:
                self._group = _twin(group)

    def agree(self, run: Callable[[], T]) -> list[T]:
        """Run on every rank, and give the results of all, in their order; it fails on all if it fails on one.

        Raises:
            Exception: see `share`.
        """
        try:
            value = run()
        except Exception as error:
            return self.share(None, error)
        return self.share(value)

    def share(
        self, value: Any, error: Exception | None = None, severity: Callable[[Exception], int] = lambda _: 0
    ) -> list[Any]:
        """All ranks' values, in their order.

        Raises:
            Exception: some rank brought an error: on every rank the most severe one, of the first rank that has
                it. A rank's own error is raised as it is, another's as an `RLMemoryError` with
                `details["trainer_rank"]`.
        """
        mine = None if error is None else (severity(error), _record(error))
        everyone: list[Any] = [(value, mine)]
        if self.size > 1:
            import torch.distributed as dist

            try:
                sent = pickle.dumps((value, mine))
            except Exception as failure:  # the others wait for something
                error = error or failure
                sent = pickle.dumps((None, (severity(error), _bare_record(error))))
            shared: list[Any] = [None] * self.size
            dist.all_gather_object(shared, sent, group=self._group)
            everyone = [pickle.loads(one) for one in shared]
        failed = [rank for rank, (_, failure) in enumerate(everyone) if failure is not None]
        if not failed:
            return [one for one, _ in everyone]
        worst = max(failed, key=lambda rank: (everyone[rank][1][0], -rank))
        if worst == self.rank and error is not None:
            raise error
        other = from_record(everyone[worst][1][1])
        other.details.setdefault("trainer_rank", worst)
        raise other


_twins: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _twin(group: Any) -> Any:
    """The Gloo group of the same ranks that only agreements use."""
    import torch.distributed as dist

    if group not in _twins:
        ranks = None if group is dist.group.WORLD else dist.get_process_group_ranks(group)
        _twins[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=ranks is not None)
    return _twins[group]


def _record(error: Exception) -> dict[str, Any]:
    return error.to_record() if isinstance(error, RLMemoryError) else _bare_record(error)


def _bare_record(error: Exception) -> dict[str, Any]:
    """Text only, which can always be sent."""
    return RLMemoryError(f"{type(error).__name__}: {error}", type=type(error).__name__).to_record()
