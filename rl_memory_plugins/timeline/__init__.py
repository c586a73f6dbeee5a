"""What the memory of engines and trainers did over time: transitions as events, and pictures of them.

history = History({"rollout": llm.timeline()}, {"rank 0": [report.record() for report in reports]})
Path("timeline.html").write_text(html_page(history))
"""

from __future__ import annotations

from rl_memory_plugins.timeline.history import History, read_handoffs, timeline_in
from rl_memory_plugins.timeline.page import html_page
from rl_memory_plugins.timeline.perfetto import perfetto_trace
from rl_memory_plugins.timeline.picture import pictures
from rl_memory_plugins.timeline.records import Event, Handoff, HandoffStep, RankMemory, Step, Timeline

__all__ = [
    "Event",
    "Handoff",
    "HandoffStep",
    "History",
    "RankMemory",
    "Step",
    "Timeline",
    "html_page",
    "perfetto_trace",
    "pictures",
    "read_handoffs",
    "timeline_in",
]
