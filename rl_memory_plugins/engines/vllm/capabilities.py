"""The abilities of a vLLM engine, declared once at its start. Modes that no engine may use stand in `modes.py`."""

from __future__ import annotations

from typing import Any

from rl_memory_plugins.capabilities import Capabilities
from rl_memory_plugins.engines import rank_builder
from rl_memory_plugins.tags import PauseMode


def capabilities_of(core: Any, config: Any) -> Capabilities:
    """The abilities of an engine core, by its class and vLLM's configuration.

    vLLM makes the KV cache before the instance is complete.
    """
    # A core can wait for requests if its loop steps meanwhile and reports when it is idle.
    can_wait = hasattr(core, "_notify_idle_state_callbacks")
    no_freeze = _why_not_freeze(config)
    unable = {PauseMode.WAIT: not can_wait, PauseMode.FREEZE: bool(no_freeze)}
    return Capabilities(
        hosts=hosts_of(config.parallel_config),
        steps_with_peers=hasattr(core, "_has_global_unfinished_reqs"),
        modes=tuple(mode for mode in PauseMode if not unable.get(mode)),
        no_freeze=no_freeze,
        no_adapters="" if config.lora_config is not None else "vLLM was started without --enable-lora",
    )


def hosts_of(parallel: Any) -> int:
    """The number of hosts of one engine, each started by itself; `parallel` is vLLM's parallel configuration."""
    nodes = getattr(parallel, "nnodes", 1)  # new in 0.12
    return int(getattr(parallel, "nnodes_within_dp", nodes))


def _why_not_freeze(config: Any) -> str:
    """The reason why this engine cannot freeze requests; empty if it can."""
    if getattr(getattr(config, "attention_config", None), "hisparse_config", None) is not None:
        return "with HiSparse part of the prefix cache lies in host memory, which has not been tested"
    return ""


def resident_graphs(allocator: Any, parallel: Any) -> str:
    """See `rank_builder.resident_graphs`; `parallel` is vLLM's parallel configuration."""
    custom = parallel.tensor_parallel_size > 1 and not parallel.disable_custom_all_reduce
    return rank_builder.resident_graphs(allocator, custom_all_reduce=custom)
