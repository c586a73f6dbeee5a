"""vLLM on two hosts: this one, and a network namespace that sees none of this one's temporary files."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from integration.engines.base import REPOSITORY, Launch, Server
from integration.engines.ports import reserve_port
from integration.engines.vllm import Vllm
from integration.two_hosts import TwoHosts
from tests.vllm.conftest import VLLM_SERVE


class Host(Vllm):
    """vLLM on one of the hosts."""

    def __init__(self, hosts: TwoHosts, hidden: Path, number: int, port: int) -> None:
        self._hosts = hosts
        self._hidden = hidden  # the folder of the boards
        self._number = number
        self._port = port  # at which ranks or engines meet

    def arguments(self, launch: Launch) -> list[str]:
        first = self._hosts.addresses[0]
        if launch.dp == 1:
            where = ["--master-addr", first, "--master-port", str(self._port)]
            return [*super().arguments(launch), "--nnodes", "2", "--node-rank", str(self._number), *where]
        where = ["--data-parallel-address", first, "--data-parallel-rpc-port", str(self._port)]
        rank = ["--data-parallel-start-rank", "1"] if self._number else []
        return [*super().arguments(launch), "--data-parallel-size-local", "1", *rank, *where]

    def environment(self, launch: Launch) -> dict[str, str]:
        address = (self._hosts.addresses[0], self._hosts.engine)[self._number]
        interface = (self._hosts.interface, "eth0")[self._number]
        own = {"VLLM_HOST_IP": address, "GLOO_SOCKET_IFNAME": interface, "TMPDIR": str(self._hidden)}
        return {**super().environment(launch), **own}

    def headless(self, launch: Launch, *flag: str) -> list[str]:
        """The command of a host without a server."""
        options = ["--dtype", launch.dtype, *self.arguments(launch), *flag]
        return [*VLLM_SERVE, str(launch.model), "--headless", *options]


@contextmanager
def process(command: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        started = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT, process_group=0
        )
    try:
        yield started
    finally:
        with suppress(psutil.NoSuchProcess):
            everybody = psutil.Process(started.pid).children(recursive=True)
            started.terminate()
            _, alive = psutil.wait_procs([*everybody, psutil.Process(started.pid)], timeout=20)
            for left in alive:
                left.kill()
        started.wait(10)


@contextmanager
def started(hosts: TwoHosts, hidden: Path, launch: Launch, logs: Path, flag: list[str]) -> Iterator[Server]:
    """The server on the first host, which is not ready yet.

    Args:
        flag: What of the plugin the second host gets.
    """
    reservation, port = reserve_port()
    second = Host(hosts, hidden, 1, port)
    command = hosts.command(second.headless(launch, *flag), hidden)
    with reservation, process(command, environment_of(second, launch), logs / "second.log"):
        yield Server(Host(hosts, hidden, 0, port), launch, logs / "first.log")


def environment_of(kind: Vllm, launch: Launch) -> dict[str, str]:
    found = kind.environment(launch)
    paths = [found.get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", ""), str(REPOSITORY)]
    return {**found, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
