"""One check: a function that looks at one thing, and how it is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rl_memory_plugins.doctor.finding import PAGE, Finding


@dataclass(frozen=True)
class Check:
    """One check.

    Args:
        name: Its name, in findings and in the documentation.
        examine: Looks, and returns what it has found. It takes no arguments.
        section: The section of the page with the symptoms.
        deadline_s: Seconds after which the check counts as hanging, which is a failure.
        own_process: Run it in a process of its own: a call of a driver that crashes or hangs there is a result.
        needs_gpu: Without a GPU the check is not applicable, and its function is not called.
    """

    name: str
    examine: Callable[[], Finding]
    section: str
    deadline_s: float = 10.0
    own_process: bool = False
    needs_gpu: bool = False

    @property
    def docs(self) -> str:
        return f"{PAGE}#{self.section}"
