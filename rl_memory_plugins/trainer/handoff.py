"""Hands device memory from the engines to the trainer and back, in an order in which it suffices.

    sleep               the engines release their memory, and admit no requests until the last step
    load                the trainer's model and optimiser return to the device, or wake there
      … training …        the body of `RolloutHandoff.training`; the next step needs its success on all processes
    offload_others      state that only training needs leaves the device: optimiser, gradients, reference policy
    load                the trainer's weights return, if they were offloaded
    wake_weights        the engines map memory for their weights
    sync                the trainer sends its weights, bucket by bucket
    offload             the trainer's weights leave the device
    wake_kv_cache       the engines map the rest of their memory, and admit requests again

The device never holds the trainer's weights together with the KV cache. It holds the optimiser together with the
engines' weights only if it has room for both, and `overlap` allows it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from rl_memory_plugins.errors import InvalidRequestError, RLMemoryError
from rl_memory_plugins.memory.threads import on_this_gpu
from rl_memory_plugins.tags import Level, PauseMode, Tag
from rl_memory_plugins.timing import timed
from rl_memory_plugins.trainer.adapters import Adapter
from rl_memory_plugins.trainer.cache import aggressive_empty_cache
from rl_memory_plugins.trainer.engine_handle import EngineHandle, EngineObject, as_engines, on_all
from rl_memory_plugins.trainer.gpu import own_device
from rl_memory_plugins.trainer.leaving import Leaving
from rl_memory_plugins.trainer.offloading import Moved, Offloader
from rl_memory_plugins.trainer.pausable_part import (
    Pausable,
    PausablePart,
    commit_all,
    require_awake_groups,
    tags_of,
)
from rl_memory_plugins.trainer.peers import Peers
from rl_memory_plugins.trainer.room import Room, lacks_memory, room, suffices
from rl_memory_plugins.trainer.sources.model import Tensors, only_reads
from rl_memory_plugins.trainer.update import push_from_all, require_options

T = TypeVar("T")

COLLECT_THRESHOLD_BYTES = 256 << 20
"""Garbage is collected only if torch holds this many bytes besides the weights."""

STEPS = ("sleep", "load", "offload_others", "wake_weights", "sync", "offload", "wake_kv_cache")


@runtime_checkable
class Movable(Protocol):
    """An object that can be offloaded from the device and loaded again. Repeated calls of a method do nothing.

    It may have a method `resident_bytes(device)`: the bytes that torch counts as allocated for the object's tensors.
    """

    def offload(self) -> Moved: ...

    def load(self) -> Moved: ...


@dataclass
class HandoffReport:
    """The measurements of a handoff. A handoff in progress has filled in its finished steps.

    Attributes:
        seconds: Seconds by step; 0.0 for a step that did not run or had nothing to do. Of what leaves during the
            update, only those in which the handoff did nothing else.
        moved_bytes: Bytes of the trainer that were loaded or offloaded, by step.
        update: The result of `push_from_all`.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STEPS, 0.0))
    moved_bytes: dict[str, int] = field(default_factory=dict)
    update: dict[str, Any] = field(default_factory=dict)

    def add(self, step: str, moves: Iterable[Moved]) -> int:
        """Add the bytes of these moves to a step. Returns: their sum."""
        total = sum(move.bytes for move in moves)
        self.moved_bytes[step] = self.moved_bytes.get(step, 0) + total
        return total


