"""What the ranks of an update answer to a manifest, and what the senders of one update make of it together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from rl_memory_plugins.weights import wire
from rl_memory_plugins.weights.known_names import Ignored, hint, ignored_by_all
from rl_memory_plugins.weights.manifest import Manifest, Mismatch

if TYPE_CHECKING:
    from rl_memory_plugins.errors import RLMemoryError
    from rl_memory_plugins.weights.division import Division, Need
    from rl_memory_plugins.weights.source import ShardedSource

UNUSED = "no rank of the engine uses it"


class Findings(NamedTuple):
    """The answers of some ranks to a manifest.

    Attributes:
        mismatches: The mismatches of the ranks. An unknown name is one only if all ranks ignore the name.
        ignored: The names that all these ranks ignore.
        nearest: For unknown names, similar names that a rank knows.
    """

    mismatches: list[Mismatch]
    ignored: Ignored
    nearest: dict[str, str]

    def all_mismatches(self) -> list[Mismatch]:
        """The mismatches, and the ignored names that the engine may not ignore."""
        listed = {mismatch.name for mismatch in self.mismatches}
        return self.mismatches + [
            Mismatch("unknown", name, UNUSED + hint(self.nearest.get(name)))
            for name in self.ignored.unknown
            if name not in listed
        ]


def of_ranks(answers: Sequence[tuple[int, wire.Answer]]) -> Findings:
    """The answers of the ranks of one sender, with their numbers."""
    merged: dict[Mismatch, list[int]] = {}
    unknown: dict[str, Mismatch] = {}
    for rank, answer in answers:
        for mismatch in answer.mismatches if isinstance(answer, wire.Reject) else ():
            if mismatch.kind == "unknown":  # pipeline stages say it in different words: each knows other near names
                mismatch = unknown.setdefault(mismatch.name, mismatch)
            merged.setdefault(mismatch, []).append(rank)
    return Findings(
        [msgspec.structs.replace(mismatch, ranks=tuple(sorted(ranks))) for mismatch, ranks in merged.items()],
        # With pipeline or expert parallelism, one rank may not use a name. It is an error if no rank does.
        ignored_by_all([Ignored(answer.unused, answer.skipped) for _, answer in answers]),
        {name: near for _, answer in answers for name, near in answer.nearest.items()},
    )


def of_senders(findings: Sequence[Findings]) -> Findings:
    """The findings of all senders of one update."""
    return Findings(
        list(dict.fromkeys(mismatch for found in findings for mismatch in found.mismatches)),
        ignored_by_all([found.ignored for found in findings]),
        {name: near for found in findings for name, near in found.nearest.items()},
    )


class Senders(Protocol):
    """The senders of one update. This one is a sender without others.

    Attributes:
        may_divide: Whether `divide` may return a division.
    """

    may_divide: bool = False

    def settle(self, findings: Findings | None) -> Findings:
        """The findings of all senders, none of which has mismatches. No sender begins before all agree.

        Args:
            findings: Those of this sender; `None` if it serves no rank.
        """
        return of_senders([] if findings is None else [findings])

    def consult(self, findings: Findings | None) -> Findings:
        """The findings of all senders, which may change their sources. Nothing begins yet."""
        return of_senders([] if findings is None else [findings])

    def divide(
        self, manifest: Manifest, source: ShardedSource, needs: list[Need], places: list[str]
    ) -> Division | None:
        """Whether all senders send their shards, once all have settled. By default each sends whole tensors.

        Args:
            needs: Those of the ranks of this sender.
            places: Where it listens.
        """
        return None

    def linked(self, error: RLMemoryError | None = None) -> None:
        """Wait until every rank is connected with all senders that send their shards. All call it after `divide`.

        Args:
            error: The error that keeps the ranks of this sender, or this sender, from it.

        Raises:
            RLMemoryError: that of a sender. No sender has sent anything.
        """
        if error is not None:
            raise error


class Alone(Senders):
    """An update with one sender."""
