"""The abilities of a vLLM engine, declared once at its start. Modes that no engine may use stand in `modes.py`."""

from __future__ import annotations

from typing import Any

from rl_memory_plugins.capabilities import Capabilities
from rl_memory_plugins.tags import PauseMode


def capabilities_of(core: Any) -> Capabilities:
    return Capabilities(steps_with_peers=hasattr(core, "ignore_start_dp_wave"), modes=_modes(core))


def resident_graphs(allocator: Any, parallel: Any) -> str:
    """Why a worker's CUDA graphs stay on the device; empty if they can be released.

    Args:
        allocator: The allocator of the worker.
        parallel: vLLM's parallel configuration.
    """
    if not hasattr(allocator, "pool_id"):
        return f"the {allocator.name} allocator has no pool for graphs"
    if parallel.tensor_parallel_size > 1 and not parallel.disable_custom_all_reduce:
        return (
            "custom all-reduce registers the memory of graphs with other ranks; start with --disable-custom-all-reduce"
        )
    return ""


def is_in_caller(core: Any) -> bool:
    """Whether the engine core runs in the caller's process, without a loop: it steps only when the caller calls it."""
    return not hasattr(core, "input_queue")


def _modes(core: Any) -> tuple[PauseMode, ...]:
    """An engine can wait for requests only if a loop of its own steps meanwhile and reports that it is idle."""
    can_wait = not is_in_caller(core) and hasattr(core, "_idle_state_callbacks")
    return tuple(mode for mode in PauseMode if mode is not PauseMode.WAIT or can_wait)
