"""Nodes of Ray on one machine, each with one GPU by Ray's own count, for vLLM's Ray executor on the CPU."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from integration.engines.ports import reserve_port
from integration.waiting import wait_until

_START_S = 90.0
_LOCAL = "127.0.0.1"


@contextmanager
def ray_nodes(count: int, variables: Mapping[str, str]) -> Iterator[str]:
    """A Ray of its own, beside others of this machine.

    Args:
        variables: What the environment of the nodes' workers has besides.

    Yields: Its address, for `RAY_ADDRESS`.

    Raises:
        RuntimeError, TimeoutError: the first node does not start.
    """
    with ExitStack() as ends:
        reservation, port = reserve_port()
        ends.callback(reservation.close)
        address = f"{_LOCAL}:{port}"
        # Ray notes its latest cluster there, also after its end, and `ray.init` of other programs would look for it.
        folder = ends.enter_context(tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True))
        for number in range(count):
            place = ["--address", address] if number else ["--head", "--port", str(port), "--include-dashboard=false"]
            node = _started(place, {**os.environ, **variables, "RAY_TMPDIR": folder})
            ends.callback(_stop, node)
            if not number:
                _await_head(node, port)
        yield address


def _started(place: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    ports = ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]  # any
    counts = ["--num-cpus=2", "--num-gpus=1", f"--object-store-memory={100 << 20}"]
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    command = [*start, "--node-ip-address", _LOCAL, *ports, *counts, *place]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)


def _await_head(node: subprocess.Popen[bytes], port: int) -> None:
    wait_until(lambda: node.poll() is not None or _listens(port), "the first node of Ray starts", _START_S)
    if node.poll() is not None:
        raise RuntimeError("the first node of Ray has ended")


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((_LOCAL, port)) == 0


def _stop(node: subprocess.Popen[bytes]) -> None:
    """End a node with all of its processes: `ray start --block` ends them, if it gets the time."""
    node.terminate()
    try:
        node.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(node.pid, signal.SIGKILL)
        node.wait()
