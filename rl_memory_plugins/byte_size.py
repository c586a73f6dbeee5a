"""Numbers of bytes for a person."""

from __future__ import annotations


def size(count: float) -> str:
    """A number of bytes for a person: `1.5 GiB`."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"
