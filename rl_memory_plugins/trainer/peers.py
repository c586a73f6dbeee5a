"""The processes of one trainer: what one finds out, all must know, or they wait for each other forever."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from rl_memory_plugins.errors import RLMemoryError, StateConflictError, from_record

T = TypeVar("T")


class _Message(msgspec.Struct, array_like=True):
    """What a rank brings to an agreement.

    Attributes:
        value: Encoded; it is decoded only where all ranks are at the same step and none has failed.
        failure: Its error, if it has one: how severe it is, and its record.
    """

    step: str
    value: msgspec.Raw
    failure: tuple[int, dict[str, Any]] | None


def _encoded(step: str, value: Any, failure: tuple[int, dict[str, Any]] | None) -> bytes:
    encode = msgspec.msgpack.encode
    return encode(_Message(step, msgspec.Raw(encode(value)), failure))


class Peers:
    """The ranks of a process group, or this process alone where `torch.distributed` is not in use.

    Made on all ranks together.

    Args:
        group: All ranks that hold parts of the model; by default the whole world. Agreements go over a Gloo
            group of their own, made once: they wait for no GPU, and meet no collective of a source that failed
            on one rank.

    Attributes:
        step: What this process is at, for `share` to compare.
    """

    def __init__(self, group: Any = None) -> None:
        import torch.distributed as dist

        self.step = ""
        self.rank, self.size = 0, 1
        if dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD if group is None else group
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
            if self.size > 1:
                self._group = _twin(group)

    def agree(self, run: Callable[[], T], as_type: Any = Any) -> list[T]:
        """Run on every rank, and give the results of all, in their order; it fails on all if it fails on one.

        Args:
            as_type: See `share`.

        Raises:
            Exception: see `share`.
        """
        try:
            value = run()
        except Exception as error:
            return self.share(None, error)
        return self.share(value, as_type=as_type)

    def share(
        self,
        value: Any,
        error: Exception | None = None,
        severity: Callable[[Exception], int] = lambda _: 0,
        as_type: Any = Any,
    ) -> list[Any]:
        """All ranks' values, in their order.

        Args:
            value: Numbers, text, and lists, mappings, named tuples, data classes and `msgspec.Struct`s of them.
            as_type: The value's type, as `msgspec` takes it. Without it, what is no number or text comes back as
                lists and dicts.

        Raises:
            Exception: some rank brought an error: on every rank the most severe one, of the first rank that has
                it. A rank's own error is raised as it is, another's as an `RLMemoryError` with
                `details["trainer_rank"]`.
            StateConflictError: the ranks are not at the same step; nothing was shared. `details["steps"]` has each
                rank's. A rank with an error of its own raises that.
        """
        mine = None if error is None else (severity(error), _record(error))
        if self.size == 1:
            if error is not None:
                raise error
            return [value]
        try:
            sent = _encoded(self.step, value, mine)
        except Exception as failure:  # the others wait for something
            error = error or failure
            sent = _encoded(self.step, None, (severity(error), _bare_record(error)))
        announced = _announcing.get(self._group)
        if announced is not None:
            announced.join()
            _announcing.pop(self._group, None)
        everyone = [msgspec.msgpack.decode(one, type=_Message) for one in self._gather(sent)]
        steps = [one.step for one in everyone]
        if len(set(steps)) > 1:
            raise error or StateConflictError(
                f"the trainer's processes are not at the same step: {', '.join(step or '-' for step in steps)}",
                steps=steps,
            )
        failures = {rank: one.failure for rank, one in enumerate(everyone) if one.failure is not None}
        if not failures:
            return [msgspec.msgpack.decode(one.value, type=as_type) for one in everyone]
        worst = max(failures, key=lambda rank: (failures[rank][0], -rank))
        if worst == self.rank and error is not None:
            raise error
        other = from_record(failures[worst][1])
        other.details.setdefault("trainer_rank", worst)
        raise other

    def announce_failure(self, error: BaseException) -> None:
        """`share` an error without waiting for the others; this process's next agreement does.

        They may not answer soon, or ever: those that wait in a collective for the rank that failed.
        """
        if self.size > 1:
            try:
                sent = _encoded(self.step, None, (0, _record(error)))
            except Exception:
                sent = _encoded(self.step, None, (0, _bare_record(error)))
            # A daemon: a process that ends instead of going on closes its connections, which the others notice. Torch
            # may then abort it at the very end, if it has not destroyed its process groups.
            announcing = threading.Thread(target=self._announce, args=(sent, _announcing.get(self._group)), daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter ends
                announcing.start()
                _announcing[self._group] = announcing

    def _announce(self, sent: bytes, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        with contextlib.suppress(Exception):  # the connections are gone: the next agreement raises that
            self._gather(sent)

    def _gather(self, sent: bytes) -> list[bytes]:
        """All ranks' bytes, each padded to the longest on its way."""
        import torch
        import torch.distributed as dist

        own = torch.tensor([len(sent)], dtype=torch.int64, device="cpu")
        lengths = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(lengths, own, group=self._group)
        room = torch.zeros(max(int(length) for length in lengths), dtype=torch.uint8, device="cpu")
        room[: len(sent)] = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
        everyone = [torch.empty_like(room) for _ in range(self.size)]
        dist.all_gather(everyone, room, group=self._group)
        return [bytes(one.numpy()[: int(length)]) for one, length in zip(everyone, lengths, strict=True)]


_announcing: weakref.WeakKeyDictionary[Any, threading.Thread] = weakref.WeakKeyDictionary()
"""By Gloo group: the thread of the latest `Peers.announce_failure`. The next agreement of the group waits for it."""

_twins: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _twin(group: Any) -> Any:
    """The Gloo group of the same ranks that only agreements use."""
    import torch.distributed as dist

    if group not in _twins:
        ranks = None if group is dist.group.WORLD else dist.get_process_group_ranks(group)
        _twins[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=ranks is not None)
    return _twins[group]


def _record(error: BaseException) -> dict[str, Any]:
    return error.to_record() if isinstance(error, RLMemoryError) else _bare_record(error)


def _bare_record(error: BaseException) -> dict[str, Any]:
    """Text only, which can always be sent."""
    return RLMemoryError(f"{type(error).__name__}: {error}", type=type(error).__name__).to_record()
