"""The commands of a controller, and their encoding: tagged msgpack, the same on the transport of every engine.

Levels, tags and modes are typed. `operations` builds the commands from a caller's values and checks these values;
nothing checks them again.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, ClassVar

import msgspec

from rl_memory_plugins.errors import EngineFaultError, as_rl_memory_error
from rl_memory_plugins.records import Reply
from rl_memory_plugins.tags import PUBLIC_TAGS, Level, PauseMode, Tag


class Command(msgspec.Struct, tag=True, frozen=True):
    """Base of all commands."""


class Sleep(Command, frozen=True):
    name: ClassVar[str] = "sleep"  # of the transition: a key of `transition.STEPS`, and `EngineStatus.busy`
    level: Level = Level.PRESERVE
    tags: tuple[Tag, ...] = PUBLIC_TAGS
    mode: PauseMode = PauseMode.ABORT
    keep: tuple[str, ...] | None = None  # globs of weights that level 2 preserves; `None`: the engine's default
    hold: str = ""  # a ticket: stop after the first phase, and wait for the `Decide` with this ticket
    call: str = ""  # the name for `CancelDrain`
    idle_s: float | None = None  # sleep only if no request came for so long; then a request may wake the engine


class WakeUp(Command, frozen=True):
    name: ClassVar[str] = "wake_up"
    tags: tuple[Tag, ...] = PUBLIC_TAGS
    hold: str = ""


class UpdateWeights(Command, frozen=True):
    """Connect the receivers of all ranks to the sockets of a trainer, and take its weights.

    `endpoints` maps the name of a device (`RankStatus.device`) to the socket of the trainer process that serves the
    device, or to several of which a receiver takes the first that answers; see `weights.addresses`. `"*"` serves every
    device that has no entry. The default of `timeout_s` is the engine's option
    `update_timeout_s`. If there is a `base_version`, an engine whose weights have another version refuses the update.
    """

    name: ClassVar[str] = "update_weights"
    endpoints: dict[str, str | list[str]]
    token: str
    weight_version: str | None = None
    mode: PauseMode = PauseMode.KEEP
    timeout_s: float | None = None
    base_version: str | None = None
    hold: str = ""
    call: str = ""


class UpdateAdapter(Command, frozen=True):
    """Take the tensors of a LoRA adapter from a trainer's sockets. Requests that come afterwards use them.

    `config` is PEFT's `adapter_config.json`. `endpoints`, `token`, `timeout_s` and `base_version`: as for
    `UpdateWeights`.
    """

    name: ClassVar[str] = "update_adapter"
    adapter: str
    config: dict[str, Any]
    endpoints: dict[str, str | list[str]]
    token: str
    adapter_version: str | None = None
    timeout_s: float | None = None
    base_version: str | None = None
    hold: str = ""


class RemoveAdapter(Command, frozen=True):
    name: ClassVar[str] = "remove_adapter"
    adapter: str
    hold: str = ""


class Drain(Command, frozen=True):
    """Wait for running requests, and stay closed until the command with this ticket as `hold`, or its `Decide`.

    A router may send a request to any data-parallel engine, so no engine may open again while another still waits.
    `operation` is the name of the transition that follows.
    """

    operation: str
    ticket: str
    call: str = ""


class Decide(Command, frozen=True):
    """The second phase of the command with this ticket as `hold`. `commit=False` undoes it, and also ends a `Drain`."""

    ticket: str
    commit: bool


class CancelDrain(Command, frozen=True):
    """Give up the command with this `call`, if it still waits for running requests. Without `call`: all of them."""

    call: str = ""


class Resume(Command, frozen=True):
    """Schedule again after a command with a ticket, if the admission rule holds. All engines get it, or none.

    Some data-parallel engines step together: an engine that resumed alone would wait for the others.
    """

    lift_pause: bool


class Checksums(Command, frozen=True):
    pass


class Hello(Command, frozen=True):
    """Ask for the path of the engine's status board."""


Transition = Sleep | WakeUp | UpdateWeights | UpdateAdapter | RemoveAdapter
AnyCommand = Transition | Drain | Decide | CancelDrain | Resume | Checksums | Hello

encode_command = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(AnyCommand).decode
_encode_reply = msgspec.msgpack.Encoder(enc_hook=str).encode  # an error's details may hold anything
decode_reply = msgspec.msgpack.Decoder(Reply[Any]).decode


def encode_reply(reply: Reply[Any]) -> bytes:
    """Never raises: somebody waits for the reply. An error that cannot be encoded loses its details."""
    try:
        return _encode_reply(reply)
    except Exception as error:  # e.g. the name of a file is no valid text
        if reply.error is None:
            return _encode_reply(error_reply(reply.rank, EngineFaultError(f"the result cannot be sent: {error!a}")))
        message = reply.error["message"].encode(errors="replace").decode()
        return _encode_reply(Reply(rank=reply.rank, error={**reply.error, "message": message, "details": {}}))


def error_reply(rank: int, error: BaseException) -> Reply[Any]:
    return Reply(rank=rank, error=as_rl_memory_error(error).to_record())


def done(reply: Reply[Any]) -> Future[bytes]:
    """A future that holds the encoded reply already."""
    future: Future[bytes] = Future()
    future.set_result(encode_reply(reply))
    return future
