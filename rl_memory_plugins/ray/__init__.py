"""Engines as Ray actors: a fleet that sleeps, wakes and is updated as one engine. Needs the extra `ray`.

from rl_memory_plugins.ray import EngineDescription, EngineFleet

fleet = EngineFleet.start(EngineDescription("vllm", {"model": "Qwen/Qwen2.5-0.5B-Instruct"}), 2)
"""

from rl_memory_plugins.ray.description import EngineDescription
from rl_memory_plugins.ray.engines import Generated
from rl_memory_plugins.ray.fleet import EngineFleet
from rl_memory_plugins.ray.handle import EngineActorHandle
from rl_memory_plugins.ray.handoff import FleetHandoff
from rl_memory_plugins.ray.status import EngineState, status, table

__all__ = [
    "EngineActorHandle",
    "EngineDescription",
    "EngineFleet",
    "EngineState",
    "FleetHandoff",
    "Generated",
    "status",
    "table",
]
