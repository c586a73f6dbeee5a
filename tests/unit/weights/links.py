"""What lies between a trainer and an engine: a network that is cut or stalls."""

import contextlib
import select
import socket
import threading
from types import SimpleNamespace

from rl_memory_plugins.weights import addresses


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
