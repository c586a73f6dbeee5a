"""The processes of one trainer: what one finds out, all must know, or they wait for each other forever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from rl_memory_plugins.errors import RLMemoryError, from_record

T = TypeVar("T")


class Peers:
    """The ranks of a process group, or this process alone where `torch.distributed` is not in use.

    Made on all ranks together.

    Args:
        group: All ranks that hold parts of the model; by default the whole world. Agreements go over Gloo, so that
            they wait for no GPU: a group of another backend gets a Gloo twin.
    """

    def __init__(self, group: Any = None) -> None:
        import torch.distributed as dist

        self.rank, self.size = 0, 1
        self._group = group
        if dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
            if self.size > 1 and dist.get_backend(group) != "gloo":
                ranks = None if group is None else dist.get_process_group_ranks(group)
                self._group = dist.new_group(ranks, backend="gloo", use_local_synchronization=ranks is not None)

    def agree(self, run: Callable[[], T], key: Callable[[Exception], Any] = lambda _: 0) -> list[T]:
        """Run on every rank; all ranks' results, in their order.

        Raises:
            Exception: `run` raised on some rank: the same error on every rank, of several the one with the largest
                `key`. Where it is another rank's, it is an `RLMemoryError` with `details["trainer_rank"]`.
        """
        try:
            return self.gather(run(), key=key)
        except _Gathered as gathered:
            raise gathered.error from gathered.error.__cause__
        except Exception as error:
            return self._fail(error, key)

    def gather(self, value: T, *, key: Callable[[Exception], Any] = lambda _: 0) -> list[T]:
        raise NotImplementedError

    def _fail(self, error: Exception, key: Callable[[Exception], Any]) -> Any:
        raise NotImplementedError
