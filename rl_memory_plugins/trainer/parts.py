"""The trainer's own parts of a handoff, and their moves between device and host memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Protocol, runtime_checkable

import torch

from rl_memory_plugins.errors import InvalidRequestError, UnsupportedError
from rl_memory_plugins.timing import timed
from rl_memory_plugins.trainer.cache import aggressive_empty_cache
from rl_memory_plugins.trainer.gpu import own_device
from rl_memory_plugins.trainer.handoff_report import HandoffReport
from rl_memory_plugins.trainer.offloading import Moved, Offloader
from rl_memory_plugins.trainer.pausable import PausableMemory
from rl_memory_plugins.trainer.pausable_part import Pausable, PausablePart, commit_all, tags_of
from rl_memory_plugins.trainer.peers import Peers
from rl_memory_plugins.trainer.targets import GRADIENTS

COLLECT_THRESHOLD_BYTES = 256 << 20
"""Garbage is collected only if torch holds this many bytes besides the weights."""


@runtime_checkable
class Movable(Protocol):
    """An object that can be offloaded from the device and loaded again. Repeated calls of a method do nothing.

    It may have a method `resident_bytes(device)`: the bytes that torch counts as allocated for the object's tensors.
    """

    def offload(self) -> Moved: ...

    def load(self) -> Moved: ...


class TrainerParts:
    """What a trainer moves. All processes make each call together, and it succeeds on all or fails on all.

    Args:
        weights, others, overlap, memory_fraction: See `RolloutHandoff`.
        peers: The processes of the trainer.

    Attributes:
        weights, others: The parts as `Movable`s. The gradients of modules in `weights` are among `others`, and
            those that a `PausableMemory` of a part drops.
    """

    def __init__(self, weights: Any, others: Any, peers: Peers, *, overlap: bool, memory_fraction: float) -> None:
        weights, others = _listed("weights", weights), _listed("others", others)
        modules = [part for part in weights if isinstance(part, torch.nn.Module) and not isinstance(part, Movable)]
        self.weights = [_movable(part, gradients=False) for part in weights]
        self.others = [*(_movable(part) for part in others), Offloader(*modules, gradients=True)]
        named = tags_of([*self.weights, *self.others])
        self.others += [
            PausablePart(memory, [GRADIENTS])
            for memory, tags in named.items()
            if memory.drops_gradients and GRADIENTS not in tags
        ]
        self._peers = peers
        self._overlap = overlap
        self._memory_fraction = memory_fraction
        self._stays = 0  # bytes that torch held beside the trainer's after garbage was collected
        for part in [*self.weights, *self.others]:
            if isinstance(part, Offloader):
                with suppress(UnsupportedError):  # the first offload says it, and moves nothing
                    part.prepare()

    def limit(self, fraction: float) -> None:
        """Limit torch to a share of the GPU: then the trainer runs out of memory before an engine fails to wake."""
        # If `memory_fraction` is 1, a limit that the trainer has set itself stays.
        if self._memory_fraction < 1 and torch.cuda.is_initialized():
            torch.cuda.set_per_process_memory_fraction(fraction)

    def move(
        self,
        report: HandoffReport,
        step: str,
        parts: Sequence[Movable],
        prepared: Collection[Pausable] = (),
        *,
        keeps_cache: bool = False,
    ) -> None:
        """Load or offload. After an offload, empty torch's cache, but for `keeps_cache`.

        Pausable memories prepare on all processes before any of them acts. Those in `prepared` have done so already.
        """
        load = step == "load"
        tags = tags_of(parts)
        later = tags_of(self.others) if load and self._overlap else {}
        rest = [part for part in parts if not isinstance(part, PausablePart)]

        def prepare() -> None:
            for memory, own in tags.items():
                if memory not in prepared:
                    (memory.prepare_wake if load else memory.prepare_sleep)(own)

        def run() -> None:
            for memory in [memory for memory in tags if memory in prepared]:
                with timed(report.seconds, step):
                    memory.synchronize()  # the update may have left work that reads the weights
            # By tag, a sleep leaves torch's cache alone: to learn what an emptying would free takes milliseconds.
            moves = commit_all(tags, later, {} if load else tags)
            moves += [part.load() if load else part.offload() for part in rest]
            total = report.add(step, moves)
            report.seconds[step] += sum(move.seconds for move in moves)
            if not load and not keeps_cache and (total or torch.cuda.is_initialized()):
                report.seconds[step] += self.empty_cache(step)

        with report.noted(step, moves=True) if parts else nullcontext(), self._peers.at(step):
            try:
                self._peers.agree(prepare)
                self._peers.agree(run)
            finally:
                for memory in tags:
                    memory.abort()  # what was prepared and not committed, because a process failed

    def resident_bytes(self) -> int:
        """Bytes of all parts that are on the device of this process."""
        device = own_device()
        return sum(_resident(part, device) for part in [*self.weights, *self.others])

    def counter(self) -> Callable[[], int]:
        """`resident_bytes` for a report. Who keeps the report does not keep the trainer's memory with it."""
        known = weakref.ref(self)

        def count() -> int:
            parts = known()
            return 0 if parts is None else parts.resident_bytes()

        return count

    def empty_cache(self, step: str) -> float:
        """Empty torch's cache. Returns the seconds that it took.

        Garbage is collected only once, before the engines map their weights, because the collection is slow. It is not
        collected if torch holds no more than an earlier collection has left.
        """
        if step != "offload_others":
            return aggressive_empty_cache(max_rounds=0).seconds
        device = own_device()
        known = (getattr(part, "resident_bytes", None) for part in [*self.weights, *self.others])
        needed = sum(resident_bytes(device) for resident_bytes in known if resident_bytes is not None)
        clearing = aggressive_empty_cache(threshold_bytes=COLLECT_THRESHOLD_BYTES, in_use_bytes=needed + self._stays)
        left = max(torch.cuda.memory_reserved() - needed, 0) if torch.cuda.is_initialized() else 0
        self._stays = left if clearing.freed_bytes else min(self._stays, left)
        return clearing.seconds


def _listed(field: str, given: Any) -> list[Any]:
    """The parts, of which one may be given by itself.

    Raises:
        InvalidRequestError: they are no parts.
    """
    if isinstance(given, (torch.nn.Module, torch.optim.Optimizer, torch.Tensor, Mapping, Movable, PausableMemory)):
        given = [given]
    if not isinstance(given, Iterable):
        raise InvalidRequestError(
            f"{field} must be a part or several, not {type(given).__name__}", field=field, got=type(given).__name__
        )
    parts = list(given)
    if any(isinstance(part, PausableMemory) for part in parts):
        raise InvalidRequestError(
            f"{field}: name the tags of the PausableMemory, e.g. memory.part('parameters') as weights and "
            "memory.part('gradients', 'optimizer') as others",
            field=field,
            got="PausableMemory",
        )
    return parts


def _movable(target: Any, gradients: bool | None = None) -> Movable:
    return target if isinstance(target, Movable) else Offloader(target, gradients=gradients)


def _resident(part: Movable, device: torch.device) -> int:
    """Bytes of a part that are on the device; 0 for one that does not tell."""
    if isinstance(part, PausablePart):
        return part.awake_bytes(device)
    tell = getattr(part, "resident_bytes", None)
    return 0 if tell is None else int(tell(device))
