"""What lies between a trainer and an engine: a network that is cut or stalls, or two hosts in namespaces."""

import contextlib
import ctypes
import os
import select
import shutil
import socket
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

from rl_memory_plugins.weights import addresses

CLONE_NEWNET = 0x40000000


class Link:
    """Forwards one connection to a trainer, and breaks after some bytes of both directions together.

    Attributes:
        forwarded: The bytes so far.
    """

    def __init__(self, place, after=None, *, stall=False):
        self._target = addresses.parse(place)
        self._after = after
        self._stall = stall
        self._end = threading.Event()
        self.forwarded = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        own = self._target._replace(host="127.0.0.1", port=self._listener.getsockname()[1])
        self.place = str(own)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._end.set()
        self._listener.close()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _run(self):
        self._listener.settimeout(10)
        with contextlib.suppress(OSError), contextlib.ExitStack() as ends:
            engine = ends.enter_context(self._listener.accept()[0])
            trainer = ends.enter_context(socket.create_connection(self._target[:2]))
            others = {engine: trainer, trainer: engine}
            while not self._end.is_set():
                for end in select.select(list(others), [], [], 0.02)[0]:
                    left = 1 << 16 if self._after is None else self._after - self.forwarded
                    data = end.recv(max(min(left, 1 << 16), 1))
                    if not data or left <= 0:
                        if self._stall and data:
                            self._end.wait(30)
                        return
                    others[end].sendall(data)
                    self.forwarded += len(data)


def through(sender, place, token=None):
    """The arguments of `Receiving` for a sender that is reached at another place."""
    return SimpleNamespace(endpoints=dict.fromkeys(sender.endpoints, place), token=token or sender.token)


def _ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


class TwoHosts:
    """A network namespace for the engine, joined to this one by a pair of virtual interfaces.

    Attributes:
        interface, addresses: Those of the trainer.
    """

    def __init__(self):
        self._name = f"rlm{os.getpid()}"
        self.interface = f"{self._name}t"
        self.addresses = ["10.213.97.1", "fd97:213::1"]

    def __enter__(self):
        try:
            _ip("netns", "add", self._name)
            _ip("link", "add", self.interface, "type", "veth", "peer", "name", "eth0", "netns", self._name)
            for side in ((), ("-n", self._name)):
                host = "2" if side else "1"
                device = "eth0" if side else self.interface
                _ip(*side, "addr", "add", f"10.213.97.{host}/24", "dev", device)
                _ip(*side, "addr", "add", f"fd97:213::{host}/64", "dev", device, "nodad")
                _ip(*side, "link", "set", device, "up")
            _ip("-n", self._name, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for command in (("link", "del", self.interface), ("netns", "del", self._name)):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip(*command)

    def cut(self):
        _ip("link", "set", self.interface, "down")

    def mend(self):
        _ip("link", "set", self.interface, "up")
        _ip("addr", "replace", "fd97:213::1/64", "dev", self.interface, "nodad")  # the cut took it away

    def enter(self):
        """Move this thread to the engine's host."""
        with Path("/run/netns", self._name).open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")


def namespaces_work():
    """Whether this process may make network namespaces."""
    if shutil.which("ip") is None:
        return False
    try:
        with TwoHosts():
            return True
    except (OSError, subprocess.SubprocessError):
        return False
