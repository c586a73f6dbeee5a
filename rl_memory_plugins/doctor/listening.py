"""The ports at which engines of this user listen on this machine."""

from __future__ import annotations

from rl_memory_plugins.doctor.machine import PROC, own_processes

_LISTEN = "0A"
_ENGINES = ("vllm", "VLLM", "sglang", "rl_memory", "rl-memory")


def engine_ports() -> list[int]:
    """Sorted. Empty where `/proc` shows none; a process of another container is not seen."""
    ports = _listening()
    found: set[int] = set()
    for pid in own_processes():
        try:
            command = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace")
            if not any(mark in command for mark in _ENGINES):
                continue
            for link in (PROC / str(pid) / "fd").iterdir():
                target = str(link.readlink())
                if target.startswith("socket:[") and target[8:-1] in ports:
                    found.add(ports[target[8:-1]])
        except OSError:  # it has ended
            continue
    return sorted(found)


def _listening() -> dict[str, int]:
    """The listening TCP ports by the number of the socket."""
    found = {}
    for table in ("tcp", "tcp6"):
        try:
            lines = (PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN:
                found[fields[9]] = int(fields[1].rpartition(":")[2], 16)
    return found
