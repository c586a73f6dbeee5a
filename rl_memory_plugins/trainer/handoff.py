"""Device memory between a trainer and its engines, in the order in which it always suffices.

    sleep               the engines give their memory back; no request is admitted until the last step
    load                the trainer's model and optimiser come back
      … training …        the body of `RolloutHandoff.training`; nobody goes on unless it succeeded everywhere
    offload_others      what training alone needs goes: optimiser, gradients, reference policy
    load                the trainer's weights, if they were away
    wake_weights        memory for the engines' weights
    sync                the weights go over, bucket by bucket
    offload             the trainer's weights go
    wake_kv_cache       the rest of the engines' memory; requests are admitted again

So the trainer's weights never lie beside the KV cache, nor the optimiser beside the engines' weights.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from rl_memory_plugins.errors import InvalidRequestError, RLMemoryError
from rl_memory_plugins.memory.threads import on_this_gpu
from rl_memory_plugins.timing import timed
from rl_memory_plugins.trainer.cache import CacheClearing, aggressive_empty_cache, limit_memory
from rl_memory_plugins.trainer.engine_handle import EngineHandle, EngineObject, as_engines, on_all
from rl_memory_plugins.trainer.gpu import own_device
from rl_memory_plugins.trainer.offloading import Moved, Offloader
from rl_memory_plugins.trainer.peers import Peers
from rl_memory_plugins.trainer.update import push_from_all, require_options
from rl_memory_plugins.weights.source import TensorSource

T = TypeVar("T")

WORTH_COLLECTING = 256 << 20
"""Bytes that torch keeps beside the weights; with less, garbage is not worth the time that it takes to find it."""

STEPS = ("sleep", "load", "offload_others", "wake_weights", "sync", "offload", "wake_kv_cache")


@runtime_checkable
class Movable(Protocol):
    """Something that can leave the device and come back; both do nothing where there is nothing to do."""

    def offload(self) -> Moved: ...

    def load(self) -> Moved: ...


@dataclass
class HandoffReport:
    """What a handoff did, so far.

    Attributes:
        seconds: By step; 0.0 for each that did not run or had nothing to do.
        moved_bytes: The trainer's bytes that were loaded or offloaded, by step.
        update: See `push_from_all`.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STEPS, 0.0))
    moved_bytes: dict[str, int] = field(default_factory=dict)
    update: dict[str, Any] = field(default_factory=dict)


