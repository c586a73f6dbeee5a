"""The calls that a client can make to an engine, as operations without I/O.

An adapter derives an `EngineApi` for each client object of its engine and adds the engine's own calls. A blocking
transport implements `run`, which drives an operation. An asyncio transport derives from `AsyncioApi` and implements
`_call`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from rl_memory_plugins import admission, operations, spans
from rl_memory_plugins.board import Boards
from rl_memory_plugins.commands import AnyCommand, UpdateWeights, WakeUp
from rl_memory_plugins.errors import DeviceMemoryError, RLMemoryError, StateConflictError
from rl_memory_plugins.observing import Course, Observer, tries_again
from rl_memory_plugins.operations import Operation, Transition
from rl_memory_plugins.records import UNANSWERED, EngineStatus, Reply, Report
from rl_memory_plugins.timeline.recorder import Recorder
from rl_memory_plugins.weights.addresses import Endpoints

if TYPE_CHECKING:
    from rl_memory_plugins.config import RLMemoryConfig

ANSWER_S = 0.25
"""How long a status request waits for an engine on another host. An idle engine answers in a millisecond."""


class EngineApi(ABC):
    """The contract over all data-parallel engines of one client object. Each method is an operation.

    The methods for Python callers check their arguments and build a command; `transition` runs the command.

    Attributes:
        observer: Learns of the end of each transition.
        recorder: Keeps the timeline.
    """

    _asks_in_background = False  # engines whose status is old; then no caller waits for them

    def __init__(self) -> None:
        self.observer = Observer()
        self.recorder = Recorder()
        self._boards: Boards | None = None
        self._transitions: list[str] = []  # the transitions of this client that are under way

    @abstractmethod
    def run(self, operation: Operation) -> Any:
        """The operation's result; over an asyncio transport, a coroutine of it."""

    def status(self) -> Operation:
        """The status of every engine. Only the first request of a client may wait for a transition.

        An engine on this host publishes its status on its board. The status of an engine on another host is its last
        answer. It counts as busy while a transition of this client is under way, and if the answer is old and the
        engine gives no new one.
        """
        known = self.status_now()
        if known:
            return known
        if self._boards is not None and self._asks_in_background:
            return self._boards.read(busy=UNANSWERED)
        return (yield from self._ask()).read()

    def status_now(self) -> list[EngineStatus]:
        """The status without waiting; empty if it is not known. The engines refuse requests then."""
        return self._known()

    def share_timeline(self, directory: str) -> None:
        """Keep the timeline in this directory, with the other server processes of these engines. They know the status.

        Args:
            directory: Of all these processes.
        """
        if self._boards is not None:
            self.recorder.share(directory, self._boards.name)

    def boards(self) -> list[tuple[str, bool]]:
        """See `Boards.paths`. Empty before the first status."""
        return [] if self._boards is None else self._boards.paths()

    def _known(self) -> list[EngineStatus]:
        if self._boards is None:
            return []
        if self._transitions:  # nothing may start while an update runs
            update = UpdateWeights.name in self._transitions
            return self._boards.read(busy=UpdateWeights.name if update else self._transitions[-1])
        return [] if self._boards.outdated else self._boards.read()

    def sleep(self, level: object = 1, tags: object = None, mode: object = "abort", keep: object = None) -> Operation:
        """Release memory; see the contract."""
        return (yield from self.transition(operations.sleep(level, tags, mode, keep)))

    def wake_up(self, tags: object = None) -> Operation:
        """Take memory back; see the contract."""
        return (yield from self.transition(operations.wake_up(tags)))

    def wake_as_engine(self, tags: object = None) -> Operation:
        """Take memory back as the engine's own route does. Overridden where that differs from `wake_up`."""
        return (yield from self.wake_up(tags))

    def update_weights_from_ipc(self, endpoints: Endpoints, token: str, **options: Any) -> Operation:
        """Take weights from a trainer's sockets. Ends when all ranks hold them. See `commands.UpdateWeights`."""
        return (yield from self.transition(operations.update_weights(endpoints, token, **options)))

    def update_weights_from_checkpoint(self, path: object, *, partial: object = False, **options: Any) -> Operation:
        """Take weights from safetensors files on the engine's host, as from a trainer that sends them.

        Args:
            path: A folder of safetensors files as `save_pretrained` writes it, or one file.
            partial: The files hold only some of the weights. The other weights must be valid.
            **options: `weight_version`, `mode`, `timeout_s` and `base_version`; see `commands.UpdateWeights`.

        Raises:
            UnsupportedError: ranks are on other hosts, where these files are not.
        """
        from rl_memory_plugins.trainer.file_sender import FileSender, require_one_host

        engines = yield from self.status()
        require_one_host(engines, 0 if self._boards is None else self._boards.elsewhere)
        devices = [rank.device for engine in engines for rank in engine.ranks]
        with FileSender(path, devices, partial=partial, timeout_s=options.get("timeout_s")) as sender:
            command = operations.update_weights(sender.endpoints, sender.token, **options)
            return (yield from self.transition(command))

    def update_adapter_from_ipc(
        self, name: str, config: dict[str, Any], endpoints: Endpoints, token: str, **options: Any
    ) -> Operation:
        """Take a LoRA adapter from a trainer's sockets. Requests that come afterwards use it by its name.

        Running requests of a former version finish with that version. See `commands.UpdateAdapter`.
        """
        return (yield from self.transition(operations.update_adapter(name, config, endpoints, token, **options)))

    def remove_adapter(self, name: str) -> Operation:
        """Remove an adapter that `update_adapter_from_ipc` has added. Its running requests finish with it."""
        return (yield from self.transition(operations.remove_adapter(name)))

    def is_sleeping(self) -> Operation:
        """Whether any tag is released or an engine is paused."""
        return admission.is_sleeping((yield from self.status()))

    def memory_status(self) -> Operation:
        """Every engine's and rank's memory by tag; never waits for a transition."""
        return (yield from self.status())

    def timeline(self, since: int = 0) -> Operation:
        """The transitions of this client with higher numbers than `since`, and the present state; see `Timeline`."""
        return self.recorder.timeline(since, (yield from self.status()))

    def weight_version(self) -> Operation:
        """The version of the weights after the last complete update."""
        return (yield from self.status())[0].weight_version

    def weight_checksums(self) -> Operation:
        """Checksums of the weights as they are, of all engines; see `weights.checksums`."""
        from rl_memory_plugins.weights.checksums import merge_engines

        return merge_engines((yield from operations.checksums()))

    def transition(self, command: Transition) -> Operation:
        """Run a command that `operations` has built. Returns its report."""
        with self._observed(command) as course:
            engines = course.before = yield from self.status()
            operations.refuse_during_update(engines)
            failure: RLMemoryError | None = None
            self._transitions.append(command.name)
            try:
                report: Report = yield from operations.transition(command, engines)
            except RLMemoryError as error:
                failure = error
            finally:
                course.ends()
                self._transitions.remove(command.name)
                if self._boards is not None:
                    self._boards.expire()
            engines = course.after = yield from self._status_after()
            # Also after a failure: several engines resume together or not at all.
            if len(engines) > 1 and admission.first_refusal(engines) is None:
                yield from operations.resume(lift_pause=isinstance(command, WakeUp))
            if failure is not None:
                raise failure
            course.report = report
        return report

    @contextmanager
    def _observed(self, command: Transition) -> Iterator[Course]:
        """Tell the observer and the recorder the outcome of the body, which fills in the course, and trace it."""
        course = Course(command)
        try:
            yield course
        except Exception as error:
            if getattr(command, "idle_s", None) is not None and isinstance(error, StateConflictError):
                raise  # an engine that is not idle, as the server that asked could not know
            course.ends()
            course.error = error
            course.after = course.after or self._known_at_failure()
            self.observer.failed(command, error)
            if not (tries_again() and isinstance(error, DeviceMemoryError)):  # there may be many, and all are alike
                self.recorder.note(course)
                spans.emit(command, course.start_ns, course.start_ns + course.duration_ns, error)
            raise
        assert course.report is not None
        self.observer.completed(command, course.report)
        self.recorder.note(course)
        spans.emit(command, course.start_ns, course.start_ns + course.duration_ns, course.report)

    def _known_at_failure(self) -> list[EngineStatus]:
        with suppress(RLMemoryError):  # of an engine that has died
            return self._known()
        return []

    def _status_after(self) -> Operation:
        """The status after a transition. Asks engines on other hosts again, unless another transition of this client is
        under way: their answers would wait for its end."""
        return self._known() or (yield from self._ask()).read()

    def _ask(self) -> Operation:
        self._boards = boards = Boards((yield from operations.hello()))
        return boards


