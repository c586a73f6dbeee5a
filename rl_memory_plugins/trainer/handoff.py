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

With `overlap` the optimiser leaves while the engines' weights wake, if the device has room for both. If it has ample
room for everything, the engines open first, and all of the trainer leaves behind them, also after `sync` has returned.
Otherwise the device never holds the trainer's weights together with the KV cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from rl_memory_plugins.errors import InvalidRequestError, RLMemoryError
from rl_memory_plugins.memory.threads import Beside
from rl_memory_plugins.tags import Level, PauseMode, Tag
from rl_memory_plugins.trainer.adapters import Adapter, as_adapter
from rl_memory_plugins.trainer.engine_handle import EngineHandle, as_engines
from rl_memory_plugins.trainer.handoff_report import HandoffReport
from rl_memory_plugins.trainer.leaving import Leaving
from rl_memory_plugins.trainer.offloading import Moved
from rl_memory_plugins.trainer.participants import Participants
from rl_memory_plugins.trainer.parts import TrainerParts
from rl_memory_plugins.trainer.pausable_part import Pausable, PausablePart, require_awake_groups, wait_for
from rl_memory_plugins.trainer.peers import Peers
from rl_memory_plugins.trainer.room import (
    Needs,
    Room,
    cache_may_stay,
    holds_all,
    lacks_memory,
    needs_of,
    room,
    suffices,
)
from rl_memory_plugins.trainer.sources.model import Tensors, only_reads
from rl_memory_plugins.trainer.turns import Turns
from rl_memory_plugins.trainer.update import push_from_all, require_on_failure, require_options
from rl_memory_plugins.weights.later import Frees


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

    With `overlap`, `others` and `weights` are still on the device after a failure of `wake_weights` or `sync`, and of
    `wake_kv_cache` if they were to leave behind the engines. If they fail to leave behind open engines, the next call
    raises that as a failure of `offload`; what has not left is awake.

    The body of `training` counts as the step `training`. A process whose body fails raises the error at once. The other
    processes raise at the end of their own body: an `RLMemoryError` with `details["trainer_rank"]`, or, if the failed
    process has exited, an error about the lost connection. Processes that make different calls raise a
    `StateConflictError`, and so does a call that a step or a signal handler during it makes.

    Save and load checkpoints of `weights` and `others` in the body of `training`. Elsewhere they are offloaded; see the
    module `offloading`.

    Args:
        engines: The engines that this process controls: `EngineClient`s or the engines' own Python objects. Give each
            engine to one process, and an empty list to processes without an engine.
        source: The tensors to send: a `TensorSource`, a module or a mapping.
        weights: What the update reads, one part or several: modules, parts of a `PausableMemory` and other `Movable`s.
            The gradients of modules move with `others`, also those that a `PausableMemory` drops.
        others: What only training needs, one part or several: optimisers, reference models, parts of a
            `PausableMemory`.
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
            `PausableMemory` leave behind them, if the source only reads; see `weights.source.ReadingSource`. Where the
            devices also have 16 GiB more than all that the engines wake, torch's cache stays until all have left. And
            where they have as much beside all that the trainer holds, at the latest once the cache is empty, `sync`
            returns as soon as the engines are open, and all leave behind it; not with `on_failure="continue"`, nor with
            `process_groups` of a `PausableMemory`.
        memory_fraction: The share of its GPU that torch may use in this process while the trainer has the device, from
            `load` until the weights are offloaded or, where they leave behind the engines, these open. The rest is for
            the memory that sleeping engines keep. torch counts also what sleeps in this process: an engine, or tags.
        on_failure: What follows if an engine fails in a step. `abort`: the handoff fails. `continue`: it goes on
            without that engine, and `HandoffReport.failed` names the engine with its error and its state. An engine
            that was left out is closed before the others open, if it answers at all: none answers under former weights
            beside others that answer under new ones. Each half of a handoff asks all engines again, and an engine that
            has come back gets the new weights with the others. If no engine is left, the handoff fails.
        group: The process group of the trainer; see `Peers`.
        **update: Options of `push_from_all`, e.g. `bucket_bytes`, `timeout_s`.

    Raises:
        InvalidRequestError: `memory_fraction` is not above 0 and at most 1, `on_failure` is unknown, `weights` or
            `others` is no part, partial updates are to go on without engines, an option of the update is unknown or has
            a bad value, an adapter is to be sent to engines that discard their base weights, or a process group of a
            `PausableMemory` sleeps while the weights are sent.
    """

    def __init__(
        self,
        engines: EngineHandle | Any | Sequence[EngineHandle | Any],
        source: Tensors,
        *,
        weights: Any = (),
        others: Any = (),
        from_host: bool = False,
        level: int | None = None,
        mode: str = "abort",
        keep: Sequence[str] | None = None,
        adapter: Adapter | str | None = None,
        overlap: bool = True,
        memory_fraction: float = 1.0,
        on_failure: str = "abort",
        group: Any = None,
        **update: Any,
    ) -> None:
        if not 0 < memory_fraction <= 1:
            raise InvalidRequestError(
                f"memory_fraction must be above 0 and at most 1, not {memory_fraction}",
                field="memory_fraction",
                got=memory_fraction,
            )
        require_on_failure(on_failure)
        require_options(update)
        if on_failure == "continue" and update.get("partial"):
            raise InvalidRequestError(
                "partial updates cannot go on without engines: the next one would not bring an engine up to date that "
                "was left out",
                field="on_failure",
                got=on_failure,
            )
        if adapter is not None and level == Level.DISCARD:
            raise InvalidRequestError(
                "level 2 discards the base weights, and an update of an adapter does not bring them back: use level=1",
                field="level",
                got=level,
            )
        self._adapter = as_adapter(adapter)
        if level is None:
            level = (Level.DISCARD if adapter is None else Level.PRESERVE).value
        self.engines = as_engines(engines)
        self._source = source
        self._peers = Peers(group)
        self._parts = TrainerParts(weights, others, self._peers, overlap=overlap, memory_fraction=memory_fraction)
        require_awake_groups(self._parts.weights, self._parts.others, from_host=from_host)
        self._from_host = from_host
        self._sleep: dict[str, Any] = {"level": level, "mode": mode, **({} if keep is None else {"keep": keep})}
        if mode == PauseMode.FREEZE:
            self._sleep["tags"] = [Tag.WEIGHTS.value, Tag.CUDA_GRAPH.value]
            update["mode"] = mode
        self._leaves_beside = overlap and not from_host
        sent = [source] if update.get("draft") is None else [source, update["draft"]]
        self._only_read = all(map(only_reads, sent))
        self._memory_fraction = memory_fraction
        self._on_failure = on_failure
        self._update = update
        self._left: list[Pausable] = []  # what the latest `sync` has left behind; empty on all processes or on none
        self._left_frees = Frees()
        self._turns = Turns()  # one step at a time: a cancelled task leaves its step running

    @contextmanager
    def training(self, weight_version: str | None = None) -> Iterator[HandoffReport]:
        """Put the engines to sleep and load the trainer for the body. Afterwards send the weights and wake the engines.

        If the body fails on any process, the engines stay asleep and the trainer stays loaded.

        Args:
            weight_version: See `sync`.
        """
        report = self.release()
        try:
            with report.noted("training"):
                yield report
        except BaseException as error:
            self._body_failed(error)
            raise
        self._body_ended()
        self.sync(weight_version, report)

    def release(self) -> HandoffReport:
        """The first half: put the engines to sleep, and load the trainer."""
        report = self._new_report()
        with self._turns.turn():
            self._await_left(report)
            engines = self._participants()
            self._on_engines(engines, report, "sleep", lambda engine: engine.sleep(**self._sleep))
            self._parts.limit(self._memory_fraction)
            self._parts.move(report, "load", [*self._parts.weights, *self._parts.others])
        return report

    def sync(self, weight_version: str | None = None, report: HandoffReport | None = None) -> HandoffReport:
        """The second half: send the weights, and open the engines.

        With `overlap` and ample memory, the trainer's parts may still be leaving the devices when this returns. See
        `PausableMemory.commit_behind` for who waits for that; the next half does.

        Args:
            weight_version: The name of the new weights on the engines; by default they count versions.
            report: A report to extend.
        """
        report = report or self._new_report()
        report.training_ended()
        with self._turns.turn():
            self._await_left(report)
            engines = self._participants()
            leaving = Leaving(self._parts.others, self._parts.weights, early=self._only_read)
            try:
                if not self._begin_others(report, leaving):
                    self._parts.move(report, "offload_others", self._parts.others)
                    self._parts.move(report, "offload" if self._from_host else "load", self._parts.weights)
                    self._begin_weights(leaving)
                if not self._updated_beside(engines, leaving, report, weight_version):
                    leaving.behind = False
                    self._free_others(report, leaving)
                    self._empty_kept_cache(report, leaving)
                    leaving.frees.run()
                    engines.take_back()
                    self._update_engines(engines, leaving, report, weight_version)
                if not leaving.behind:
                    self._offload(report, leaving)
                self._parts.limit(1.0)
                with self._peers.at("wake_kv_cache"):
                    engines.close_the_rest()
                self._open(engines, report, leaving)
                with self._peers.at("wake_kv_cache"):
                    engines.tell_states()
                if leaving.behind:
                    self._leave_behind(report, leaving)
            finally:
                leaving.abort()
                report.failed = engines.failures
        return report

    def _new_report(self) -> HandoffReport:
        return HandoffReport(trainer_rank=self._peers.rank, resident=self._parts.counter())

    def _participants(self) -> Participants:
        """All engines, those that were left out before too."""
        return Participants(self.engines, self._peers, goes_on=self._on_failure == "continue")

    def _update_engines(
        self, engines: Participants, leaving: Leaving, report: HandoffReport, weight_version: str | None
    ) -> None:
        self._on_engines(engines, report, "wake_weights", lambda engine: engine.wake_up(["weights"]))
        # To free what the update has allocated on a GPU would wait for the copies of all that leaves.
        frees = leaving.frees.noted() if leaving.behind else nullcontext()
        with report.timed("sync"), self._peers.at("sync"), frees:
            report.update = push_from_all(
                engines.for_update(),
                self._source,
                self._peers,
                weight_version=weight_version,
                adapter=self._adapter,
                on_failure=self._on_failure,
                **self._update,
            )
            engines.updated(report.update)

    def _updated_beside(
        self, engines: Participants, leaving: Leaving, report: HandoffReport, weight_version: str | None
    ) -> bool:
        """Update the engines. Returns `False` if one lacks memory which `leaving.others` will free."""
        try:
            self._update_engines(engines, leaving, report, weight_version)
        except RLMemoryError as error:
            if not leaving.others or not lacks_memory(error):
                raise
            return False
        return not leaving.others or not any(lacks_memory(failure.error) for failure in engines.failures)

    def _begin_others(self, report: HandoffReport, leaving: Leaving) -> bool:
        """Start to offload `others`, and the weights behind them, if the engines' weights fit on the devices beside.

        Returns: whether that was done; `others` must be offloaded first otherwise.
        """
        if not self._leaves_beside:
            return False
        rest = [part for part in self._parts.others if not isinstance(part, PausablePart)]

        def may_begin() -> bool:
            awake = all(isinstance(part, PausablePart) and part.is_awake() for part in self._parts.weights)
            return bool(leaving.others) and awake

        def prepare() -> Needs:
            asking = Beside(lambda: needs_of(self.engines), "rl-memory-needs").start()  # both take milliseconds
            try:
                leaving.prepare()
            finally:
                needs = asking.result()
            return needs

        aborts = self._on_failure == "abort"  # an engine that is left out for want of memory would not be asked again
        behind = aborts and leaving.may_stay

        def drop(needs: Needs) -> Room:
            report.add("offload_others", [part.offload() for part in rest])
            leaving.drop_gradients()
            return room(needs, leaving.tags(), behind=behind)

        def begin(needs: Needs) -> Room:
            if torch.cuda.is_initialized() and not leaving.keeps_cache:
                self._parts.empty_cache("offload_others")
            leaving.begin()
            return room(needs, leaving.tags(), behind=behind)

        with self._peers.at("offload_others"):
            if not all(self._peers.agree(may_begin)):
                return False
        with report.timed("offload_others", moves=True), self._peers.at("offload_others"):
            needs = self._peers.agree(prepare, as_type=Needs)[self._peers.rank]
            rooms = self._peers.agree(lambda: drop(needs), as_type=Room)
            leaving.keeps_cache = aborts and cache_may_stay(rooms)
            rooms = self._peers.agree(lambda: begin(needs), as_type=Room)
            leaving.behind = holds_all(rooms)
        if not suffices(rooms):
            self._free_others(report, leaving)
            self._empty_kept_cache(report, leaving)  # memory has gone since it was to stay
        return True

    def _begin_weights(self, leaving: Leaving) -> None:
        """Start to offload the weights, which the update will only read. `others` have left."""
        leaving.others.clear()
        if not self._leaves_beside:
            leaving.weights.clear()
            return
        with self._peers.at("offload"):
            self._peers.agree(leaving.prepare)
            self._peers.agree(leaving.begin)

    def _free_others(self, report: HandoffReport, leaving: Leaving) -> None:
        """Wait for the copies of `others` that `_begin_others` has started, if any, and free the device memory."""
        if leaving.others:
            with report.timed("offload_others", moves=True), self._peers.at("offload_others"):
                self._peers.agree(lambda: report.add("offload_others", leaving.free_others()))

    def _offload(self, report: HandoffReport, leaving: Leaving) -> None:
        """Wait for all that leaves, and free the device memory. Weights that leave only now are copied too."""
        self._free_others(report, leaving)
        keeps_cache = leaving.keeps_cache
        self._parts.move(report, "offload", self._parts.weights, leaving.weights, keeps_cache=keeps_cache)
        leaving.frees.run()

    def _leave_behind(self, report: HandoffReport, leaving: Leaving) -> None:
        """Let all leave behind this handoff. The last to leave is torch's cache, if it was to stay."""
        then = partial(self._parts.empty_cache, "offload") if leaving.keeps_cache else (lambda: 0.0)
        self._left, self._left_frees = list(leaving.tags()), leaving.frees

        def commit() -> None:
            of_others, of_weights = leaving.commit_behind(then)
            report.add("offload_others", [Moved(of_others, 0.0)])
            report.add("offload", [Moved(of_weights, 0.0)])
            report.count_as_gone(of_others + of_weights)

        with report.timed("offload"), self._peers.at("offload"):
            self._peers.agree(commit)

    def _await_left(self, report: HandoffReport) -> None:
        """Wait for what the latest `sync` has left behind. A failure there is one of the step `offload`."""
        left, self._left = self._left, []
        if left:
            with report.timed("offload", moves=True), self._peers.at("offload"):
                try:
                    self._peers.agree(lambda: wait_for(left))
                finally:
                    self._left_frees.run()  # not done yet if something has failed to leave

    def _empty_kept_cache(self, report: HandoffReport, leaving: Leaving) -> None:
        """Empty torch's cache now, if it was to stay: on all processes, before an engine is asked again."""
        if leaving.keeps_cache:
            leaving.keeps_cache = False
            with report.timed("offload_others"), self._peers.at("offload_others"):
                self._peers.agree(lambda: self._parts.empty_cache("offload_others"))

    def _open(self, engines: Participants, report: HandoffReport, leaving: Leaving) -> None:
        """Wake the rest of the engines, again if one lacks memory that the trainer still has.

        Torch's cache, if it was to stay, is emptied beside, unless copies go on: to empty it would wait for them.
        """

        def wake() -> None:
            self._on_engines(engines, report, "wake_kv_cache", lambda engine: engine.wake_up())

        if not (leaving.keeps_cache or leaving.behind):
            wake()
            return
        emptying = None
        if not leaving.behind:
            emptying = Beside(lambda: self._parts.empty_cache("offload"), "rl-memory-cache").start()
        lacking = False
        try:
            wake()
        except RLMemoryError as error:
            if not lacks_memory(error):
                if emptying is not None:
                    emptying.join()  # the caller may capture a graph now
                raise
            lacking = True
        if emptying is not None:
            with report.timed("offload"), self._peers.at("offload"):
                self._peers.agree(emptying.result)
        if lacking:
            if leaving.behind:
                leaving.behind = False
                self._offload(report, leaving)
            self._empty_kept_cache(report, leaving)  # of garbage too
            wake()

    def _body_ended(self) -> None:
        """Wait for the bodies of the other processes."""
        with self._turns.turn(), self._peers.at("training"):
            self._peers.share(None)

    def _body_failed(self, error: BaseException) -> None:
        """Report a failed body to the other processes, without waiting for theirs."""
        self._peers.step = "training"
        self._peers.announce_failure(error)

    def _on_engines(
        self, engines: Participants, report: HandoffReport, step: str, call: Callable[[EngineHandle], Any]
    ) -> None:
        with report.timed(step), self._peers.at(step):
            engines.call(call)
        report.failed = engines.failures