class RolloutHandoff:
    """Hands the devices from the engines to the trainer and back; see the module.

        handoff = RolloutHandoff(EngineClient(url), ModelSource(model), weights=[model], others=[optimizer])
        with handoff.training() as report:
            train_step(model, optimizer)

    Made on all of the trainer's processes together; each of its calls is made by all of them, and every step
    succeeds on all or fails on all. After a failure later steps have not run and the engines are closed, but
    for one that could not give anything back in `sleep`, and for those that had been opened again when another
    one failed in `wake_kv_cache`. The error has `details["step"]`, and its type is the failure's own. `training`
    and `sync` may simply be called again, on all processes.

    The body of `training` counts as a step, `training`. Where it raises, that error is raised at once. The other
    processes learn of it at the end of their own body: an `RLMemoryError` with `details["trainer_rank"]`, or, if the
    failed process ended, one that says that the connection is gone. Processes that call different things raise a
    `StateConflictError`.

    What is away (`weights` and `others`, from `sync` on until the next `release`) can be neither saved nor restored:
    `torch.save` of its `state_dict()` writes a file that cannot be read, without an error, and `load_state_dict` may
    end the process. Save and load checkpoints in the body of `training`.

    Args:
        engines: Those that this process controls: `EngineClient`s or engines' own objects. Each engine is given
            to one process, the others get an empty list.
        source: What is sent: a `TensorSource`, a module or a mapping of tensors.
        weights: What of the trainer is needed to send it: modules, `Movable`s. Modules' gradients go with `others`.
        others: What only training needs: optimisers, reference models.
        from_host: Offload the weights before the engines' come back, and send them from host memory. At no time
            are both on the device. `source` must be one that reads offloaded tensors: all of this package do.
        level: At which the engines sleep; 1 keeps a copy of their weights, for updates that are partial.
        mode: What happens to requests that run when the engines are put to sleep.
        memory_fraction: The share of its GPU that torch may take in this process while the trainer has the devices:
            from `load` on until its weights are offloaded. The rest is for what the engines keep while asleep.
        group: The trainer's process group; see `Peers`.
        **update: Options of `push_from_all`, e.g. `bucket_bytes`, `timeout_s`.

    Raises:
        InvalidRequestError: `memory_fraction` is not above 0 and at most 1.
    """

    def __init__(
        self,
        engines: EngineHandle | Any | Sequence[EngineHandle | Any],
        source: TensorSource | torch.nn.Module | Mapping[str, torch.Tensor],
        *,
        weights: Sequence[Any] = (),
        others: Sequence[Any] = (),
        from_host: bool = False,
        level: int = 2,
        mode: str = "abort",
        memory_fraction: float = 1.0,
        group: Any = None,
        **update: Any,
    ) -> None:
        if not 0 < memory_fraction <= 1:
            raise InvalidRequestError(
                f"memory_fraction must be above 0 and at most 1, not {memory_fraction}",
                field="memory_fraction",
                got=memory_fraction,
            )
        require_options(update)
        self.engines = as_engines(engines)
        self._source = source
        self._weights = [_movable(one, gradients=False) for one in weights]
        modules = [one for one in weights if isinstance(one, torch.nn.Module) and not isinstance(one, Movable)]
        self._others = [*(_movable(one) for one in others), Offloader(*modules, gradients=True)]
        self._from_host = from_host
        self._level = level
        self._mode = mode
        self._memory_fraction = memory_fraction
        self._peers = Peers(group)
        self._update = update
        self._lock = threading.Lock()  # one handoff at a time, also where an awaiting task was cancelled

    @contextmanager
    def training(self, weight_version: str | None = None) -> Iterator[HandoffReport]:
        """The engines sleep and the trainer is loaded; at the end the engines wake with the new weights.

        If the body raises, on any process, the engines stay asleep and the trainer loaded.
        """
        report = self.release()
        try:
            yield report
        except BaseException as error:
            self._body_failed(error)
            raise
        self._body_ended()
        self.sync(weight_version, report)

    def release(self) -> HandoffReport:
        """The first half: put the engines to sleep, and load the trainer."""
        report = HandoffReport()
        with self._lock:
            self._on_engines(report, "sleep", lambda engine: engine.sleep(level=self._level, mode=self._mode))
            self._limit(self._memory_fraction)
            self._move(report, "load", [one.load for one in (*self._weights, *self._others)])
        return report

    def sync(self, weight_version: str | None = None, report: HandoffReport | None = None) -> HandoffReport:
        """The second half: send the weights, and open the engines.

        Args:
            weight_version: The engines' version of the weights afterwards; by default they count.
            report: One to add to.
        """
        report = report or HandoffReport()
        with self._lock:
            self._move(report, "offload_others", [one.offload for one in self._others])
            if self._from_host:
                self._move(report, "offload", [one.offload for one in self._weights])
            else:
                self._move(report, "load", [one.load for one in self._weights])
            self._on_engines(report, "wake_weights", lambda engine: engine.wake_up(["weights"]))
            with self._step(report, "sync"):
                report.update = push_from_all(
                    self.engines, self._source, self._peers, weight_version=weight_version, **self._update
                )
            self._move(report, "offload", [one.offload for one in self._weights])
            self._limit(1.0)
            self._on_engines(report, "wake_kv_cache", lambda engine: engine.wake_up())
        return report

    def _body_ended(self) -> None:
        """Wait for the others' bodies."""
        with self._lock, self._at("training"):
            self._peers.share(None)

    def _body_failed(self, error: BaseException) -> None:
        self._peers.step = "training"
        self._peers.announce_failure(error)

    def _limit(self, fraction: float) -> None:
        if self._memory_fraction < 1:  # a limit of the trainer's own is left alone
            limit_memory(fraction)

    def _on_engines(self, report: HandoffReport, step: str, call: Callable[[EngineHandle], Any]) -> None:
        def run() -> None:  # the answers stay here: nobody uses them
            on_all(self.engines, call)

        with self._step(report, step):
            self._peers.agree(run)

    def _move(self, report: HandoffReport, step: str, moves: Sequence[Callable[[], Moved]]) -> None:
        """Load or offload; after an offload whatever torch has no use for goes back to the driver."""

        def run() -> None:
            moved = [move() for move in moves]
            total = sum(one.bytes for one in moved)
            seconds = sum(one.seconds for one in moved)
            if step != "load" and (total or torch.cuda.is_initialized()):
                seconds += self._give_back(step).seconds
            report.seconds[step] += seconds
            report.moved_bytes[step] = report.moved_bytes.get(step, 0) + total

        with self._at(step):
            self._peers.agree(run)

    def _give_back(self, step: str) -> CacheClearing:
        """Collecting is slow, so it is done once, before the engines' weights need the room, and if it can help."""
        if step != "offload_others":
            return aggressive_empty_cache(max_rounds=0)
        device = own_device()
        needed = sum(one.resident_bytes(device) for one in self._weights if isinstance(one, Offloader))
        return aggressive_empty_cache(threshold_bytes=WORTH_COLLECTING, in_use_bytes=needed)

    @contextmanager
    def _step(self, report: HandoffReport, step: str) -> Iterator[None]:
        with timed(report.seconds, step), self._at(step):
            yield

    @contextmanager
    def _at(self, step: str) -> Iterator[None]:
        """Have the other processes know the step, and an error say in which it was raised."""
        self._peers.step = step
        with _named(step):
            yield


class AsyncRolloutHandoff:
    """`RolloutHandoff` on an event loop, also for engines whose methods are coroutines (`AsyncLLM`).

    Takes what `RolloutHandoff` takes. The steps run in a thread; a task that is cancelled leaves its step to
    end by itself, and the next call waits for it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._handoff = RolloutHandoff(*args, **kwargs)

    @asynccontextmanager
    async def training(self, weight_version: str | None = None) -> AsyncIterator[HandoffReport]:
        report = await self.release()
        try:
            yield report
        except BaseException as error:
            self._handoff._body_failed(error)
            raise
        await self._run(self._handoff._body_ended)
        await self.sync(weight_version, report)

    async def release(self) -> HandoffReport:
        return await self._run(self._handoff.release)

    async def sync(self, weight_version: str | None = None, report: HandoffReport | None = None) -> HandoffReport:
        return await self._run(lambda: self._handoff.sync(weight_version, report))

    async def _run(self, call: Callable[[], T]) -> T:
        for engine in self._handoff.engines:
            if isinstance(engine, EngineObject):
                engine.loop = asyncio.get_running_loop()
        return await asyncio.to_thread(on_this_gpu(call))


def _movable(target: Any, gradients: bool | None = None) -> Movable:
    return target if isinstance(target, Movable) else Offloader(target, gradients=gradients)


@contextmanager
def _named(step: str) -> Iterator[None]:
    """Have an error say in which step it was raised."""
    try:
        yield
    except RLMemoryError as error:
        error.details["step"] = step
        raise
    except Exception as error:
        message = f"{step}: {type(error).__name__}: {error}"
        raise RLMemoryError(message, step=step, type=type(error).__name__) from error
