"""Two hosts on one machine: this network namespace for the trainer, and another one for the engine."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

CLONE_NEWNET = 0x40000000
MOST = 8
"""The hosts of one process."""


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)


class TwoHosts:
    """A network namespace for the engine, joined to this one by a pair of virtual interfaces.

    Args:
        number: Of the engine's host, if there are several. Below `MOST`.

    Attributes:
        interface, addresses: Those of the trainer.
        engine: The address of the engine's host.
        networks: Those of the trainer, for the engine's option `update_hosts`.
    """

    def __init__(self, number: int = 0) -> None:
        self._name = f"rlm{os.getpid()}-{number}"  # tests that run side by side must not meet, nor their networks
        self.interface = f"{self._name}t"
        network = (MOST * os.getpid() + number) % (1 << 15)
        fourth = ipaddress.IPv4Address("198.18.0.0") + 4 * network
        sixth = ipaddress.IPv6Address(f"fd97:213:{network:x}::")
        self._hosts = [(f"{fourth + host}/30", f"{sixth + host}/64") for host in (1, 2)]  # trainer and engine
        self._sides: list[tuple[tuple[str, ...], str]] = [((), self.interface), (("-n", self._name), "eth0")]
        self.addresses = [str(fourth + 1), str(sixth + 1)]
        self.engine = str(fourth + 2)
        self.networks = f"{fourth}/30 {sixth}/64"

    def __enter__(self) -> TwoHosts:
        try:
            _ip("netns", "add", self._name)
            _ip("link", "add", self.interface, "type", "veth", "peer", "name", "eth0", "netns", self._name)
            for (side, device), (fourth, sixth) in zip(self._sides, self._hosts, strict=True):
                _ip(*side, "addr", "add", fourth, "dev", device)
                _ip(*side, "addr", "add", sixth, "dev", device, "nodad")
                _ip(*side, "link", "set", device, "up")
            _ip("-n", self._name, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for command in (("link", "del", self.interface), ("netns", "del", self._name)):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip(*command)

    def command(self, command: Sequence[str], hidden: Path) -> list[str]:
        """The command that runs `command` on the engine's host, where the folder `hidden` of this host is not seen.

        Nor is this host's shared memory, by which vLLM tells whether two ranks are on one host.
        """
        script = 'mount -t tmpfs none "$0" && mount -t tmpfs none /dev/shm && exec "$@"'
        return ["ip", "netns", "exec", self._name, "sh", "-c", script, str(hidden), *command]

    def cut(self) -> None:
        """Pull the cable: no packet says that it is gone."""
        _ip("link", "set", self.interface, "down")

    def mend(self) -> None:
        _ip("link", "set", self.interface, "up")
        _ip("addr", "replace", self._hosts[0][1], "dev", self.interface, "nodad")  # the cut took it away
        for side, device in self._sides:
            _ip(*side, "neigh", "flush", "dev", device)  # who was sought in vain counts as unreachable for a while

    def limit(self, mbit_s: int) -> None:
        """Let the trainer send at most so many megabits per second."""
        bounds = ("rate", f"{mbit_s}mbit", "burst", "256kb", "latency", "50ms")
        _run("tc", "qdisc", "replace", "dev", self.interface, "root", "tbf", *bounds)

    def enter(self) -> None:
        """Move this thread to the engine's host."""
        _enter(Path("/run/netns", self._name))

    def leave(self) -> None:
        """Move this thread to the trainer's host, where the main thread is."""
        _enter(Path(f"/proc/{os.getpid()}/ns/net"))


def _enter(path: Path) -> None:
    with path.open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def namespaces_work() -> bool:
    """Whether this process may make network namespaces."""
    if shutil.which("ip") is None:
        return False
    try:
        with TwoHosts():
            return True
    except (OSError, subprocess.SubprocessError):
        return False
