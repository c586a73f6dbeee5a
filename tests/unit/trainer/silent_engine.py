"""An engine whose only rank dies or falls silent at a given point of an update."""

import contextlib
import threading

from rl_memory_plugins.errors import EngineFaultError
from rl_memory_plugins.weights import wire
from rl_memory_plugins.weights.addresses import places_of
from rl_memory_plugins.weights.dial import dial

POINTS = ("devices", "post", "hello", "offer", "accept", "bucket", "commit", "done", "answer")


class SilentEngine:
    """Takes an update as far as `until`, and then closes the connection, or falls silent until `wake`.

    `until` is one of `POINTS`: what the engine is still asked or told, or has still sent. It writes nothing anywhere.
    """

    def __init__(self, until, hangs=False, device="fake:9"):
        assert until in POINTS
        self._until = until
        self._hangs = hangs
        self._device = device
        self._awake = threading.Event()
        self.threads = []
        self.version = None

    def wake(self):
        self._awake.set()
        for thread in self.threads:
            thread.join(10)

    def sleep(self, *args, **options): ...

    def wake_up(self, tags=None): ...

    def devices(self):
        self._reach("devices")
        return [self._device]

    def post_update(self, body):
        self.threads.append(threading.current_thread())
        self._reach("post")
        with contextlib.closing(
            wire.Connection(dial(places_of(body["endpoints"][self._device]), None, 5.0), "the trainer")
        ) as link:
            self._take(link, body["token"])
        self._reach("answer")
        self.version = body["weight_version"]
        return {"weight_version": self.version}

    def _take(self, link, token):
        link.send(wire.Hello(wire.PROTOCOL, self._device, token, 0), 5.0)
        self._reach("hello")
        while True:
            offer, fds = link.receive_with_fds(wire.Offer, wire.Ask, timeout_s=20.0)
            wire.close_fds(fds)
            self._reach("offer")
            link.send(wire.Accept([], slices=[None] * len(offer.manifest.tensors)), 5.0)
            if isinstance(offer, wire.Offer):
                break
        self._reach("accept")
        while True:
            message = link.receive(wire.Bucket, wire.Commit, timeout_s=20.0)
            if isinstance(message, wire.Commit):
                break
            self._reach("bucket")
            link.send(wire.Ack(message.slot), 5.0)
        self._reach("commit")
        link.send(wire.Done({"rank": 0, "device": self._device, "transport": "shm"}), 5.0)
        self._reach("done")

    def _reach(self, point):
        if point == self._until:
            if self._hangs:
                self._awake.wait(60)
            raise EngineFaultError(f"died after {point}")
