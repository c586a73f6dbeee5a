"""Equal calls that were refused are one event, so that a client that retries does not fill the timeline."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from rl_memory_plugins import errors
from rl_memory_plugins.timeline.records import Event, RankMemory

REFUSALS = frozenset(
    name
    for name, error in vars(errors).items()
    if isinstance(error, type) and issubclass(error, errors.RLMemoryError) and error.status in (409, 422, 507)
)
"""The types of errors that leave memory and weights as they were. A sleep may have ended running requests by then."""

_SAME = ("operation", "level", "tags", "mode", "idle", "error", "weight_version", "content")


def joined(former: Event, event: Event) -> Event | None:
    """One event for both, with the memory before the first call and after the last; `None` if they are not equal.

    Their messages may differ in numbers, such as the bytes that are free; that of the last call stays. No transition
    must have completed between them. One that failed, or bypassed the server, may have moved memory: then they met
    different states.
    """
    if event.error not in REFUSALS:
        return None
    if not _tags(former.before) == _tags(former.after) == _tags(event.before) == _tags(event.after):
        return None
    if any(getattr(former, name) != getattr(event, name) for name in _SAME) or _words(former) != _words(event):
        return None
    start_ns = min(former.start_ns, event.start_ns)
    end_ns = max(one.start_ns + one.duration_ns for one in (former, event))
    return msgspec.structs.replace(
        event,
        start_ns=start_ns,
        duration_ns=end_ns - start_ns,
        before=former.before,
        count=former.count + event.count,
        first_seq=former.first_seq,
    )


def _tags(memories: Iterable[RankMemory]) -> list[dict[str, int]]:
    return [memory.tags for memory in memories]


def _words(event: Event) -> str:
    return re.sub(r"\d+", "0", event.message or "")
