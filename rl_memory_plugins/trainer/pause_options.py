"""The options of a `PausableMemory`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import msgspec

from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.memory.preparation import PrepareMode
from rl_memory_plugins.trainer.offloading import HOST_MARGIN_BYTES

Bytes = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True)
class PauseOptions:
    """The options of a `PausableMemory`. `RLMemoryConfig` documents them; bytes are numbers here."""

    allocator: Literal["auto", "vmm", "tms", "host"] = "auto"
    tms_hook_mode: Literal["auto", "torch", "preload"] = "auto"
    prepare_host_memory: PrepareMode = "auto"
    host_arena_max_bytes: Bytes = 0
    host_memory_margin_bytes: Bytes = HOST_MARGIN_BYTES
    device_memory_margin_bytes: Bytes = 64 << 20
    fault_dir: str | None = None


def pause_options(given: dict[str, Any]) -> PauseOptions:
    """The options by their names.

    Raises:
        TypeError: there is no option of a name.
        InvalidRequestError: an option has a value of another type, a negative size or an unknown word.
    """
    options = PauseOptions(**given)
    try:
        return msgspec.convert(asdict(options), PauseOptions)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"{error}. Bytes are whole numbers, e.g. 1 << 30", field="options") from None
