"""A strict applier of unified diffs: a hunk fits at exactly one place, byte for byte, or not at all.

Line numbers in hunk headers are not used, because one diff serves several releases in which the same lines
stand at different places. Instead each hunk's old lines must occur exactly once in the file, and the hunks must
come in the file's order. There is no fuzz. Only changes inside existing files are accepted: no creation,
deletion or rename, and no change of a last line that has no newline.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import PurePosixPath

__all__ = ["DiffError", "FileDiff", "Hunk", "apply_hunks", "parse_diff"]

_HUNK_HEADER = re.compile(rb"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@.*\n")


class DiffError(ValueError):
    """The diff is malformed, or a hunk does not fit."""


@dataclass(frozen=True)
class Hunk:
    """`old` and `new` are whole lines with their newlines, joined; both contain the context."""

    old: bytes
    new: bytes


@dataclass
class FileDiff:
    path: str
    hunks: list[Hunk] = field(default_factory=list)


def parse_diff(text: bytes) -> list[FileDiff]:
    """The changed files of a unified diff with `a/` and `b/` prefixes.

    Raises:
        DiffError: The text is not such a diff, or a path leaves the tree.
    """
    lines = text.splitlines(keepends=True)
    files: list[FileDiff] = []
    at = 0
    while at < len(lines):
        if lines[at].startswith(b"--- ") and at + 1 < len(lines):
            files.append(FileDiff(_path(lines[at], lines[at + 1])))
            at += 2
        elif files and (header := _HUNK_HEADER.fullmatch(lines[at])):
            hunk, at = _hunk(lines, at + 1, *(int(count or 1) for count in header.groups()))
            files[-1].hunks.append(hunk)
        else:
            raise DiffError(f"line {at + 1} is neither a file nor a hunk header")
    if not files or not all(file.hunks for file in files):
        raise DiffError("a diff needs at least one file, and each file at least one hunk")
    return files


def apply_hunks(original: bytes, hunks: list[Hunk]) -> bytes:
    """`original` with every hunk applied.

    Raises:
        DiffError: The old lines of a hunk occur nowhere, more than once, or before those of the hunk in front.
    """
    parts: list[bytes] = []
    done = 0
    for number, hunk in enumerate(hunks, 1):
        starts = _line_starts(original, hunk.old)
        if len(starts) != 1:
            raise DiffError(f"hunk {number} fits at {len(starts)} places, it must be exactly 1")
        if starts[0] < done:
            raise DiffError(f"hunk {number} fits only before the end of hunk {number - 1}")
        parts += [original[done : starts[0]], hunk.new]
        done = starts[0] + len(hunk.old)
    return b"".join([*parts, original[done:]])


def _path(old: bytes, new: bytes) -> str:
    paths = [line[4:].split(b"\t")[0].strip().decode() for line in (old, new)]
    path = PurePosixPath(paths[0].removeprefix("a/"))
    if paths != [f"a/{path}", f"b/{path}"] or ".." in path.parts or path.is_absolute():
        raise DiffError(f"a change inside one relative path is expected, not {paths[0]} and {paths[1]}")
    return str(path)


def _hunk(lines: list[bytes], at: int, old_count: int, new_count: int) -> tuple[Hunk, int]:
    old: list[bytes] = []
    new: list[bytes] = []
    while len(old) < old_count or len(new) < new_count:
        mark, line = (lines[at][:1], lines[at][1:]) if at < len(lines) else (b"", b"")
        if mark not in (b" ", b"-", b"+") or not line.endswith(b"\n"):
            raise DiffError(f"line {at + 1} does not continue the hunk that its header announces")
        if mark != b"+":
            old.append(line)
        if mark != b"-":
            new.append(line)
        at += 1
    if (len(old), len(new)) != (old_count, new_count) or not old:
        raise DiffError(f"the hunk that ends at line {at} does not have the lengths that its header announces")
    return Hunk(b"".join(old), b"".join(new)), at


def _line_starts(text: bytes, block: bytes) -> list[int]:
    """Every offset at which `block` stands as whole lines, overlapping ones included."""
    starts, at = [], text.find(block)
    while at >= 0:
        if at == 0 or text[at - 1 : at] == b"\n":
            starts.append(at)
        at = text.find(block, at + 1)
    return starts