class AsyncioApi(EngineApi):
    """An engine API over an asyncio transport.

    Args:
        drain_timeout_s: How long a transition waits for running requests.
        options: The engine's options, for its server.
    """

    _asks_in_background = True

    def __init__(self, drain_timeout_s: float, options: RLMemoryConfig | None = None) -> None:
        super().__init__()
        self._drain_timeout_s = drain_timeout_s
        self.options = options
        self._turns = asyncio.Lock()
        self._asking: asyncio.Task[Boards] | None = None

    @abstractmethod
    async def _call(self, command: AnyCommand) -> list[Reply[Any]]:
        """Send the command to all engines; one reply for each."""

    async def run(self, operation: Operation) -> Any:
        if not self.status_now() and self._asking is not None:
            answered, _ = await asyncio.wait([self._asking], timeout=ANSWER_S)
            for asking in answered:
                asking.result()
        return await operations.run_within(operation, self._call, self._drain_timeout_s, self._turns)

    def status_now(self) -> list[EngineStatus]:
        """See `EngineApi.status_now`. If the status is old, asks the engines in the background, for later callers."""
        known = self._known()
        if not known and self._boards is not None:
            self._renew()
        return known

    def status_at_scrape(self) -> list[EngineStatus]:
        """The status for a monitor, without waiting; empty if none is known.

        The status of engines on other hosts may be their answer to the question of the former scrape. Engines that have
        not answered that question count as busy, as in `status`.
        """
        is_silent = self._asking is not None and not self._asking.done()
        known = self.status_now()
        if known or self._boards is None:
            return known
        return self._boards.read(busy=UNANSWERED if is_silent else "")

    async def status_at_first(self) -> list[EngineStatus]:
        """`status_now`; the first call of a client waits for the answer of the engines."""
        if self._boards is None:
            await self.run(self.status())
        return self.status_now()

    def _renew(self) -> None:
        """Ask the engines in the background, unless a question is under way."""
        if self._asking is not None and not self._asking.done():
            return
        try:
            asyncio.get_running_loop()
        except RuntimeError:  # this thread runs no event loop: the next caller in the loop asks
            return
        self._asking = asyncio.ensure_future(operations.run_async(self._ask(), self._call))
        self._asking.add_done_callback(lambda asking: asking.cancelled() or asking.exception())  # `run` raises it
