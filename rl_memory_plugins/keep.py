"""The globs of `sleep(keep=…)`: weights that a discarding sleep preserves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rl_memory_plugins.commands import Sleep
from rl_memory_plugins.coordination import RankGroup, raise_failures
from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.tags import Level, Tag

#: The most characters of a glob. Names have hundreds, and `fnmatch` takes minutes for a glob of a megabyte.
LONGEST_GLOB = 1024


def parse_keep(keep: Iterable[object] | str | None) -> tuple[str, ...] | None:
    """Check the globs of a caller. A string is split at its commas.

    Returns: `None` if the caller gives none: then the default of the engine holds. An empty list keeps nothing.

    Raises:
        InvalidRequestError: not a list of texts, or an empty, invalid or endless text among them.
    """
    if keep is None:
        return None
    if isinstance(keep, str):
        keep = keep.split(",")
    if isinstance(keep, Mapping) or not isinstance(keep, Iterable):  # as a JSON body can hold
        raise _invalid(f"keep must be a list of names or globs, not {type(keep).__name__}", keep)
    globs = []
    for glob in keep:
        if not isinstance(glob, str) or not glob.strip():
            raise _invalid(f"keep: {glob!r} is neither a name nor a glob", glob)
        try:
            glob.encode()
        except UnicodeEncodeError as error:
            raise _invalid(f"keep: {error}", repr(glob)) from None
        if len(glob) > LONGEST_GLOB:
            raise _invalid(f"keep: a glob has more than {LONGEST_GLOB} characters", glob[:LONGEST_GLOB])
        globs.append(glob.strip())
    return tuple(dict.fromkeys(globs))


def _invalid(message: str, got: object) -> InvalidRequestError:
    return InvalidRequestError(message, field="keep", got=got if isinstance(got, (int, str)) else str(got))


def checked_globs(command: Sleep, default: Sequence[str], ranks: RankGroup) -> Sequence[str]:
    """The globs of a sleep: its own, or the default of the engine if it discards weights and has none.

    Each glob must match a name on some rank. A rank of a pipeline holds only some layers.

    Raises:
        InvalidRequestError: a glob matches nothing; the details list the nearest names.
    """
    globs: Sequence[str] = command.keep or ()
    if command.keep is None and command.level is Level.DISCARD and Tag.WEIGHTS in command.tags:
        globs = default
    if not globs:
        return ()
    unmatched, *others = (reply.result for reply in raise_failures(ranks.call("unmatched", globs=globs)))
    for other in others:
        unmatched = {glob: [*nearest, *other[glob]] for glob, nearest in unmatched.items() if glob in other}
    if not unmatched:
        return globs
    nearest = {glob: list(dict.fromkeys(names)) for glob, names in unmatched.items()}
    first, names = next(iter(nearest.items()))
    hint = f"the nearest are {', '.join(names)}" if names else "the engine's own names count, not the checkpoint's"
    raise InvalidRequestError(
        f"keep: {first!r} matches no weight of this model; {hint}", field="keep", got=list(nearest), nearest=nearest
    )
