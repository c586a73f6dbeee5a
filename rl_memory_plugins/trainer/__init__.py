"""The trainer's side: hand devices over, send weights, sleep, offload, compare checksums. Needs torch and no engine.

    engine = EngineClient("http://127.0.0.1:8000")
    source = ModelSource(model, dtype=torch.bfloat16)
    memory = PausableMemory(model, optimizer)
    weights, others = memory.part("parameters"), memory.part("gradients", "optimizer")
    handoff = RolloutHandoff(engine, source, weights=[weights], others=[others])
    with handoff.training():  # the engine sleeps
        train_step(model, optimizer, batch)

Names are imported when they are first used; importing this package imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_memory_plugins.client import EngineClient
    from rl_memory_plugins.trainer.adapters import Adapter
    from rl_memory_plugins.trainer.async_handoff import AsyncRolloutHandoff
    from rl_memory_plugins.trainer.cache import CacheClearing, aggressive_empty_cache
    from rl_memory_plugins.trainer.engine_handle import EngineHandle, EngineObject
    from rl_memory_plugins.trainer.handoff import RolloutHandoff
    from rl_memory_plugins.trainer.handoff_report import HandoffReport
    from rl_memory_plugins.trainer.offloading import Moved, Offloader, load, offload
    from rl_memory_plugins.trainer.outcomes import EngineFailure
    from rl_memory_plugins.trainer.parts import Movable
    from rl_memory_plugins.trainer.pausable import PausableMemory
    from rl_memory_plugins.trainer.pausable_part import PausablePart
    from rl_memory_plugins.trainer.peers import Peers
    from rl_memory_plugins.trainer.push import push_adapter, push_weights
    from rl_memory_plugins.trainer.sources.checkpoint import CheckpointSource
    from rl_memory_plugins.trainer.sources.engine_dtypes import EngineDtypes
    from rl_memory_plugins.trainer.sources.fsdp1 import FSDP1Source
    from rl_memory_plugins.trainer.sources.megatron import FusedQKV, GateUp, MegatronSource, Replicated, Split
    from rl_memory_plugins.trainer.sources.model import ModelSource
    from rl_memory_plugins.trainer.sources.quantised import QuantisedSource
    from rl_memory_plugins.trainer.sources.stream import StreamSource
    from rl_memory_plugins.trainer.update import push_from_all
    from rl_memory_plugins.weights.checksums import tensor_checksum
    from rl_memory_plugins.weights.communicators.kept import close_communicators
    from rl_memory_plugins.weights.manifest import TensorSpec
    from rl_memory_plugins.weights.open_allocations import release_mapped
    from rl_memory_plugins.weights.source import NegotiableSource, ReadingSource, ResidentSource, TensorSource

__all__ = [
    "Adapter",
    "AsyncRolloutHandoff",
    "CacheClearing",
    "CheckpointSource",
    "EngineClient",
    "EngineDtypes",
    "EngineFailure",
    "EngineHandle",
    "EngineObject",
    "FSDP1Source",
    "FusedQKV",
    "GateUp",
    "HandoffReport",
    "MegatronSource",
    "ModelSource",
    "Movable",
    "Moved",
    "NegotiableSource",
    "Offloader",
    "PausableMemory",
    "PausablePart",
    "Peers",
    "QuantisedSource",
    "ReadingSource",
    "Replicated",
    "ResidentSource",
    "RolloutHandoff",
    "Split",
    "StreamSource",
    "TensorSource",
    "TensorSpec",
    "aggressive_empty_cache",
    "close_communicators",
    "load",
    "offload",
    "push_adapter",
    "push_from_all",
    "push_weights",
    "release_mapped",
    "tensor_checksum",
]

_MODULES = {
    "rl_memory_plugins.client": ["EngineClient"],
    "rl_memory_plugins.weights.checksums": ["tensor_checksum"],
    "rl_memory_plugins.weights.communicators.kept": ["close_communicators"],
    "rl_memory_plugins.weights.manifest": ["TensorSpec"],
    "rl_memory_plugins.weights.open_allocations": ["release_mapped"],
    "rl_memory_plugins.weights.source": ["NegotiableSource", "ReadingSource", "ResidentSource", "TensorSource"],
    f"{__name__}.adapters": ["Adapter"],
    f"{__name__}.async_handoff": ["AsyncRolloutHandoff"],
    f"{__name__}.cache": ["CacheClearing", "aggressive_empty_cache"],
    f"{__name__}.engine_handle": ["EngineHandle", "EngineObject"],
    f"{__name__}.handoff": ["RolloutHandoff"],
    f"{__name__}.handoff_report": ["HandoffReport"],
    f"{__name__}.offloading": ["Moved", "Offloader", "load", "offload"],
    f"{__name__}.outcomes": ["EngineFailure"],
    f"{__name__}.parts": ["Movable"],
    f"{__name__}.pausable": ["PausableMemory"],
    f"{__name__}.pausable_part": ["PausablePart"],
    f"{__name__}.peers": ["Peers"],
    f"{__name__}.push": ["push_adapter", "push_weights"],
    f"{__name__}.sources.checkpoint": ["CheckpointSource"],
    f"{__name__}.sources.engine_dtypes": ["EngineDtypes"],
    f"{__name__}.sources.fsdp1": ["FSDP1Source"],
    f"{__name__}.sources.megatron": ["FusedQKV", "GateUp", "MegatronSource", "Replicated", "Split"],
    f"{__name__}.sources.model": ["ModelSource"],
    f"{__name__}.sources.quantised": ["QuantisedSource"],
    f"{__name__}.sources.stream": ["StreamSource"],
    f"{__name__}.update": ["push_from_all"],
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
