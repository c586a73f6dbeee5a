"""Every error of the contract, in one tree.

    RLMemoryError                     500
    ├── InvalidRequestError           422  bad level, tag, mode or body; lists what is allowed
    │   └── ManifestError             422  the trainer's tensors do not fit the model; lists every mismatch
    ├── StateConflictError            409  not possible in this state; names the state
    ├── EngineAsleepError             503  a request arrived while the engine does not admit any
    ├── OutOfMemoryError              507  device or host memory does not suffice; memory and weights are as before
    │   ├── DeviceMemoryError
    │   └── HostMemoryError
    ├── WeightUpdateError             502  an update broke off; the weights are `failed` until an update completes
    ├── DrainTimeoutError             504  running requests did not finish in time; admission is open again
    ├── AuthenticationError           401
    ├── PermissionDeniedError         403
    ├── UnsupportedError              422  the engine or its version cannot do this
    ├── NoAnswerError                 504  the client got no answer; the server may have carried out the call
    ├── EngineLostError               503  the engine's process has died; an engine that replaces it has new memory
    └── EngineFaultError              500  a failure that the contract does not foresee

An error crosses process boundaries as a record (`to_record`, `from_record`), never as a pickle. Its type and fields
reach the HTTP client unchanged.
"""

from __future__ import annotations

from typing import Any, ClassVar


class RLMemoryError(Exception):
    """Base of all errors of this package.

    Args:
        message: One sentence for a person.
        **details: JSON-serialisable fields for a program (bytes, ranks, names, what is allowed).
    """

    status: ClassVar[int] = 500

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    @property
    def code(self) -> str:
        """The machine-readable name: the name of the class."""
        return type(self).__name__

    def to_record(self) -> dict[str, Any]:
        """A plain dict: `{"error", "message", "details"}`."""
        return {"error": self.code, "message": self.message, "details": self.details}

    def __reduce__(self) -> tuple[Any, ...]:
        return from_record, (self.to_record(),)


class InvalidRequestError(RLMemoryError):
    status = 422


class ManifestError(InvalidRequestError):
    pass


class StateConflictError(RLMemoryError):
    status = 409


class EngineAsleepError(RLMemoryError):
    """`details["reason"]` is one of `starting`, `asleep`, `stale`, `updating`, `failed` and `paused`."""

    status = 503


class OutOfMemoryError(RLMemoryError):
    """`details` carry `needed_bytes`, `free_bytes`, `margin_bytes` and, once known, `rank`."""

    status = 507


class DeviceMemoryError(OutOfMemoryError):
    pass


class HostMemoryError(OutOfMemoryError):
    pass


class WeightUpdateError(RLMemoryError):
    status = 502


class DrainTimeoutError(RLMemoryError):
    status = 504


class AuthenticationError(RLMemoryError):
    status = 401


class PermissionDeniedError(RLMemoryError):
    status = 403


class UnsupportedError(RLMemoryError):
    status = 422


class NoAnswerError(RLMemoryError):
    """Raised by clients, never sent. `details["timeout_s"]` is there if the server was silent for so long."""

    status = 504


class EngineLostError(RLMemoryError):
    """`details["engine"]` is the number of the engine in its fleet, or the name of its model (`rl-memory serve`)."""

    status = 503


class EngineFaultError(RLMemoryError):
    pass


def _subclasses(cls: type[RLMemoryError]) -> dict[str, type[RLMemoryError]]:
    found = {cls.__name__: cls}
    for sub in cls.__subclasses__():
        found |= _subclasses(sub)
    return found


def from_record(record: dict[str, Any]) -> RLMemoryError:
    """The error of a record that `to_record` made. An unknown name gives an `EngineFaultError`."""
    cls = _subclasses(RLMemoryError).get(str(record.get("error")), EngineFaultError)
    error = cls(str(record.get("message", "")))
    error.details.update(record.get("details") or {})  # keyword arguments would fail for a key such as `message`
    return error


def as_rl_memory_error(error: BaseException) -> RLMemoryError:
    """`error` itself if this package defines it, else an `EngineFaultError` that names its type."""
    if isinstance(error, RLMemoryError):
        return error
    return EngineFaultError(f"{type(error).__name__}: {error}", type=type(error).__name__)


def unsupported(mode: str, why: str) -> UnsupportedError:
    """The error for a mode of an engine in which the contract cannot be kept."""
    return UnsupportedError(f"rl_memory does not work with {mode}: {why}", mode=mode)
