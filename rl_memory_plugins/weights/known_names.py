"""The names of a manifest that a model's loader ignores: which it skips by itself, and which nobody knows.

A loader that ignores a name skips it by itself if the engine's own checkpoint has the name, because the engine ignored
it at its start too. It may be a name of another part (a draft, a vision tower) that this engine does not run. Other
ignored names are misspelt, or belong to another model.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

#: The most unknown names for which a near name is sought.
SOUGHT = 20

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
#: The leading parts by which the names of a saved model and of a model in memory differ.
_OUTER = re.compile(r"^(?:(?:model|language_model)\.)+")


class Ignored(NamedTuple):
    """Names that a rank, or every rank of a group, ignores.

    Attributes:
        unknown: Those that it may not ignore.
        skipped: Those that its model's loader skips by itself.
    """

    unknown: list[str]
    skipped: list[str]


def ignored_by_all(parts: Sequence[Ignored]) -> Ignored:
    """The names that all of these ranks or groups ignore. A name is skipped if the loader of one of them skips it."""
    if not parts:
        return Ignored([], [])
    everywhere = set.intersection(*({*part.unknown, *part.skipped} for part in parts))
    skipped = dict.fromkeys(name for part in parts for name in part.skipped if name in everywhere)
    unknown = [name for name in parts[0].unknown if name in everywhere and name not in skipped]
    return Ignored(unknown, list(skipped))


def skipped_twins(
    names: Iterable[str], checkpoint: Collection[str], ignores: Callable[[list[str]], Collection[str]]
) -> list[str]:
    """The names that are skipped under the name that they have in the engine's checkpoint.

    A vision-language model in memory has `model.visual.merger.weight` where its checkpoint has `visual.merger.weight`.

    Args:
        names: Ignored names that the checkpoint does not have.
        checkpoint: The names of the engine's checkpoint.
        ignores: Which of some names of the checkpoint the loader ignores.
    """
    inner = {_OUTER.sub("", name): name for name in checkpoint}
    twins = {name: inner[key] for name in names if (key := _OUTER.sub("", name)) in inner}
    if not twins:
        return []
    ignored = ignores(list(dict.fromkeys(twins.values())))
    return [name for name, twin in twins.items() if twin in ignored]


def nearest(unknown: Iterable[str], known: Mapping[str, Any]) -> dict[str, str]:
    """For each unknown name the most similar known name, if there is a similar one. Looks at the first `SOUGHT`."""
    by_shape = {_NUMBER.sub("*", name): name for name in known}
    found = {}
    for name in list(unknown)[:SOUGHT]:
        for shape in difflib.get_close_matches(_NUMBER.sub("*", name), by_shape, 1, cutoff=0.8):
            parts, numbers = shape.split("*"), _NUMBER.findall(name)
            own = itertools.zip_longest(parts, numbers[: len(parts) - 1], fillvalue="")
            same_layer = "".join(itertools.chain.from_iterable(own))
            found[name] = same_layer if same_layer in known else by_shape[shape]
    return found


def hint(near: str | None) -> str:
    """The end of a message about an unknown name."""
    return f"; the nearest known name is {near}" if near else ""