class RolloutHandoff:
    """Hands the devices from the engines to the trainer and back. The module's docstring lists the steps.

        handoff = RolloutHandoff(EngineClient(url), ModelSource(model), weights=[model], others=[optimizer])
        with handoff.training() as report:
            train_step(model, optimizer)

    All processes of the trainer create the handoff and make each call together. A step succeeds on all processes or
    fails on all. After a failure no later step runs, and the engines admit no requests. The exceptions are an engine
    that failed in `sleep` before it released memory, and an engine that had woken before another engine failed in
    `wake_kv_cache`. The error keeps its type and gets `details["step"]`. All processes may then call `training` or
    `sync` again.

    With `overlap`, `others` and `weights` are still on the device after a failure of `wake_weights` or `sync`.

    The body of `training` counts as the step `training`. A process whose body fails raises the error at once. The other
    processes raise at the end of their own body: an `RLMemoryError` with `details["trainer_rank"]`, or, if the failed
    process has exited, an error about the lost connection. Processes that make different calls raise a
    `StateConflictError`.

    Save and load checkpoints of `weights` and `others` in the body of `training`. Elsewhere they are offloaded; see the
    module `offloading`.

    Args:
        engines: The engines that this process controls: `EngineClient`s or the engines' own Python objects. Give each
            engine to one process, and an empty list to processes without an engine.
        source: The tensors to send: a `TensorSource`, a module or a mapping.
        weights: What the update reads: modules, parts of a `PausableMemory` and other `Movable`s. The gradients of
            modules move with `others`.
        others: What only training needs: optimisers, reference models, parts of a `PausableMemory`.
        from_host: Offload the weights before the engines wake theirs, and send them from host memory. The device then
            never holds both. `source` must read offloaded tensors, as all sources of this package do.
        level: The sleep level of the engines; 1 keeps a copy of their weights, which partial updates and adapters need.
            Default: 2, or 1 with an adapter.
        mode: The treatment of running requests at the sleep: `abort`, `wait` or `keep`. With `freeze` the sleep leaves
            the KV cache on the device, and running requests keep theirs over the update too.
        keep: Names of the engines' weights, or globs, that level 2 preserves; `source` may leave these out.
        adapter: Send a LoRA adapter alone, and leave the engines' base weights as they are. `source` is then a PEFT
            model, or has the names of `adapter_model.safetensors`; see `trainer.Adapter`. A name stands for
            `Adapter(name)`. The versions of `training` and `sync` are then those of the adapter.
        overlap: Copy `others` that are in a `PausableMemory` while other work runs. The states of optimisers return
            while the body of `training` runs; their next `step`, `state_dict` or `load_state_dict` waits; see
            `PausableMemory.waits_before_use`. And `others` leave while the engines' weights wake and the update runs,
            if the devices have room for both, and if all `weights` are in a `PausableMemory` too. `weights` in a
            `PausableMemory` leave behind them, if the source only reads; see `weights.source.ReadingSource`.
        memory_fraction: The share of its GPU that torch may use in this process while the trainer has the device, from
            `load` until the weights are offloaded. The rest is for the memory that sleeping engines keep.
        group: The process group of the trainer; see `Peers`.
        **update: Options of `push_from_all`, e.g. `bucket_bytes`, `timeout_s`.

    Raises:
        InvalidRequestError: `memory_fraction` is not above 0 and at most 1, an option of the update is unknown or has a
            bad value, an adapter is to be sent to engines that discard their base weights, or a process group of a
            `PausableMemory` sleeps while the weights are sent.
    """

    def __init__(
        self,
        engines: EngineHandle | Any | Sequence[EngineHandle | Any],
        source: Tensors,
        *,
        weights: Sequence[Any] = (),
        others: Sequence[Any] = (),
        from_host: bool = False,
        level: int | None = None,
        mode: str = "abort",
        keep: Sequence[str] | None = None,
        adapter: Adapter | str | None = None,
        overlap: bool = True,
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
        if adapter is not None and level == Level.DISCARD:
            raise InvalidRequestError(
                "level 2 discards the base weights, and an update of an adapter does not bring them back: use level=1",
                field="level",
                got=level,
            )
        self._adapter = Adapter(adapter) if isinstance(adapter, str) else adapter
        if level is None:
            level = (Level.DISCARD if adapter is None else Level.PRESERVE).value
        self.engines = as_engines(engines)
        self._source = source
        self._weights = [_movable(part, gradients=False) for part in weights]
        modules = [part for part in weights if isinstance(part, torch.nn.Module) and not isinstance(part, Movable)]
        self._others = [*(_movable(part) for part in others), Offloader(*modules, gradients=True)]
        require_awake_groups(self._weights, self._others, from_host=from_host)
        self._from_host = from_host
        self._sleep: dict[str, Any] = {"level": level, "mode": mode, **({} if keep is None else {"keep": keep})}
        if mode == PauseMode.FREEZE:
            self._sleep["tags"] = [Tag.WEIGHTS.value, Tag.CUDA_GRAPH.value]
            update["mode"] = mode
        self._overlap = overlap
        self._leaves_beside = overlap and not from_host
        sent = [source] if update.get("draft") is None else [source, update["draft"]]
        self._only_read = all(map(only_reads, sent))
        self._memory_fraction = memory_fraction
        self._peers = Peers(group)
        self._update = update
        self._stays = 0  # bytes that torch held beside the trainer's after garbage was collected
        self._lock = threading.Lock()  # one step at a time: a cancelled task leaves its step running

    @contextmanager
    def training(self, weight_version: str | None = None) -> Iterator[HandoffReport]:
        """Put the engines to sleep and load the trainer for the body. Afterwards send the weights and wake the engines.

        If the body fails on any process, the engines stay asleep and the trainer stays loaded.

        Args:
            weight_version: See `sync`.
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
            self._on_engines(report, "sleep", lambda engine: engine.sleep(**self._sleep))
            self._limit(self._memory_fraction)
            self._move(report, "load", [*self._weights, *self._others])
        return report

    def sync(self, weight_version: str | None = None, report: HandoffReport | None = None) -> HandoffReport:
        """The second half: send the weights, and open the engines.

        Args:
            weight_version: The name of the new weights on the engines; by default they count versions.
            report: A report to extend.
        """
        report = report or HandoffReport()
        with self._lock:
            leaving = Leaving(self._others, self._weights, early=self._only_read)
            try:
                if not self._begin_others(report, leaving):
                    self._move(report, "offload_others", self._others)
                    self._move(report, "offload" if self._from_host else "load", self._weights)
                    self._begin_weights(leaving)
                if not self._updated_beside(leaving, report, weight_version):
                    self._free_others(report, leaving)
                    self._update_engines(report, weight_version)
                self._free_others(report, leaving)
                self._move(report, "offload", self._weights, leaving.weights)
            finally:
                leaving.abort()
            self._limit(1.0)
            self._on_engines(report, "wake_kv_cache", lambda engine: engine.wake_up())
        return report

    def _update_engines(self, report: HandoffReport, weight_version: str | None) -> None:
        self._on_engines(report, "wake_weights", lambda engine: engine.wake_up(["weights"]))
        with timed(report.seconds, "sync"), self._step("sync"):
            report.update = push_from_all(
                self.engines,
                self._source,
                self._peers,
                weight_version=weight_version,
                adapter=self._adapter,
                **self._update,
            )

    def _updated_beside(self, leaving: Leaving, report: HandoffReport, weight_version: str | None) -> bool:
        """Update the engines. Returns `False` if that lacks memory which `leaving.others` will free."""
        try:
            self._update_engines(report, weight_version)
        except RLMemoryError as error:
            if not leaving.others or not lacks_memory(error):
                raise
            return False
        return True

    def _begin_others(self, report: HandoffReport, leaving: Leaving) -> bool:
        """Start to offload `others`, and the weights behind them, if the engines' weights fit on the devices beside.

        Returns: whether that was done; `others` must be offloaded first otherwise.
        """
        if not self._leaves_beside:
            return False
        rest = [part for part in self._others if not isinstance(part, PausablePart)]

        def may_begin() -> bool:
            awake = all(isinstance(part, PausablePart) and part.is_awake() for part in self._weights)
            return bool(leaving.others) and awake

        def begin() -> Room:
            report.add("offload_others", [part.offload() for part in rest])
            leaving.drop_gradients()
            if torch.cuda.is_initialized():
                self._empty_cache("offload_others")
            leaving.begin()
            return room(self.engines, leaving.others)

        with self._step("offload_others"):
            if not all(self._peers.agree(may_begin)):
                return False
        with timed(report.seconds, "offload_others"), self._step("offload_others"):
            self._peers.agree(leaving.prepare)
            fits = suffices(self._peers.agree(begin, as_type=Room))
        if not fits:
            self._free_others(report, leaving)
        return True

    def _begin_weights(self, leaving: Leaving) -> None:
        """Start to offload the weights, which the update will only read. `others` have left."""
        leaving.others.clear()
        if not self._leaves_beside:
            leaving.weights.clear()
            return
        with self._step("offload"):
            self._peers.agree(leaving.prepare)
            self._peers.agree(leaving.begin)

    def _free_others(self, report: HandoffReport, leaving: Leaving) -> None:
        """Wait for the copies of `others` that `_begin_others` has started, if any, and free the device memory."""
        if leaving.others:
            with timed(report.seconds, "offload_others"), self._step("offload_others"):
                self._peers.agree(lambda: report.add("offload_others", leaving.free_others()))

    def _body_ended(self) -> None:
        """Wait for the bodies of the other processes."""
        with self._lock, self._step("training"):
            self._peers.share(None)

    def _body_failed(self, error: BaseException) -> None:
        """Report a failed body to the other processes, without waiting for theirs."""
        self._peers.step = "training"
        self._peers.announce_failure(error)

    def _limit(self, fraction: float) -> None:
        """Limit torch to a share of the GPU: then the trainer runs out of memory before an engine fails to wake."""
        # If `memory_fraction` is 1, a limit that the trainer has set itself stays.
        if self._memory_fraction < 1 and torch.cuda.is_initialized():
            torch.cuda.set_per_process_memory_fraction(fraction)

    def _on_engines(self, report: HandoffReport, step: str, call: Callable[[EngineHandle], Any]) -> None:
        with timed(report.seconds, step), self._step(step):
            self._peers.agree(lambda: on_all(self.engines, call))

    def _move(
        self, report: HandoffReport, step: str, parts: Sequence[Movable], prepared: Collection[Pausable] = ()
    ) -> None:
        """Load or offload. After an offload, empty torch's cache.

        Pausable memories prepare on all processes before any of them acts. Those in `prepared` have done so already.
        """
        load = step == "load"
        tags = tags_of(parts)
        later = tags_of(self._others) if load and self._overlap else {}
        rest = [part for part in parts if not isinstance(part, PausablePart)]

        def prepare() -> None:
            for memory, own in tags.items():
                if memory not in prepared:
                    (memory.prepare_wake if load else memory.prepare_sleep)(own)

        def run() -> None:
            moves = commit_all(tags, later)
            moves += [part.load() if load else part.offload() for part in rest]
            total = report.add(step, moves)
            report.seconds[step] += sum(move.seconds for move in moves)
            if not load and (total or torch.cuda.is_initialized()):
                report.seconds[step] += self._empty_cache(step)

        with self._step(step):
            try:
                self._peers.agree(prepare)
                self._peers.agree(run)
            finally:
                for memory in tags:
                    memory.abort()  # what was prepared and not committed, because a process failed

    def _empty_cache(self, step: str) -> float:
        """Empty torch's cache. Returns the seconds that it took.

        Garbage is collected only once, before the engines map their weights, because the collection is slow. It is not
        collected if torch holds no more than an earlier collection has left.
        """
        if step != "offload_others":
            return aggressive_empty_cache(max_rounds=0).seconds
        device = own_device()
        known = (getattr(part, "resident_bytes", None) for part in [*self._weights, *self._others])
        needed = sum(resident_bytes(device) for resident_bytes in known if resident_bytes is not None)
        clearing = aggressive_empty_cache(threshold_bytes=COLLECT_THRESHOLD_BYTES, in_use_bytes=needed + self._stays)
        left = max(torch.cuda.memory_reserved() - needed, 0) if torch.cuda.is_initialized() else 0
        self._stays = left if clearing.freed_bytes else min(self._stays, left)
        return clearing.seconds

    @contextmanager
    def _step(self, step: str) -> Iterator[None]:
        """Name the step in the agreements with the other processes, and in the details of errors."""
        self._peers.step = step
        try:
            yield
        except RLMemoryError as error:
            error.details["step"] = step
            raise
        except Exception as error:
            message = f"{step}: {type(error).__name__}: {error}"
            raise RLMemoryError(message, step=step, type=type(error).__name__) from error


class AsyncRolloutHandoff:
    """`RolloutHandoff` for an event loop. Also works with engines whose methods are coroutines (`AsyncLLM`).

    `RolloutHandoff` documents the arguments and methods. The steps run in a thread. If a task is cancelled, its step
    runs to its end, and the next call waits for it.
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
