"""The adapters that `update_adapter` has added, in SGLang's registry of names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rl_memory_plugins.engines.sglang.adapters import id_of, number_in
from rl_memory_plugins.records import AdapterStatus, EngineStatus
from rl_memory_plugins.server.gate import report_adapter

#: The counters of former versions that stay at least. A request that has found its version has not counted itself yet.
MOST_FORMER = 16


def serve(tokenizer: Any, adapters: Iterable[AdapterStatus]) -> None:
    """Make the registry name these versions, and no others of this package.

    The registry counts the requests of each version. It needs the counter of a former version until its last request
    has ended. Runs in the event loop of the tokenizer manager and does not wait, so no request sees a part of it.
    """
    registry = getattr(tokenizer, "lora_registry", None)
    if registry is None:
        return
    wanted = {adapter.name: id_of(adapter.number) for adapter in adapters}
    for name, ref in list(registry._registry.items()):
        if number_in(ref.lora_id) is not None and wanted.get(name) != ref.lora_id:
            del registry._registry[name]
    for name, lora_id in wanted.items():
        known = registry._registry.get(name)
        if known is None or known.lora_id != lora_id:
            registry._registry.pop(name, None)
            _register(registry, name, lora_id)
    ours = [lora_id for lora_id in registry._counters if number_in(lora_id) is not None]
    former = [lora_id for lora_id in ours if lora_id not in wanted.values()]
    for lora_id in former[:-MOST_FORMER]:
        if registry._counters[lora_id].value() == 0:
            del registry._counters[lora_id]


def _register(registry: Any, name: str, lora_id: str) -> None:
    from sglang.srt.lora.lora_registry import LoRARef

    counter = registry._counters.get(lora_id)
    registry._register_adapter(LoRARef(lora_id=lora_id, lora_name=name, lora_path="__tensor__", pinned=False))
    if counter is not None:  # of a version that has come back, with requests that still run
        registry._counters[lora_id] = counter


def report_version(request: Any, engines: list[EngineStatus]) -> None:
    """Report the version of the adapter of a request, for the header of its answer."""
    given = getattr(request, "lora_id", None)
    ids = given if isinstance(given, list) else [given]
    versions = {id_of(adapter.number): adapter.version for engine in engines for adapter in engine.adapters}
    for lora_id in ids:
        if lora_id in versions:
            report_adapter(versions[lora_id])
