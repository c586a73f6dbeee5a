"""`rl-memory doctor`: looks at a machine, an environment and a running engine, and says what to do.

Each check returns one `Finding`. `table.py` lists the checks of this machine, `against.py` those of a running engine,
and `rows.py` says which check finds which row of docs/troubleshooting.md.
"""

from __future__ import annotations

from rl_memory_plugins.doctor.examination import Examination, examine
from rl_memory_plugins.doctor.finding import Finding, Status

__all__ = ["Examination", "Finding", "Status", "examine"]
