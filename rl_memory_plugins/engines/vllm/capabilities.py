"""The abilities of a vLLM engine, declared once at its start. Modes that no engine may use stand in `modes.py`."""

from __future__ import annotations

from typing import Any

from rl_memory_plugins.capabilities import Capabilities
from rl_memory_plugins.tags import PauseMode


def capabilities_of(core: Any) -> Capabilities:
    """The abilities by the core's class: when its KV cache has been made, vLLM has not finished to make the core."""
    # An engine can wait for requests where a loop steps meanwhile and says when nothing is left.
    can_wait = hasattr(core, "_notify_idle_state_callbacks")
    return Capabilities(
        steps_with_peers=hasattr(core, "_has_global_unfinished_reqs"),
        modes=tuple(mode for mode in PauseMode if mode is not PauseMode.WAIT or can_wait),
    )


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
