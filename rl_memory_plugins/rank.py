"""The methods that the controller of an engine calls on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from rl_memory_plugins.capabilities import Capabilities
from rl_memory_plugins.commands import encode_reply, error_reply
from rl_memory_plugins.errors import EngineFaultError
from rl_memory_plugins.frozen_scales import FrozenScales
from rl_memory_plugins.memory.manager import MemoryManager
from rl_memory_plugins.records import Reply, WeightsStatus
from rl_memory_plugins.tags import PUBLIC_TAGS, Content, Level, Tag, TagState
from rl_memory_plugins.timing import Steps

if TYPE_CHECKING:
    from rl_memory_plugins.weights.addresses import Endpoints
    from rl_memory_plugins.weights.names import NamedWeights
    from rl_memory_plugins.weights.receiver import WeightReceiver

#: The methods of the manager that the controller calls without conversion, and those of the agent.
_MANAGER_METHODS = frozenset({"abort_sleep", "abort_wake", "status", "account"})
_AGENT_METHODS = frozenset(
    {"prepare_sleep", "commit_sleep", "prepare_wake", "commit_wake"}
    | {"receive_weights", "finish_update", "checksums", "content", "capabilities", "unmatched", "identity", "loaded"}
)


class RankAgent:
    """Runs the controller's calls on the memory manager and the weight receiver of this rank.

    Args:
        manager: The state machine of the rank.
        receiver: Takes weight updates.
        weights: The weights by name, for the globs of a sleep.
        settle_writes: Waits until the engine's own code, e.g. in a thread of its own, writes no weights any more.
        before_sleep: The engine's own work before tags are released; called with these tags.
        after_wake: The engine's own work after tags have become resident again; called with these tags.
        before_update: The engine's own work before an update: it ends an open update by the engine's own calls.
        resident_graphs: The reason why this rank's CUDA graphs stay on the device; empty if they can be released.
        cache_scales: Gives the scales of the KV cache, by name.
        calls: More methods that the controller of this engine calls, by name.
    """

    def __init__(
        self,
        manager: MemoryManager,
        receiver: WeightReceiver,
        weights: NamedWeights,
        settle_writes: Callable[[], None] = lambda: None,
        before_sleep: Callable[[list[Tag]], None] = lambda tags: None,
        after_wake: Callable[[list[Tag]], None] = lambda tags: None,
        before_update: Callable[[], None] = lambda: None,
        resident_graphs: str = "",
        cache_scales: Callable[[], Mapping[str, object]] = dict,
        calls: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    ) -> None:
        self.manager = manager
        self.receiver = receiver
        self._weights = weights
        self._settle_writes = settle_writes
        self._before_sleep = before_sleep
        self._after_wake = after_wake
        self._woken: set[Tag] = set()  # tags whose `after_wake` has not succeeded yet: the next wake repeats it
        self._before_update = before_update
        self._resident_graphs = resident_graphs
        self._frozen_scales = FrozenScales(cache_scales)
        self._loaded: tuple[str, str] | None = None  # of a load that `loaded` has not told: source, identity before
        own = {name: getattr(self, name) for name in _AGENT_METHODS}
        self._methods = {**own, **{name: getattr(manager, name) for name in _MANAGER_METHODS}, **calls}

    def handle(self, payload: bytes) -> bytes:
        """Decode a call, run it, and encode its reply. Never raises: an exception would break the engine's RPC."""
        return encode_reply(self.reply(payload))

    def reply(self, payload: bytes) -> Reply[Any]:
        try:
            method, arguments = msgspec.msgpack.decode(payload, type=tuple[str, dict[str, Any]])
            if method not in self._methods:
                raise EngineFaultError(f"this rank has no method {method!r}")
            result = self._methods[method](**arguments)
            seconds = result.get("seconds") if isinstance(result, dict) else None
            if isinstance(seconds, Steps):
                result = {**result, "places": seconds.places}
            return Reply(rank=self.manager.rank, result=msgspec.to_builtins(result))
        except Exception as error:
            return error_reply(self.manager.rank, error)

    def unmatched(self, globs: Sequence[str]) -> dict[str, list[str]]:
        return self._weights.unmatched(globs)

    def prepare_sleep(self, level: int, tags: list[str], keep: Sequence[str] = ()) -> None:
        self._settle_writes()
        self._note_scales()
        kept = self._weights.chosen(keep) if keep or level == Level.DISCARD else {}
        self.manager.prepare_sleep(Level(level), [Tag(tag) for tag in tags], kept)

    def commit_sleep(self) -> dict[str, Any]:
        tags = [Tag(tag) for tag in self.manager.prepared_tags]
        try:
            self._before_sleep(tags)
        except BaseException:
            self.manager.abort_sleep()
            raise
        try:
            changes = self.manager.commit_sleep()
        finally:
            for tag in tags:
                (self._woken.add if self.manager.state(tag) is TagState.RESIDENT else self._woken.discard)(tag)
        return {"changes": changes, "seconds": self.manager.seconds()}

    def prepare_wake(self, tags: list[str]) -> None:
        self.manager.prepare_wake([Tag(tag) for tag in tags])

    def commit_wake(self) -> dict[str, Any]:
        changes = self.manager.commit_wake()
        self._woken |= {Tag(change.tag) for change in changes}
        self._after_wake([tag for tag in PUBLIC_TAGS if tag in self._woken])
        self._woken = set()
        return {"changes": changes, "seconds": self.manager.seconds()}

    def receive_weights(
        self, endpoints: Endpoints, token: str, timeout_s: float, frozen: bool = False
    ) -> dict[str, Any]:
        self.manager.require_writable()
        self._note_scales()
        self._before_update()
        report = self.receiver.receive(endpoints, token, timeout_s)
        if frozen:
            self._frozen_scales.require_unchanged()
        return report

    def _note_scales(self) -> None:
        # Of weights that are not valid, an update may have changed them: the blocks are older.
        if self.manager.content is Content.VALID and self.manager.state(Tag.WEIGHTS) is TagState.RESIDENT:
            self._frozen_scales.note()

    def finish_update(self, complete: bool) -> None:
        self.manager.finish_writing(complete)

    def checksums(self, by_engine_names: bool = False) -> dict[str, Any]:
        self.manager.require_writable()
        return self.receiver.checksums(by_engine_names=by_engine_names)

    def content(self) -> WeightsStatus:
        draft = self.manager.draft.state
        return WeightsStatus(self.manager.content.value, self.manager.epoch, draft and draft.value)

    @contextmanager
    def loading(self, source: str) -> Iterator[None]:
        """The body is a call of the engine that replaces the weights by those of a source, e.g. a path."""
        self._loaded = None
        before = self.identity() if self.manager.content is Content.VALID else ""
        try:
            yield
        finally:
            self._loaded = (source, before)

    @property
    def has_loaded(self) -> bool:
        """Whether a load has ended since the last `loaded`."""
        return self._loaded is not None

    def forget_load(self) -> None:
        """The latest load has changed nothing."""
        self._loaded = None

    def loaded(self) -> dict[str, Any] | None:
        """The latest load; see `loaded_versions.Loaded`. `None` if there was none since the last call."""
        if self._loaded is None:
            return None
        (source, before), self._loaded = self._loaded, None
        return {"source": source, "content": self.manager.content, "before": before, "after": self.identity()}

    def identity(self) -> str:
        """See `identity.identity`. Empty while the weights sleep."""
        is_resident = self.manager.state(Tag.WEIGHTS) is TagState.RESIDENT
        return self.receiver.identity() if is_resident else ""

    def capabilities(self) -> Capabilities:
        return Capabilities(resident_graphs=self._resident_graphs).merged([self.receiver.capabilities()])


def encode_call(method: str, arguments: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode((method, arguments))
