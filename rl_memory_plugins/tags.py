"""The vocabulary of the contract: tags, levels, modes and states, and the checks of a caller's values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum

from rl_memory_plugins.errors import InvalidRequestError

try:  # enum.StrEnum is Python 3.11
    from enum import StrEnum
except ImportError:  # pragma: no cover
    from enum import Enum

    class StrEnum(str, Enum):  # type: ignore[no-redef]
        __str__ = str.__str__


class Tag(StrEnum):
    """The use of a region of memory. `RUNTIME` is internal and never released."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    CUDA_GRAPH = "cuda_graph"
    RUNTIME = "runtime"


#: The tags a caller may name, in the order in which they are put to sleep; they wake in reverse.
PUBLIC_TAGS: tuple[Tag, ...] = (Tag.KV_CACHE, Tag.WEIGHTS, Tag.CUDA_GRAPH)


class Level(IntEnum):
    PAUSE = 0
    PRESERVE = 1
    DISCARD = 2


class PauseMode(StrEnum):
    """The treatment of running requests: ended early, waited for, or recomputed after the wake."""

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


class TagState(StrEnum):
    RESIDENT = "resident"
    PRESERVED = "preserved"  # released, the content is in host memory
    DISCARDED = "discarded"  # released, the content is gone


class Content(StrEnum):
    """Whether the weights' content may answer requests. Only `VALID` may."""

    VALID = "valid"
    STALE = "stale"  # discarded since the last complete update
    UPDATING = "updating"  # an update has written its first byte
    FAILED = "failed"  # an update broke off, or the engine's own call overwrote the weights


def preserves(level: Level, tag: Tag) -> bool:
    """The table of the contract: does `sleep(level)` keep this tag's content in host memory?"""
    if tag is Tag.KV_CACHE:
        return False
    return level is Level.PRESERVE or tag is not Tag.WEIGHTS


def parse_level(level: object) -> Level:
    if isinstance(level, bool) or not isinstance(level, (int, str)):
        raise _invalid("level", level, [v.value for v in Level])
    try:
        return Level(int(level))
    except ValueError:
        raise _invalid("level", level, [v.value for v in Level]) from None


def parse_mode(mode: object) -> PauseMode:
    try:
        return PauseMode(str(mode))
    except ValueError:
        raise _invalid("mode", mode, [v.value for v in PauseMode]) from None


def parse_tags(tags: Iterable[object] | str | None) -> tuple[Tag, ...]:
    """Check `tags` and return them in canonical order.

    `None` means all tags. A string is split at its commas. Duplicates are dropped. An empty list is an error: some
    callers mean no tag by it and others all tags, and both engines have had that as a bug.

    Raises:
        InvalidRequestError: empty, or a name that is not a public tag; lists what is allowed.
    """
    if tags is None:
        return PUBLIC_TAGS
    allowed = [tag.value for tag in PUBLIC_TAGS]
    if isinstance(tags, str):
        tags = tags.split(",")
    if isinstance(tags, Mapping) or not isinstance(tags, Iterable):  # as a JSON body can hold
        raise _invalid("tags", tags, allowed)
    names = [str(tag).strip() for tag in tags]
    unknown = sorted({name for name in names if name not in allowed})
    if unknown or not names:
        raise _invalid("tags", unknown or [], allowed)
    return tuple(tag for tag in PUBLIC_TAGS if tag.value in names)


def _invalid(field: str, got: object, allowed: list[object] | list[str] | list[int]) -> InvalidRequestError:
    if field == "tags" and got == []:
        message = f"tags is empty: leave it out for all tags, or name some of {', '.join(map(str, allowed))}"
    else:
        message = f"{field} {got!r} is not allowed: use one of {', '.join(map(str, allowed))}"
    shown = got if isinstance(got, (int, str, list)) else str(got)
    return InvalidRequestError(message, field=field, got=shown, allowed=list(allowed))
