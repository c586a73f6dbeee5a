"""Sleep, wake and in-place weight updates for vLLM and SGLang, for reinforcement learning on shared GPUs.

This module has the names that most programs need: the client of an engine's server, errors, records, options, and the
functions that send weights. `rl_memory_plugins.trainer` has the trainer's side. `rl_memory_plugins.vllm` and
`rl_memory_plugins.sglang` have the two engines, and `rl_memory_plugins.ray` has fleets of them. `plan` says what fits,
`doctor` checks an installation and a running engine, and `timeline` draws what the memory did.

Importing this package imports no engine, no torch, no FastAPI and no pydantic: the first use of a name imports them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rl_memory_plugins.errors import (
    AuthenticationError,
    DeviceMemoryError,
    DrainTimeoutError,
    EngineAsleepError,
    EngineFaultError,
    EngineLostError,
    HostMemoryError,
    InvalidRequestError,
    ManifestError,
    NoAnswerError,
    OutOfMemoryError,
    PermissionDeniedError,
    RLMemoryError,
    StateConflictError,
    UnsupportedError,
    WeightUpdateError,
)
from rl_memory_plugins.tags import Content, Level, PauseMode, Tag, TagState

if TYPE_CHECKING:
    from rl_memory_plugins.client import EngineClient
    from rl_memory_plugins.config import RLMemoryConfig
    from rl_memory_plugins.records import EngineStatus, RankStatus, Report, StepTime, TagChange, TagStatus
    from rl_memory_plugins.trainer.push import push_weights
    from rl_memory_plugins.trainer.sources.model import ModelSource
    from rl_memory_plugins.weights.checksums import Checksums, tensor_checksum
    from rl_memory_plugins.weights.open_allocations import release_mapped

    __version__: str

__all__ = [
    "AuthenticationError",
    "Checksums",
    "Content",
    "DeviceMemoryError",
    "DrainTimeoutError",
    "EngineAsleepError",
    "EngineClient",
    "EngineFaultError",
    "EngineLostError",
    "EngineStatus",
    "HostMemoryError",
    "InvalidRequestError",
    "Level",
    "ManifestError",
    "ModelSource",
    "NoAnswerError",
    "OutOfMemoryError",
    "PauseMode",
    "PermissionDeniedError",
    "RLMemoryConfig",
    "RLMemoryError",
    "RankStatus",
    "Report",
    "StateConflictError",
    "StepTime",
    "Tag",
    "TagChange",
    "TagState",
    "TagStatus",
    "UnsupportedError",
    "WeightUpdateError",
    "__version__",
    "push_weights",
    "release_mapped",
    "tensor_checksum",
]

_LAZY = {
    "Checksums": "weights.checksums",
    "EngineClient": "client",
    "EngineStatus": "records",
    "ModelSource": "trainer.sources.model",
    "RLMemoryConfig": "config",
    "RankStatus": "records",
    "Report": "records",
    "StepTime": "records",
    "TagChange": "records",
    "TagStatus": "records",
    "push_weights": "trainer.push",
    "release_mapped": "weights.open_allocations",
    "tensor_checksum": "weights.checksums",
}
_PACKAGES = ("doctor", "plan", "ray", "sglang", "timeline", "trainer", "vllm")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name == "__version__":
        return _version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_PACKAGES, "__version__"})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(__name__)
    except PackageNotFoundError:  # the package runs from a source tree and is not installed
        return "0+unknown"
