"""Agreement among the processes of one trainer. A process that fails alone would leave the others waiting."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from rl_memory_plugins.errors import RLMemoryError, StateConflictError, from_record
from rl_memory_plugins.memory.threads import Beside, await_end
from rl_memory_plugins.timing import LONGEST_S

T = TypeVar("T")


class _Message(msgspec.Struct, array_like=True):
    """The message of one rank in an agreement.

    Attributes:
        step: The step of the rank; see `Peers.step`.
        value: The encoded value. Decoded only if all ranks are at the same step and no rank has failed.
        failure: The severity and the record of the rank's error, if it has one.
    """

    step: str
    value: msgspec.Raw
    failure: tuple[int, dict[str, Any]] | None


class Peers:
    """The ranks of a process group, or this process alone if `torch.distributed` is not initialised.

    All ranks must create it together.

    Args:
        group: The ranks that hold parts of the model; by default the whole world. Agreements use a separate Gloo group,
            which is made once. They therefore wait for no GPU, and never pair with a collective of a source that has
            failed on one rank.

    Attributes:
        step: The name of this process's step. `share` compares it across ranks.
    """

    def __init__(self, group: Any = None) -> None:
        self.step = ""
        self.rank, self.size = 0, 1
        self._ranks = {0: 0}
        if dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD if group is None else group
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
            if self.size > 1:
                self._group = _gloo_group(group)
                self._ranks = {one: rank for rank, one in enumerate(dist.get_process_group_ranks(group))}

    def rank_of(self, rank: int) -> int | None:
        """The place here of a rank of the whole world; `None` if it is not among these."""
        return self._ranks.get(rank)

    @contextlib.contextmanager
    def at(self, step: str) -> Iterator[None]:
        """Name the step in the agreements with the other processes, and in the details of errors.

        Raises:
            RLMemoryError: also for an error of another type.
        """
        self.step = step
        try:
            yield
        except RLMemoryError as error:
            error.details["step"] = step
            raise
        except Exception as error:
            message = f"{step}: {type(error).__name__}: {error}"
            raise RLMemoryError(message, step=step, type=type(error).__name__) from error

    def agree(self, run: Callable[[], T], as_type: Any = Any) -> list[T]:
        """Call `run` on every rank. Returns the results of all ranks, in their order.

        Args:
            run: The function; see `share` for the types that it may return.
            as_type: See `share`.

        Raises:
            Exception: `run` failed on a rank; see `share`.
        """
        try:
            value = run()
        except Exception as error:
            return self.share(None, error)
        return self.share(value, as_type=as_type)

    def share(
        self,
        value: Any,
        error: BaseException | None = None,
        severity: Callable[[Exception], int] = lambda _: 0,
        as_type: Any = Any,
        beside: str = "",
    ) -> list[Any]:
        """Exchange values or errors. Returns the values of all ranks, in their order.

        Args:
            value: Numbers, strings, and lists, mappings, named tuples, dataclasses and `msgspec.Struct`s of them.
            error: The error of this rank, which all ranks raise instead.
            severity: Ranks errors. All ranks raise the most severe error, of the lowest rank that has it.
            as_type: The type of the values, for `msgspec`. Without it, structured values arrive as lists and dicts.
            beside: The values are lists, and an error that is raised has those of all ranks, joined, in this field of
                its details.

        Raises:
            Exception: a rank has shared an error. The rank that has shared it raises it unchanged; the others raise it
                as an `RLMemoryError` with `details["trainer_rank"]`.
            RLMemoryError: a rank is gone, and this one has no error of its own.
            StateConflictError: the ranks are at different steps, and no value was shared. `details["steps"]` lists the
                steps by rank. A rank with an error raises its own error instead.
        """
        if self.size == 1:
            if error is not None:
                if beside and isinstance(error, RLMemoryError):
                    error.details[beside] = msgspec.to_builtins(value)
                try:
                    raise error
                finally:
                    del error  # breaks the reference cycle between the error and this frame
            return [value]
        sent, error = self._encoded(value, error, severity)
        try:
            gathered = self._gathered(sent)
        except RuntimeError as lost:  # torch's error for a connection that was closed, or a timeout
            raise error or RLMemoryError(f"a process of the trainer is gone: {lost}", reason="lost") from lost
        messages = [msgspec.msgpack.decode(message, type=_Message) for message in gathered]
        steps = [message.step for message in messages]
        if len(set(steps)) > 1:
            raise error or StateConflictError(
                f"the trainer's processes are at different steps: {', '.join(step or '-' for step in steps)}",
                steps=steps,
            )
        failures = {rank: message.failure for rank, message in enumerate(messages) if message.failure is not None}
        if not failures:
            return [msgspec.msgpack.decode(message.value, type=as_type) for message in messages]
        worst = max(failures, key=lambda rank: (failures[rank][0], -rank))
        raised: BaseException | None = error
        if worst != self.rank or error is None:
            raised = from_record(failures[worst][1])
            raised.details.setdefault("trainer_rank", worst)
        if beside and isinstance(raised, RLMemoryError):
            values = [msgspec.msgpack.decode(message.value) for message in messages]
            raised.details[beside] = [one for value in values for one in value or ()]
        try:
            raise raised  # type: ignore[misc]
        finally:
            del raised  # breaks the reference cycle between the error and this frame

    def announce_failure(self, error: BaseException) -> None:
        """`share` an error in the background. The next agreement of this process waits until it is shared.

        The other ranks may be late, or never come: they may wait in a collective for this rank.
        """
        if self.size > 1:
            sent, _ = self._encoded(None, error)
            # A daemon, so that the process can exit; its peers notice the closed connections. If it has not destroyed
            # its process groups, torch may abort it at exit.
            before = _under_way.get(self._group, lambda: None)
            announcement = threading.Thread(target=self._announce, args=(sent, before), daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter shuts down
                announcement.start()
                _under_way[self._group] = functools.partial(await_end, announcement)

    def _announce(self, sent: bytes, before: Callable[[], object]) -> None:
        before()
        with contextlib.suppress(Exception):  # a lost connection: the next agreement raises it
            self._gather(sent)

    def _gathered(self, sent: bytes) -> list[bytes]:
        """`_gather`, also if this process is interrupted: the other ranks wait for both of its collectives.

        An interrupt ends the wait alone. The next agreement of this process waits for the end of this one.
        """
        if self._group in _under_way:
            _under_way[self._group]()
        gathering = Beside(lambda: self._gather(sent), "rl-memory-agreement")
        _under_way[self._group] = gathering.end
        gathered = gathering.start().result()
        _under_way.pop(self._group, None)
        return gathered

    def _encoded(
        self, value: Any, error: BaseException | None, severity: Callable[[Any], int] = lambda _: 0
    ) -> tuple[bytes, BaseException | None]:
        """The message of this rank, and the error in it: the given one, or that `value` cannot be encoded."""
        encode = msgspec.msgpack.encode
        try:
            failure = None if error is None else (severity(error), _record(error))
            return encode(_Message(self.step, msgspec.Raw(encode(value)), failure)), error
        except Exception as unsendable:  # the other ranks wait for a message of this rank
            error = error or unsendable
            failure = (severity(error), _record(error, details=False))
            return encode(_Message(self.step, msgspec.Raw(encode(None)), failure)), error

    def _gather(self, sent: bytes) -> list[bytes]:
        """The bytes of all ranks. Messages are padded to the longest for the collective."""
        own = torch.tensor([len(sent)], dtype=torch.int64, device="cpu")
        lengths = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(lengths, own, group=self._group)
        room = torch.zeros(max(int(length) for length in lengths), dtype=torch.uint8, device="cpu")
        room[: len(sent)] = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
        padded = [torch.empty_like(room) for _ in range(self.size)]
        dist.all_gather(padded, room, group=self._group)
        return [bytes(message.numpy()[: int(length)]) for message, length in zip(padded, lengths, strict=True)]


_under_way: weakref.WeakKeyDictionary[Any, Callable[[], object]] = weakref.WeakKeyDictionary()
"""By Gloo group: waits for the latest announcement or agreement. The next agreement of the group calls it first."""

_gloo_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _gloo_group(group: Any) -> Any:
    """The Gloo group for agreements among the ranks of `group`.

    torch's default of 30 minutes would end a wait for a process that saves a checkpoint or evaluates, and all later
    agreements with it. Whoever dies closes its connections, which ends a wait at once.
    """
    if group not in _gloo_groups:
        ranks = None if group is dist.group.WORLD else dist.get_process_group_ranks(group)
        made = dist.new_group(ranks, backend="gloo", use_local_synchronization=ranks is not None)
        prolong = getattr(dist.distributed_c10d, "_set_pg_timeout", None)  # not before all are there
        if prolong is not None:
            prolong(timedelta(seconds=LONGEST_S), made)
        _gloo_groups[group] = made
    return _gloo_groups[group]


def _record(error: BaseException, details: bool = True) -> dict[str, Any]:
    """The record of an error, without its details if they cannot be encoded."""
    if isinstance(error, RLMemoryError) and details:
        return error.to_record()
    return RLMemoryError(f"{type(error).__name__}: {error}", type=type(error).__name__).to_record()
