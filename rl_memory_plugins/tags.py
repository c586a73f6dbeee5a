"""Tags, levels, modes and states of the contract, and the checks of a caller's values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    """Running requests end at once, finish first, continue with a recomputed KV cache, or continue with their own."""

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"
    FREEZE = "freeze"


class TagState(StrEnum):
    RESIDENT = "resident"
    PRESERVED = "preserved"  # released, the content is in host memory
    DISCARDED = "discarded"  # released, the content is gone


class Content(StrEnum):
    """The state of the weights' content. Only `VALID` content may answer requests."""

    VALID = "valid"
    STALE = "stale"  # discarded, or withheld from the start on, since when no update was complete
    UPDATING = "updating"  # an update has written its first byte
    FAILED = "failed"  # an update broke off, or the engine's own call overwrote the weights


class Draft(StrEnum):
    """How the weights of a draft model (speculative decoding) go with the target's."""

    IN_STEP = "in_step"  # both are of one update, or of the start
    OUT_OF_STEP = "out_of_step"  # the target has newer weights: fewer guesses are accepted
    FAILED = "failed"  # an update of the draft broke off: hardly any guess is accepted until the next update of it


class DraftShare(StrEnum):
    """How much of a draft model an update writes."""

    NONE = "none"
    PART = "part"
    WHOLE = "whole"


def preserves(level: Level, tag: str) -> bool:
    """Whether `sleep(level)` keeps the content of this tag in host memory, as the table of the contract says."""
    if tag == Tag.KV_CACHE:
        return False
    return level is Level.PRESERVE or tag != Tag.WEIGHTS


def parse_level(level: object) -> Level:
    try:
        # `int` also takes blanks, underscores and the digits of other scripts.
        is_text = isinstance(level, str) and level.isascii() and level.isdigit()
        if is_text or (isinstance(level, int) and not isinstance(level, bool)):
            return Level(int(level))  # type: ignore[call-overload]
    except ValueError:
        pass
    raise _not_allowed("level", level, list(Level))


def parse_mode(mode: object) -> PauseMode:
    try:
        return PauseMode(str(mode))
    except ValueError:
        raise _not_allowed("mode", mode, list(PauseMode)) from None


def parse_tags(tags: Iterable[object] | str | None) -> tuple[Tag, ...]:
    """Check `tags` and return them in canonical order, each once.

    `None` means all tags. A string is split at its commas. An empty list is an error: some callers mean no tag by it
    and others all tags, and both engines have had that as a bug.

    Raises:
        InvalidRequestError: the list is empty, or a name is no public tag; the error lists the allowed tags.
    """
    if tags is None:
        return PUBLIC_TAGS
    if isinstance(tags, str):
        tags = tags.split(",")
    if isinstance(tags, Mapping) or not isinstance(tags, Iterable):  # as a JSON body can hold
        raise _not_allowed("tags", tags, PUBLIC_TAGS)
    names = [str(tag).strip() for tag in tags]
    unknown = sorted(set(names) - set(PUBLIC_TAGS))
    if unknown or not names:
        raise _not_allowed("tags", unknown, PUBLIC_TAGS)
    return tuple(tag for tag in PUBLIC_TAGS if tag in names)


def _not_allowed(field: str, got: object, choice: Sequence[Level | PauseMode | Tag]) -> InvalidRequestError:
    allowed = [member.value for member in choice]
    names = ", ".join(map(str, allowed))
    if got == []:
        message = f"{field} is empty: leave it out for all {field}, or name some of {names}"
    else:
        message = f"{field} {got!r} is not allowed: use one of {names}"
    shown = got if isinstance(got, (int, str, list)) else str(got)
    return InvalidRequestError(message, field=field, got=shown, allowed=allowed)
