"""The admission rule: when an engine may take a request, and the error when it may not."""

from __future__ import annotations

from collections.abc import Iterable

from rl_memory_plugins.errors import EngineAsleepError, StateConflictError
from rl_memory_plugins.records import EngineStatus
from rl_memory_plugins.tags import Content, Tag

RETRY_AFTER_SECONDS = 1
#: How the message of each refusal begins.
NOT_ADMITTED = "the engine does not admit requests: "
_UPDATING = "updating"
#: The reasons of `refusal`. A server that has not finished starting has another one: `starting`.
REASONS = ("asleep", "stale", _UPDATING, "failed", "paused")
#: Transitions that leave the weights and the caches as they are.
_BESIDE_REQUESTS = ("update_adapter", "remove_adapter")


def refusal(engine: EngineStatus) -> EngineAsleepError | None:
    """The error for requests that the engine does not admit; `None` if it admits them.

    An engine admits requests while all tags are resident on every rank, the content of the weights is valid, and no
    pause and no transition is under way. Changes of adapters run beside requests.
    """
    asleep = engine.asleep_tags()
    if engine.busy == "update_weights" or engine.content is Content.UPDATING:
        return _refuse(_UPDATING, "its weights are being updated")
    if engine.busy and engine.busy not in _BESIDE_REQUESTS:
        return _refuse("asleep", engine.under_way)
    if asleep:
        return _refuse("asleep", f"{', '.join(asleep)} asleep: wake_up() first", tags=asleep)
    if engine.content is Content.STALE:
        return _refuse("stale", "its weights are stale: send a complete update first")
    if engine.content is Content.FAILED:
        return _refuse("failed", "a weight update broke off: send a complete update first")
    if engine.paused:
        return _refuse("paused", "it is paused: wake_up() first")
    return None


def first_refusal(engines: Iterable[EngineStatus], *, held: bool = False) -> EngineAsleepError | None:
    """The refusal of the first engine that does not admit requests. A request may be routed to any engine.

    Args:
        held: Whether the engine's own pause will hold the request back. Then an update is no reason to refuse: the
            request waits for the end of the pause, and the engine checks it then.
    """
    refusals = filter(None, map(refusal, engines))
    return next((one for one in refusals if not (held and one.details["reason"] == _UPDATING)), None)


def is_sleeping(engines: Iterable[EngineStatus]) -> bool:
    """Whether any tag is released anywhere, or an engine was paused by `sleep(level=0)`."""
    return any(engine.paused or engine.asleep_tags() for engine in engines)


def require_weights(engine: EngineStatus, operation: str) -> None:
    """
    Raises:
        StateConflictError: the weights are asleep, and `operation` writes into their memory.
    """
    asleep = engine.asleep_tags()
    if Tag.WEIGHTS.value in asleep:
        raise StateConflictError(f"the weights are asleep: wake_up(tags=['weights']) before {operation}", asleep=asleep)


def require_version(engine: EngineStatus, base_version: str | None) -> None:
    """
    Raises:
        StateConflictError: the weights have another version, and an update needs this one.
    """
    if base_version not in (None, engine.weight_version):
        raise StateConflictError(
            f"the update needs the weights of version {base_version!r}, but those of the engine have version "
            f"{engine.weight_version!r}: send a complete update first",
            base_version=base_version,
            weight_version=engine.weight_version,
        )


def _refuse(reason: str, why: str, **details: object) -> EngineAsleepError:
    return EngineAsleepError(NOT_ADMITTED + why, reason=reason, retry_after_s=RETRY_AFTER_SECONDS, **details)
