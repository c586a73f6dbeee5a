"""Directories and sockets: the private directory with the status boards, and the sockets of trainers."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

from rl_memory_plugins.doctor.finding import Finding, failure, ok, warning
from rl_memory_plugins.doctor.machine import PROC

_LONGEST_SOCKET_PATH = 107


def private_place() -> Finding:
    """The directory of status boards and locks, without which no engine starts."""
    from rl_memory_plugins.errors import UnsupportedError
    from rl_memory_plugins.private_directory import directory_with_locks, try_lock, unlock

    try:
        directory = directory_with_locks()
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"x")
    except (OSError, UnsupportedError) as error:
        return failure(
            f"the private directory cannot be used: {error}", "set TMPDIR to a directory of this user, of a local disk"
        )
    live: list[str] = []
    dead: list[str] = []
    for board in sorted(directory.glob("*.board")):
        try:
            with board.open("rb") as file:
                unused = try_lock(file.fileno(), shared=True)
                if unused:
                    unlock(file.fileno())
        except OSError:  # removed meanwhile
            continue
        (dead if unused else live).append(str(board))
    seen = f"{directory}: {len(live)} status boards of running engines"
    if dead:
        seen += f", {len(dead)} of ended ones, which the next start of an engine removes"
    return ok(seen, boards=live, ended=dead)


def sockets() -> Finding:
    """Whether a trainer can listen here, as an update without `directory=` does; and sockets that nobody serves."""
    parent = tempfile.gettempdir()
    asked = os.environ.get("TMPDIR")
    if asked and not (Path(asked).exists() and Path(asked).samefile(parent)):
        return warning(
            f"TMPDIR={asked} cannot be used, so processes use {parent}; one that can use it does not find the others",
            "create the directory, or unset TMPDIR for engines and trainers alike",
        )
    try:
        with tempfile.TemporaryDirectory(prefix="rl-memory-", dir=parent) as folder:
            path = str(Path(folder, "weights.sock"))
            if len(os.fsencode(path)) > _LONGEST_SOCKET_PATH:
                return failure(
                    f"a trainer's socket {path} would have {len(os.fsencode(path))} bytes, and the most is "
                    f"{_LONGEST_SOCKET_PATH}",
                    'set TMPDIR to a shorter path, or pass directory="/tmp" to the update',
                )
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(path)
                listening.listen()
    except OSError as error:
        return failure(f"a trainer cannot listen in {parent}: {error}", "set TMPDIR to a directory that can be written")
    stale = _stale(Path(parent))
    if stale:
        return warning(
            f"a trainer can listen in {parent}; at {len(stale)} sockets there nobody listens, in this network "
            f"namespace, so an update that names one is `unreachable`: {', '.join(map(str, stale[:3]))}"
            f"{', …' if stale[3:] else ''}",
            "remove the directories of trainers that have ended; they do not harm new updates",
            stale=[str(path) for path in stale],
        )
    return ok(f"a trainer can listen in {parent}")


def _stale(parent: Path) -> list[Path]:
    """The sockets of this user's trainers at which no process listens."""
    listening = {line.split()[-1] for line in (PROC / "net/unix").read_text().splitlines()[1:]}
    found = []
    for path in sorted(parent.glob("rl-memory-*/weights.sock")):
        try:
            if path.stat().st_uid == os.getuid() and str(path) not in listening:
                found.append(path)
        except OSError:
            continue
    return found
