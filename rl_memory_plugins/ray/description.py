"""What a fleet needs to know of its engines to start them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class EngineDescription:
    """From which each engine of a fleet is started, and started again.

    Attributes:
        engine: `vllm` or `sglang`.
        arguments: The arguments of vLLM's `AsyncEngineArgs` or SGLang's `Engine`.
        rl_memory: Options of this package, as the engines' argument `rl_memory` takes them.
        resources: What an actor takes of its bundle, e.g. `{"CPU": 1, "GPU": 0.5}` beside a trainer.
        runtime_env: Ray's `runtime_env` of the actors.
    """

    engine: str
    arguments: Mapping[str, Any]
    rl_memory: Any = True
    resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1})
    runtime_env: Mapping[str, Any] = field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        """The resources, as `options` of a Ray actor takes them."""
        rest = {name: amount for name, amount in self.resources.items() if name not in ("CPU", "GPU", "memory")}
        found = {
            "num_cpus": self.resources.get("CPU", 0),
            "num_gpus": self.resources.get("GPU", 0),
            "memory": self.resources.get("memory"),
            "resources": rest,
            "runtime_env": dict(self.runtime_env),
        }
        return {name: value for name, value in found.items() if value is not None}
