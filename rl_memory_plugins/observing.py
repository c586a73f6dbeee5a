"""What an engine API tells of its transitions, to whoever counts them."""

from __future__ import annotations

from rl_memory_plugins.commands import Transition
from rl_memory_plugins.records import Report


class Observer:
    """Notes the end of each transition. This one notes nothing; `server/event_metrics.py` counts."""

    def completed(self, command: Transition, report: Report) -> None:
        """All engines have run the transition. Must not raise."""

    def failed(self, command: Transition, error: Exception) -> None:
        """The caller gets this error. Must not raise."""
