"""The steps of a handoff, and what was measured in them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rl_memory_plugins.trainer.offloading import Moved
from rl_memory_plugins.trainer.outcomes import EngineFailure

STEPS = ("sleep", "load", "offload_others", "wake_weights", "sync", "offload", "wake_kv_cache")


@dataclass
class HandoffReport:
    """The measurements of a handoff. A handoff in progress has filled in its finished steps.

    Attributes:
        seconds: Seconds by step; 0.0 for a step that did not run or had nothing to do. Of what leaves during the
            update, only those in which the handoff did nothing else.
        moved_bytes: Bytes of the trainer that were loaded or offloaded, by step.
        update: The result of `push_from_all`.
        failed: With `on_failure="continue"` the engines of all processes that the handoff has gone on without. The
            `details["step"]` of an error names the step.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STEPS, 0.0))
    moved_bytes: dict[str, int] = field(default_factory=dict)
    update: dict[str, Any] = field(default_factory=dict)
    failed: list[EngineFailure] = field(default_factory=list)

    def add(self, step: str, moves: Iterable[Moved]) -> int:
        """Add the bytes of these moves to a step. Returns: their sum."""
        total = sum(move.bytes for move in moves)
        self.moved_bytes[step] = self.moved_bytes.get(step, 0) + total
        return total
