"""The memory of communicators, which both engines make by classes of the same names.

A custom all-reduce lets other ranks read the buffers of CUDA graphs, by addresses that it registers with them after a
capture. A sleep would release this memory under the other ranks. If the graphs are to be released, the all-reduce
copies its input into a buffer of its own in a capture instead, as with vLLM's `--sleep-mode-offload-cudagraph`.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

#: The attributes by which a custom all-reduce registers no buffers of graphs, and their values.
SWITCHES = {
    "_capture_registered": False,  # vLLM; not in every version
    "tms_cudagraph": True,  # SGLang; its second version has it in old releases
    "_is_graph_mode_supported": False,  # SGLang, the second version
}

_all_reduces: weakref.WeakSet[Any] = weakref.WeakSet()  # of this process
_staging = False  # later instances register no buffers either


def count_as_nccl(original: Callable[..., None]) -> Callable[..., None]:
    """Attribute the device memory of a communicator to `nccl` in `memory_status`."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        from rl_memory_plugins.memory.nccl import note_own
        from rl_memory_plugins.memory.residual import attributed

        with attributed("nccl"):
            original(self, *args, **kwargs)
        note_own(self)

    return __init__


def note_custom_all_reduce(original: Callable[..., None]) -> Callable[..., None]:
    """Note each custom all-reduce of this process, for `stage_captures`."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _all_reduces.add(self)
        if _staging and not _stage(self):
            logger.warning("%s is off: it would register the memory of CUDA graphs", type(self).__name__)
            self.disabled = True

    return __init__


def stage_captures() -> bool:
    """Make every custom all-reduce of this process copy its input into its own buffer in captures.

    Returns: `False` if one of them cannot. Then none is changed.
    """
    global _staging
    if not all(_can_stage(one) for one in _all_reduces):
        return False
    for one in _all_reduces:
        _stage(one)
    _staging = True
    return True


def _can_stage(all_reduce: Any) -> bool:
    return (
        getattr(all_reduce, "disabled", False)
        or any(hasattr(all_reduce, name) for name in SWITCHES)
        or _takes_registered(all_reduce)
    )


def _takes_registered(all_reduce: Any) -> bool:
    call = getattr(all_reduce, "all_reduce", None)
    return call is not None and "registered" in inspect.signature(call).parameters


def _stage(all_reduce: Any) -> bool:
    present = [name for name in SWITCHES if hasattr(all_reduce, name)]
    for name in present:
        setattr(all_reduce, name, SWITCHES[name])
    if not present and _takes_registered(all_reduce):
        reduce = all_reduce.all_reduce

        def from_buffer(*args: Any, registered: bool = False, **kwargs: Any) -> Any:
            return reduce(*args, registered=False, **kwargs)

        all_reduce.all_reduce = from_buffer
    return _can_stage(all_reduce)
