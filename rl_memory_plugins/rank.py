"""The methods that the controller of an engine calls on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from rl_memory_plugins.capabilities import Capabilities
from rl_memory_plugins.commands import encode_reply, error_reply
from rl_memory_plugins.errors import EngineFaultError
from rl_memory_plugins.memory.manager import MemoryManager
from rl_memory_plugins.records import Reply
from rl_memory_plugins.tags import PUBLIC_TAGS, Level, Tag


class WeightReceiver(Protocol):
    """The part of `weights/receiver.py` that a rank uses."""

    def receive(self, endpoints: dict[str, str], token: str, timeout_s: float) -> dict[str, Any]:
        """Take one update from the trainer. Returns its report, or raises a typed error."""

    def checksums(self) -> dict[str, Any]:
        """Checksums of the weights as they are."""

    def capabilities(self) -> Capabilities:
        """Whether an update can ever reach the weights."""


class RankAgent:
    """Runs the controller's calls on the memory manager and the weight receiver of this rank.

    Args:
        manager: The state machine of the rank.
        receiver: Takes weight updates.
        after_wake: The engine's own work after tags have become resident again; called with these tags.
        before_update: The engine's own work before an update: it ends an update of the engine's own that is still open.
        resident_graphs: Why this rank's CUDA graphs stay on the device; empty if they can be released.
    """

    def __init__(
        self,
        manager: MemoryManager,
        receiver: WeightReceiver,
        after_wake: Callable[[list[Tag]], None] = lambda tags: None,
        before_update: Callable[[], None] = lambda: None,
        resident_graphs: str = "",
    ) -> None:
        self.manager = manager
        self.receiver = receiver
        self._after_wake = after_wake
        self._woken: set[Tag] = set()  # whose `after_wake` has not succeeded yet: the next wake calls it again
        self._before_update = before_update
        self._resident_graphs = resident_graphs
        self._methods: dict[str, Callable[..., Any]] = {
            method.__name__: method
            for method in (
                self.prepare_sleep,
                self.commit_sleep,
                self.abort_sleep,
                self.prepare_wake,
                self.commit_wake,
                self.abort_wake,
                self.receive_weights,
                self.finish_update,
                self.checksums,
                self.status,
                self.content,
                self.account,
                self.capabilities,
            )
        }

    def handle(self, payload: bytes) -> bytes:
        """Decode a call, run it, and encode its reply. Never raises: an exception would break the engine's RPC."""
        return encode_reply(self.reply(payload))

    def reply(self, payload: bytes) -> Reply[Any]:
        try:
            method, arguments = decode_call(payload)
            if method not in self._methods:
                raise EngineFaultError(f"this rank has no method {method!r}")
            return Reply(rank=self.manager.rank, result=msgspec.to_builtins(self._methods[method](**arguments)))
        except Exception as error:
            return error_reply(self.manager.rank, error)

    def prepare_sleep(self, level: int, tags: list[str]) -> None:
        self.manager.prepare_sleep(Level(level), [Tag(tag) for tag in tags])

    def commit_sleep(self) -> dict[str, Any]:
        changes = self.manager.commit_sleep()
        self._woken -= {Tag(change.tag) for change in changes}
        return {"changes": changes, "seconds": self.manager.seconds()}

    def abort_sleep(self) -> None:
        self.manager.abort_sleep()

    def prepare_wake(self, tags: list[str]) -> None:
        self.manager.prepare_wake([Tag(tag) for tag in tags])

    def commit_wake(self) -> dict[str, Any]:
        changes = self.manager.commit_wake()
        self._woken |= {Tag(change.tag) for change in changes}
        self._after_wake([tag for tag in PUBLIC_TAGS if tag in self._woken])
        self._woken = set()
        return {"changes": changes, "seconds": self.manager.seconds()}

    def abort_wake(self) -> None:
        self.manager.abort_wake()

    def receive_weights(self, endpoints: dict[str, str], token: str, timeout_s: float) -> dict[str, Any]:
        self.manager.require_writable()
        self._before_update()
        return self.receiver.receive(endpoints, token, timeout_s)

    def finish_update(self, complete: bool) -> None:
        self.manager.finish_writing(complete)

    def checksums(self) -> dict[str, Any]:
        self.manager.require_writable()
        return self.receiver.checksums()

    def status(self) -> Any:
        return self.manager.status()

    def content(self) -> tuple[str, int]:
        """The content of the weights and its epoch."""
        return self.manager.content.value, self.manager.epoch

    def account(self) -> Any:
        return self.manager.account()

    def capabilities(self) -> Capabilities:
        own = Capabilities(resident_graphs=self._resident_graphs)
        return own.merged([self.receiver.capabilities()])


def encode_call(method: str, arguments: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode((method, arguments))


def decode_call(payload: bytes) -> tuple[str, dict[str, Any]]:
    return msgspec.msgpack.decode(payload, type=tuple[str, dict[str, Any]])
