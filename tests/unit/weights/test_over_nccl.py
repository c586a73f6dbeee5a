"""One end of an NCCL communicator, over a library that records its calls: what waits for what, and until when."""

import contextlib
import ctypes
import socket

import pytest
import torch

from rl_memory_plugins.weights import wire
from rl_memory_plugins.weights.communicators import ENGINE, over_nccl

IN_PROGRESS = over_nccl._IN_PROGRESS


class FakeNccl:
    """NCCL's library. A call is in progress for so many questions after it.

    Attributes:
        log: Calls and, by `Stream` and `Event`, what the stream of the communicator is given.
    """

    def __init__(self, takes=0):
        self.log = []
        self.takes = takes
        self._left = 0
        self.failure = 0

    def ncclCommInitRankConfig(self, handle, *_):
        handle._obj.value = 1
        return self._begin("init")

    def ncclSend(self, data, count, *_):
        return self._begin(f"send {count.value}")

    def ncclRecv(self, data, count, *_):
        return self._begin(f"receive {count.value}")

    def ncclCommGetAsyncError(self, handle, state):
        assert handle.value == 1
        self._left -= 1
        if self._left == -1:
            self.log.append("ready")
        state._obj.value = self.failure or (IN_PROGRESS if self._left >= 0 else 0)
        return 0

    def ncclCommAbort(self, handle):
        self.log.append("abort")
        return 0

    class ncclGetLastError:
        restype = None

        def __new__(cls, _):
            return b"the cable is cut"

    def _begin(self, call):
        assert self._left < 0 or call == "init", "a call while another one is in progress"
        self.log.append(call)
        self._left = self.takes
        return IN_PROGRESS


@pytest.fixture
def nccl(monkeypatch):
    """The library, with streams and events that note what is asked of them."""
    library = FakeNccl()

    class Stream:
        cuda_stream = 7

        def __init__(self, device):
            pass

        def wait_stream(self, other):
            library.log.append(f"behind {other}")

    class Event:
        arrives = True

        def record(self, stream):
            library.log.append("event")

        def query(self):
            return Event.arrives

    library.Event = Event
    monkeypatch.setattr(over_nccl, "_nccl", lambda: library)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current")
    return library


@pytest.fixture
def ends():
    own, peer = socket.socketpair()
    connection = wire.Connection(own, "the trainer")
    yield connection, wire.Connection(peer, "the rank")
    own.close()
    peer.close()


def joined(nccl, connection, takes=2):
    nccl.takes = takes
    unique = bytes(ctypes.sizeof(over_nccl._UniqueId))
    made = over_nccl.NcclCommunicator("name", unique, connection, ENGINE, 5.0, torch.device("cuda", 0))
    nccl.log.clear()
    return made


DATA = torch.zeros(64, dtype=torch.uint8)


def test_only_the_first_send_waits_for_its_call_and_the_others_for_the_one_before(nccl, ends):
    communicator = joined(nccl, ends[0])
    for count in (10, 20, 30):
        communicator.send(DATA[:count], ends[0], 5.0)
    first = ["behind current", "send 10", "ready"]
    assert nccl.log == [*first, "behind current", "send 20", "ready", "behind current", "send 30"]


def test_the_next_transfer_begins_while_one_arrives_and_after_its_event(nccl, ends):
    communicator = joined(nccl, ends[0])
    communicator.begin_receive(DATA, 10, ends[0], 5.0)
    nccl.log.clear()
    nccl.Event.arrives = False

    def meanwhile():
        if len(nccl.log) == 1:
            communicator.begin_receive(DATA, 20, ends[0], 5.0)
        nccl.Event.arrives = True

    communicator.await_received(ends[0], 5.0, meanwhile)
    communicator.await_received(ends[0], 5.0)
    assert nccl.log == ["event", "behind current", "receive 20", "ready", "event"]


def test_transfers_take_another_stream_than_the_engine(nccl, ends):
    """Else what the engine computes would wait for a bucket. torch gives out its streams in turn."""
    communicator = joined(nccl, ends[0])
    own = communicator._stream
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_stream", lambda device: own)
        communicator.begin_receive(DATA, 10, ends[0], 5.0)
    assert communicator._stream is not own and nccl.log[0] == f"behind {own}"


@pytest.mark.parametrize("why", ["stalls", "ends", "fails", "closed"])
@pytest.mark.parametrize("where", ["call", "arrival"])
def test_every_wait_ends(nccl, ends, where, why):
    connection, peer = ends
    communicator = joined(nccl, connection)
    communicator.send(DATA, connection, 5.0)  # the first one
    communicator.begin_receive(DATA, 10, connection, 5.0)
    if where == "call":
        nccl._left = 1 << 60
    nccl.Event.arrives = False
    error = ConnectionError
    if why == "stalls":
        error = TimeoutError
    elif why == "ends":
        peer.close()
    elif why == "fails":
        nccl.failure = 3
    else:
        communicator.close()
    with pytest.raises(error):
        communicator.await_received(connection, 0.2)
    with pytest.raises(error) if where == "call" or why != "stalls" else contextlib.nullcontext():
        communicator.send(DATA, connection, 0.2)
    communicator.close()
    communicator.close()
    assert nccl.log.count("abort") == 1
