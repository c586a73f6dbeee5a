"""A fleet of engines in Ray actors, with the calls of one engine.

    fleet = EngineFleet.start(EngineDescription("vllm", {"model": model}), 8)
    handoff = fleet.handoff(source, weights=[weights], others=[others])
    with handoff.training():
        train_step(model, optimizer)
    answers = fleet.generate(prompts, {"max_tokens": 64})
    fleet.replace(source)  # what has died since

Ray places the actors, and restarts one that has died. What Ray does not know is here: which engines take part in a
call, and that an engine that was started again admits nothing before it has the weights of the others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import msgspec

from rl_memory_plugins.client import STATUS_S
from rl_memory_plugins.errors import (
    EngineLostError,
    InvalidRequestError,
    NoAnswerError,
    RLMemoryError,
    StateConflictError,
)
from rl_memory_plugins.extras import needs
from rl_memory_plugins.memory.interrupts import to_its_end
from rl_memory_plugins.memory.threads import in_parallel
from rl_memory_plugins.ray.actor import EngineActor
from rl_memory_plugins.ray.description import EngineDescription
from rl_memory_plugins.ray.engines import Generated, engine_class
from rl_memory_plugins.ray.handle import REQUESTS, EngineActorHandle
from rl_memory_plugins.ray.handoff import FleetHandoff
from rl_memory_plugins.records import INITIAL_VERSION
from rl_memory_plugins.tags import Level, Tag
from rl_memory_plugins.timing import LONGEST_S
from rl_memory_plugins.trainer import EngineFailure, Peers, push_from_all
from rl_memory_plugins.trainer.engine_handle import on_all
from rl_memory_plugins.trainer.outcomes import Outcome, on_each
from rl_memory_plugins.trainer.sources.model import Tensors

with needs("ray"):
    import ray
    from ray.exceptions import GetTimeoutError
    from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

CALLS = 10_000
"""The most requests that an actor runs at a time. They wait in the engine, not before it."""

START_S = 3600.0
"""How long an engine may take to start. Large models load for minutes from a slow disk."""

logger = logging.getLogger(__name__)


class EngineFleet:
    """Engines in Ray actors. A call goes to all engines that are up, and holds on all of them or raises.

    An engine that dies during a call is left out, and so is one that fails in an update or a handoff. It takes part
    again after `replace`. Transitions of a fleet take turns; `generate` and `status` wait for none.

    Args:
        engines: The engines that this process controls: those of a fleet that `start` has made, or a part of them in
            each process of a trainer.
        group: The process group of the trainer, if several processes make the calls together; see `trainer.Peers`.
    """

    def __init__(self, engines: Iterable[EngineActorHandle], group: Any = None) -> None:
        self.engines = list(engines)
        self.turn: AbstractContextManager[Any] = threading.RLock()
        self._group = group
        self._peers: Peers | None = None
        self._updates = 0
        self._version = INITIAL_VERSION
        self._own_placement: PlacementGroup | None = None

    @classmethod
    def start(
        cls,
        description: EngineDescription,
        count: int,
        *,
        placement: PlacementGroup | None = None,
        bundles: Sequence[int] | None = None,
        start_timeout_s: float | None = START_S,
    ) -> EngineFleet:
        """Start a fleet. Returns when all engines have started. They live as long as this process, or until `close`.

        Args:
            count: The number of engines.
            placement: The trainer's placement group, for engines beside the trainer. By default a group of their own,
                with a bundle for each engine.
            bundles: The bundle of each engine in `placement`; by default the first ones.
            start_timeout_s: The longest wait for the placement, and then for the engines, in seconds; `None` for no
                limit.

        Raises:
            NoAnswerError: Ray cannot reserve the bundles, or an engine has not started within `start_timeout_s`.
                Nothing is left of the fleet.
            InvalidRequestError: the description names no engine, or the bundles are not as many as the engines.
            RLMemoryError: an engine cannot start; that of the first one. Nothing is left of the fleet.
            Exception: Ray takes the description for no actor, e.g. its `runtime_env`. Nothing is left of the fleet.
        """
        engine_class(description.engine)
        bundles = range(count) if bundles is None else bundles
        if len(bundles) != count:
            raise InvalidRequestError(f"{count} engines need as many bundles, not {len(bundles)}", field="bundles")
        actor_class = ray.remote(concurrency_groups={REQUESTS: CALLS})(EngineActor)  # all else waits for no request
        fleet = cls([])  # `close` ends what there is of it
        failures: list[Exception] = []  # in the order of time

        def start(engine: EngineActorHandle) -> None:
            try:
                engine.start(timeout_s=start_timeout_s)
            except Exception as error:
                failures.append(error)
                fleet.close()  # ends the starts of the others, which would keep the caller waiting
                raise

        try:
            if placement is None:
                placement = fleet._own_placement = placement_group([dict(description.resources)] * count)
                _await_placement(placement, start_timeout_s)
            for number, bundle in enumerate(bundles):
                actor = actor_class.options(
                    max_restarts=-1,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(placement, bundle),
                    **description.options(),
                ).remote(description.engine, dict(description.arguments), description.rl_memory)
                fleet.engines.append(EngineActorHandle(actor, number))
            try:
                in_parallel([partial(start, engine) for engine in fleet.engines], "rl-memory-engine", stop=fleet.close)
            except Exception:
                raise failures[0] from None
        except BaseException:  # the group would hold its resources until the job ends
            fleet.close()
            raise
        finally:
            failures.clear()  # breaks the reference cycles between the errors and this frame
        return fleet

    def close(self) -> None:
        """End the engines, and remove the placement group if the fleet has made it."""
        for engine in self.engines:
            ray.kill(engine.actor)
        if self._own_placement is not None:
            remove_placement_group(self._own_placement)
        self.engines.clear()

    def __enter__(self) -> EngineFleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def up(self) -> list[EngineActorHandle]:
        """The engines that take part in calls."""
        return [engine for engine, phase in zip(self.engines, self._phases(), strict=True) if phase == "started"]

    def sleep(self, level: Any = 1, tags: Any = None, mode: Any = "abort", keep: Any = None) -> dict[int, Any]:
        """`EngineClient.sleep` of all engines. Returns their answers by the numbers of the engines."""
        return self._on_all(lambda engine: engine.sleep(level, tags, mode, keep))

    def wake_up(self, tags: Any = None) -> dict[int, Any]:
        """`EngineClient.wake_up` of all engines. Returns their answers by the numbers of the engines."""
        return self._on_all(lambda engine: engine.wake_up(tags))

    def update(self, tensors: Tensors, weight_version: str | None = None, **options: Any) -> dict[str, Any]:
        """`trainer.push_from_all` to all engines, with `on_failure="continue"`.

        After an interrupt all of them leave the fleet, and `replace` brings them back.

        Args:
            weight_version: The name of the weights; by default the number of this update.
            **options: Those of `push_from_all`. The `base_version` of a partial update is by default the version of the
                fleet's last update.
        """
        with self.turn:
            if options.get("partial"):
                options = {"base_version": self._version, **options}
            engines, version = self.present(), self.next_version(weight_version)
            try:
                report = push_from_all(
                    engines, tensors, self.peers(), weight_version=version, on_failure="continue", **options
                )
                self.updated_to(version)
                self.leave_out(report["failed"])
            except BaseException as error:
                self.failed_to(version, error, engines)
                raise
        return report

    def handoff(self, source: Tensors, **options: Any) -> FleetHandoff:
        """`trainer.RolloutHandoff` with all engines; the options are those of that class."""
        return FleetHandoff(self, source, **{"group": self._group, **options})

    def replace(
        self,
        tensors: Tensors,
        weight_version: str | None = None,
        *,
        start_timeout_s: float | None = START_S,
        **options: Any,
    ) -> list[int]:
        """Bring back the engines that were left out: give them the weights of the others, and open them.

        In an actor that Ray has restarted an engine starts first.

        The other engines serve meanwhile. Call it while the devices have room for an engine; in a thread, to use the
        others from this process. Several processes of a trainer call it together, and not in a thread beside a handoff:
        each process would agree with the others in an order of its own.

        Args:
            tensors: The weights that the other engines have, all of them.
            weight_version: Their version; by default that of the fleet's last update.
            start_timeout_s: The longest wait for an engine that starts, in seconds; `None` for no limit.
            **options: As for `trainer.push_from_all`, but for `on_failure`.

        Returns: the numbers of the engines that serve again. One that cannot start is missing, and a warning in the log
            says why. Each call tries it again.

        Raises:
            InvalidRequestError: `on_failure` is not `abort`.
            NoAnswerError: no engine has started, the first one not within `start_timeout_s`; its actor was ended.
            RLMemoryError: no engine can start, or the update has failed. The engines that were to be replaced admit
                nothing; call again.
        """
        if options.get("on_failure", "abort") != "abort":
            raise InvalidRequestError(
                "replace() opens engines only if all of them have the weights: call it again after a failure",
                field="on_failure",
                got=options["on_failure"],
            )
        with self.turn:
            peers = self.peers()
            absent: list[EngineActorHandle] = []

            def look() -> int:
                present = self.up()
                absent.extend(engine for engine in self.engines if engine not in present)
                return len(absent)

            if not sum(peers.agree(look)):
                return []
            failures: list[RLMemoryError] = []

            def start() -> int:
                answers = on_each(absent, lambda one: one.start(closed=True, timeout_s=start_timeout_s), LONGEST_S)
                for engine, answer in zip(list(absent), answers, strict=True):
                    if isinstance(answer, RLMemoryError):
                        logger.warning("engine %d is not replaced: %s", engine.number, answer)
                        answer.details.setdefault("engine", engine.number)
                        failures.append(answer)
                        absent.remove(engine)  # the others need not wait for it: its node may be gone for good
                return len(absent)

            def give_up() -> None:
                if failures:
                    raise failures.pop(0)

            if not sum(peers.agree(start)):
                peers.agree(give_up)
            # An engine that has not died has former weights. They go first: nobody may meet them.
            peers.agree(lambda: on_all(absent, lambda engine: engine.sleep(Level.DISCARD, [Tag.WEIGHTS])))
            peers.agree(lambda: on_all(absent, lambda engine: engine.wake_up([Tag.WEIGHTS])))
            version = weight_version or self._version
            push_from_all(absent, tensors, peers, weight_version=version, **options)
            peers.agree(lambda: on_all(absent, _open))
            return [engine.number for engine in absent]

    def generate(
        self, prompts: Sequence[list[int]], sampling: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    ) -> list[Generated]:
        """Answer prompts on the engines in turn. The prompts of an engine that dies go to the others.

        Args:
            prompts: Token ids of each prompt.
            sampling: The engine's sampling parameters, of all prompts or of each; see `Engine.generate`.

        Returns: the answers, in the order of the prompts.

        Raises:
            EngineAsleepError: an engine admits no requests.
            StateConflictError: no engine is up.
        """
        each = [sampling] * len(prompts) if isinstance(sampling, Mapping) else sampling
        answers: dict[int, Generated] = {}
        while len(answers) < len(prompts):
            engines = self.up()
            _require_some(len(engines))
            left = [number for number in range(len(prompts)) if number not in answers]
            asked = [(number, engines[turn % len(engines)]) for turn, number in enumerate(left)]
            waiting = [
                (number, engine, engine.ask(list(prompts[number]), dict(each[number]))) for number, engine in asked
            ]
            for number, engine, reference in waiting:
                try:
                    answers[number] = engine.answer(reference)
                except EngineLostError:
                    continue
        return [answers[number] for number in range(len(prompts))]

    def peers(self) -> Peers:
        """The processes that make the calls together."""
        if self._peers is None:
            self._peers = Peers(self._group)
        return self._peers

    def next_version(self, weight_version: str | None) -> str:
        """A name for the weights of an update. The engines' own counters differ after a failed update."""
        self._updates += 1
        return str(self._updates) if weight_version is None else weight_version

    def updated_to(self, weight_version: str) -> None:
        """Note the version that all engines but those left out have now."""
        self._version = weight_version

    def failed_to(self, weight_version: str, error: BaseException, engines: Sequence[EngineActorHandle] = ()) -> None:
        """An update has failed in this process. If some engines have the weights, the others leave the fleet.

        Args:
            engines: Those that leave after an interrupt: nobody knows then which of them have the weights.
        """
        if isinstance(error, RLMemoryError):
            outcomes = msgspec.convert(error.details.get("engines") or [], list[Outcome])
            if any(one.error is None for one in outcomes):
                self.leave_out([one for one in outcomes if one.error is not None])
                self.updated_to(weight_version)
        elif not isinstance(error, Exception):  # any other error comes before the first byte or after the last
            self.updated_to(weight_version)  # the trainer has these weights, and `replace` sends them

            def leave() -> None:
                on_each(engines, lambda engine: engine.leave(), LONGEST_S)  # hides the interrupt behind no error

            to_its_end(leave)

    def present(self) -> list[EngineActorHandle]:
        """The engines of this process that are up. All processes ask together. Actors that cannot be reached are ended.

        Such an actor may be back a moment later. Its engine would serve weights that the others have left behind, or
        hold memory that the trainer takes.

        Raises:
            StateConflictError: no engine of any process is up.
        """
        engines: list[EngineActorHandle] = []

        def look() -> int:
            for engine, phase in zip(self.engines, self._phases(), strict=True):
                if phase == "started":
                    engines.append(engine)
                elif phase == "lost":
                    engine.end()
            return len(engines)

        _require_some(sum(self.peers().agree(look)))
        return engines

    def leave_out(self, failures: Iterable[EngineFailure | Outcome]) -> None:
        """Have the engines of this process that have failed leave the fleet; see `EngineActorHandle.leave`."""
        failed = {failure.engine for failure in failures if failure.trainer_rank == self.peers().rank}
        leaving = [engine for engine in self.engines if engine.number in failed]
        on_all(leaving, lambda engine: engine.leave())  # type: ignore[attr-defined]

    def _on_all(self, call: Callable[[EngineActorHandle], Any]) -> dict[int, Any]:
        """The answers by the numbers of the engines. Those that are lost leave the fleet."""
        answers: dict[int, Any] = {}

        def run() -> int:
            errors = []
            for engine, answer in zip(engines, on_each(engines, call, LONGEST_S), strict=True):
                if isinstance(answer, EngineLostError):
                    engine.leave()
                elif isinstance(answer, RLMemoryError):
                    answer.details.setdefault("engine", engine.number)
                    errors.append(answer)
                else:
                    answers[engine.number] = answer
            if errors:
                raise errors[0]
            return len(answers)

        with self.turn:
            engines = self.present()
            _require_some(sum(self.peers().agree(run)))
        return answers

    def _phases(self) -> list[str]:
        """The phase of each actor; see `EngineActorHandle.phase`."""
        references = [engine.actor.about.remote() for engine in self.engines]  # all are asked at once
        deadline = time.monotonic() + STATUS_S  # of all
        return [
            engine.phase(reference, max(0.0, deadline - time.monotonic()))
            for engine, reference in zip(self.engines, references, strict=True)
        ]


def _open(engine: Any) -> None:
    engine.wake_up()
    engine.join()


def _await_placement(group: PlacementGroup, timeout_s: float | None) -> None:
    try:
        ray.get(group.ready(), timeout=timeout_s)
    except GetTimeoutError:
        raise NoAnswerError(
            f"Ray has not reserved {group.bundle_specs} within {timeout_s:g} s: `ray status` shows what is free",
            timeout_s=timeout_s,
        ) from None


def _require_some(count: int) -> None:
    if not count:
        raise StateConflictError("no engine of the fleet is up: replace() starts engines again")
