"""Updates that come from several senders in threads, and every way in which one of them is not as it should be."""

import itertools
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from toys import Rank, Receiving, ToyModel, checkpoint, loaded

from rl_memory_plugins.errors import (
    HostMemoryError,
    PermissionDeniedError,
    RLMemoryError,
    UnsupportedError,
    WeightUpdateError,
)
from rl_memory_plugins.tags import Content
from rl_memory_plugins.weights import assembly, links, parts, routes, session, wire
from rl_memory_plugins.weights.answers import Senders, of_senders
from rl_memory_plugins.weights.assembly import Assembly
from rl_memory_plugins.weights.buffers.communicated import CommunicatedAttached
from rl_memory_plugins.weights.buffers.received_slot import ReceivedSlot
from rl_memory_plugins.weights.dial import dial
from rl_memory_plugins.weights.division import Share, decide
from rl_memory_plugins.weights.sender import WeightSender
from rl_memory_plugins.weights.shards import Layout, Layouts
from rl_memory_plugins.weights.source import spec_of

PROCESSES = 3


def layout_of(tensor, dimension):
    """A third for each process, along a dimension, the last of them the smallest; `None` for a tensor that is plain."""
    if tensor.dim() <= dimension:
        return None
    extent = tensor.shape[dimension]
    bounds = [min(number * -(-extent // PROCESSES), extent) for number in range(PROCESSES + 1)]
    boxes = []
    for number in range(PROCESSES):
        box = [(0, one) for one in tensor.shape]
        box[dimension] = bounds[number], bounds[number + 1] - bounds[number]
        boxes.append(tuple(box))
    return Layout(tuple(range(PROCESSES)), tuple(boxes))


class Held:
    """What one process has of the tensors."""

    gathered = 0

    def __init__(self, tensors, process, dimension=0):
        self.whole = tensors
        self.process = process
        self.left_out = set()
        self.by_name = {name: layout_of(tensor, dimension) for name, tensor in tensors.items()}

    def specs(self):
        return [spec_of(name, tensor) for name, tensor in self.whole.items()]

    def tensors(self):
        yield from ((name, tensor) for name, tensor in self.whole.items() if name not in self.left_out)

    def layouts(self):
        return list(self.by_name.values())

    def leave_out(self, names):
        self.left_out = set(names)

    def held(self, name):
        box = self.by_name[name].box(self.process)
        return self.whole[name][tuple(slice(first, first + count) for first, count in box)].clone()


class Together(Senders):
    """Agrees with the senders of other threads."""

    may_divide = True

    def __init__(self, board, process, change):
        self._board = board
        self._process = process
        self._change = change

    def settle(self, findings):
        return of_senders([found for found in self._board.share(self._process, findings) if found is not None])

    def divide(self, manifest, source, needs, places):
        own = Share(manifest.digest(), Layouts.made_of(source.layouts()), needs, places)
        division = decide(self._board.share(self._process, own), self._process)
        left_out = zip(division.layouts.of, manifest.tensors, strict=True)
        source.leave_out([spec.name for number, spec in left_out if number >= 0])
        return self._change(self._process, division)

    def linked(self, error=None):
        for one in self._board.share(self._process, error):
            if one is not None:
                raise one


class Board:
    def __init__(self):
        self._all = threading.Barrier(PROCESSES, timeout=20)
        self._values = [None] * PROCESSES

    def share(self, process, value):
        self._values[process] = value
        self._all.wait()
        found = list(self._values)
        self._all.wait()
        return found


def update(ranks, sources, change=lambda process, division: division, **options):
    """The reports or errors of the senders, and the receivers' threads. The first sender serves all ranks."""
    board, found = Board(), [None] * PROCESSES
    joins = options.get("transport") == "gloo"  # within a third of the time
    options = {"bucket_bytes": 512, "timeout_s": 30.0 if joins else 10.0, "transport": "tcp", **options}
    senders, token = [], None
    for process in range(PROCESSES):
        devices = [f"fake:{number}" for number in range(len(ranks))] if process == 0 else []
        senders.append(WeightSender(devices, senders=Together(board, process, change), token=token, **options))
        token = senders[0].token

    def send(process):
        try:
            found[process] = senders[process].send(sources[process])
        except RLMemoryError as error:
            found[process] = error

    threads = [
        threading.Thread(target=send, args=(one,), daemon=True, name=f"sender {one}") for one in range(PROCESSES)
    ]
    receiving = [Receiving(rank, senders[0], timeout_s=max(10.0, options["timeout_s"])) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
        assert not thread.is_alive()
    return found, [one.join() for one in receiving]


def engine():
    return [Rank(ToyModel(number, 2), number) for number in range(2)]


def assert_right(ranks, seed):
    for number, rank in enumerate(ranks):
        rank.model.assert_unchanged(loaded(checkpoint(seed), number, 2))
        assert rank.manager.content is Content.VALID


def held(seed, dimension=0):
    return [Held(checkpoint(seed), process, dimension) for process in range(PROCESSES)]


def repaired(ranks):
    """The update after a failure."""
    found, _ = update(ranks, held(9))
    assert not any(isinstance(one, RLMemoryError) for one in found)
    assert_right(ranks, 9)


@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize(
    "options",
    [{}, {"tls": True}, {"bucket_bytes": 40, "slots": 3}, {"transport": "gloo"}],
    ids=str,
)
def test_parts_of_three_processes_make_up_the_weights(options, dimension):
    ranks = engine()
    for seed in (1, 2):
        found, receiving = update(ranks, held(seed, dimension), **options)
        assert [thread.error for thread in receiving] == [None, None]
        assert_right(ranks, seed)
        sent = sum(report["sent_from_shards"] for report in found)
        received = sum(thread.report["bytes"] for thread in receiving)
        whole = 2 * sum(t.nbytes for t in checkpoint(seed).values() if t.dim() <= dimension)
        assert sent + whole == received and all(report["sent_from_shards"] for report in found)
        assert [len(report["receivers"]) for report in found] == [2, 0, 0]


def test_parts_that_are_negated_without_a_copy_are_sent_as_they_read():
    class Negated(Held):
        def held(self, name):
            return torch._neg_view(-super().held(name))

    ranks = engine()
    found, _ = update(ranks, [Negated(checkpoint(4), process) for process in range(PROCESSES)])
    assert all(report["sent_from_shards"] for report in found)
    assert_right(ranks, 4)


def test_a_process_that_holds_nothing_sends_nothing():
    ranks, sources = engine(), held(3)
    for source in sources:
        source.by_name = {
            name: layout
            and Layout(
                (0, 2),
                (layout.boxes[0], ((layout.boxes[1][0][0], len(tensor) - layout.boxes[1][0][0]), *layout.boxes[1][1:])),
            )
            for (name, layout), tensor in zip(source.by_name.items(), source.whole.values(), strict=True)
        }
    found, _ = update(ranks, sources)
    assert_right(ranks, 3)
    assert found[1]["sent_from_shards"] == 0 < found[2]["sent_from_shards"]


# -- what is refused: the former weights stay, all senders get a typed error, and the next update is right ------------


def refused(ranks, found, receiving, match, kind=WeightUpdateError):
    errors = [thread.error for thread in receiving]
    assert all(isinstance(error, RLMemoryError) for error in [*errors, found[0]])
    assert any(isinstance(error, kind) and match in str(error) for error in errors), errors
    assert_right(ranks, 1)
    repaired(ranks)


@pytest.fixture
def ranks():
    found = engine()
    update(found, held(1))
    return found


def test_bytes_that_do_not_fit_their_checksum_are_not_loaded(ranks, monkeypatch):
    real = parts.checksum_of
    monkeypatch.setattr(parts, "checksum_of", lambda data, pieces: real(data, pieces) ^ 1)
    found, receiving = update(ranks, held(2))
    monkeypatch.undo()
    assert {thread.error.details.get("reason") for thread in receiving} & {"checksum"}
    refused(ranks, found, receiving, "checksum")


def test_a_process_with_another_layout_is_refused(ranks):
    def change(process, division):
        if process != 1:
            return division
        swapped = [Layout((0, 2, 1), one.boxes) for one in division.layouts.different]
        return division._replace(layouts=Layouts(swapped, division.layouts.of))

    sources = held(2)
    for name, layout in sources[1].by_name.items():
        sources[1].by_name[name] = layout and Layout((0, 2, 1), layout.boxes)
    sources[1].layouts = held(2)[1].layouts
    refused(
        ranks, *update(ranks, sources, change), "of the trainer sent"
    )  # other parts, or equally long ones of elsewhere


def test_a_layout_that_is_no_partition_is_refused(ranks):
    def change(process, division):
        holey = [Layout(one.holders[:2], one.boxes[:2]) for one in division.layouts.different]
        return division._replace(layouts=Layouts(holey, division.layouts.of))

    found, receiving = update(ranks, held(2), change)
    refused(ranks, found, receiving, "disjoint parts")


def test_bytes_that_no_process_sends_are_missed(ranks):
    def change(process, division):
        if process == 1:  # it believes that another one has its part, and awaits no rank
            others = [Layout((0, 7, 2), one.boxes) for one in division.layouts.different]
            division = division._replace(layouts=Layouts(others, division.layouts.of))
        return division._replace(places=[[], [], division.places[2]])

    found, receiving = update(ranks, held(2), change)
    refused(ranks, found, receiving, "named no process")


def test_a_process_to_which_no_rank_connects_is_missed_before_the_first_bucket(ranks):
    def change(process, division):
        return division._replace(places=[[], [], division.places[2]])

    found, receiving = update(ranks, in_stages(held(2), (5, 10)), change, timeout_s=3.0)
    refused(ranks, found, receiving, "did not connect")


def test_a_rank_connects_to_no_host_that_is_not_allowed(ranks):
    def change(process, division):
        return division._replace(places=[[], ["tcp://192.0.2.77:1"], division.places[2]])

    found, receiving = update(ranks, held(2), change, timeout_s=3.0)
    refused(ranks, found, receiving, "update_hosts", PermissionDeniedError)


@pytest.mark.parametrize("what", ["shape", "dtype"])
def test_a_source_that_holds_something_else_is_refused(ranks, what):
    sources = held(2)
    real = sources[1].held
    sources[1].held = lambda name: real(name)[:, :1] if what == "shape" else real(name).double()
    found, receiving = update(ranks, sources)
    assert "should hold" in str(found[1])
    refused(ranks, found, receiving, "should hold")


@pytest.mark.parametrize("number", [-1, 7, 0])
def test_a_stranger_with_the_token_takes_no_ranks_place(ranks, number, monkeypatch):
    """Not even under the number of a rank that has connected."""
    answers = []
    real = parts.Parts._link

    def link(self, waiting):
        if self._division.process == 1:
            [place] = self._division.places[1][:1]
            connection = wire.Connection(dial([place], None, 5.0), "the trainer")
            hello = wire.Hello(wire.PROTOCOL, "fake:0", self._listener.token, 0, number=number)
            connection.send(hello, 5.0)
            self._listener.expect([5])
            self._listener.timeout_s = 4.0
            with pytest.raises(WeightUpdateError, match="did not connect"):
                self._listener.connect()
            with pytest.raises(RLMemoryError) as error:
                connection.receive(wire.Link, timeout_s=5.0)
            answers.append(str(error.value))
            self._listener.timeout_s = 10.0
        return real(self, waiting)

    monkeypatch.setattr(parts.Parts, "_link", link)
    update(ranks, held(4))
    assert_right(ranks, 4)
    assert f"no rank with the number {number} is expected" in answers[0]


def test_a_rank_is_divided_only_where_it_was_offered_slices(ranks, tmp_path):
    """Over shared memory a `Divide` is an error."""
    with WeightSender(1, timeout_s=5.0, directory=tmp_path) as sender:
        receiving = Receiving(ranks[0], sender)
        source = Held(checkpoint(2), 0)
        stream = sender._stream

        def divide(*arguments):
            [rank] = sender._listener.ranks
            rank.connection.send(wire.Divide(Layouts([], [-1] * 13), 0, 0, 1, [[]], 512), 5.0)
            return stream(*arguments)

        sender._stream = divide
        with pytest.raises(WeightUpdateError, match="cannot divide"):
            sender.send(source)
        assert "cannot divide" in str(receiving.join().error)
    assert_right(ranks, 1)


def test_a_part_is_whole_elements_of_its_own_process(ranks):
    """Tensors of all dtypes of the toy, each in thirds."""
    sources = held(5)
    assert {tensor.dtype for tensor in sources[0].whole.values()} == {torch.bfloat16, torch.float32}
    update(ranks, sources)
    assert_right(ranks, 5)


def test_a_rank_that_fails_in_the_middle_ends_the_update_at_all_processes():
    ranks = [Rank(ToyModel(number, 2), number, check_finite=number == 1) for number in range(2)]
    sources = held(2)
    for source in sources:
        source.whole["packed.weight"][3, 0] = torch.nan
    found, receiving = update(ranks, sources)
    assert [str(error).startswith("packed.weight contains a NaN") for error in found] == [True] * PROCESSES
    assert {rank.manager.content for rank in ranks} == {Content.FAILED}
    assert receiving[1].error.details["reason"] == "not finite"
    repaired(ranks)


def test_communicators_are_kept_for_the_next_update_and_closed_after_a_failure():
    ranks, names = engine(), []
    for seed in (1, 2):
        update(ranks, held(seed), transport="gloo", timeout_s=20.0)
        names.append([set(rank.receiver._communicators.names()) for rank in ranks])
    assert [len(one) for one in names[0]] == [PROCESSES, PROCESSES] and names[0] == names[1]
    sources = held(3)
    sources[1].held = lambda name: torch.zeros(1)
    update(ranks, sources, transport="gloo")
    assert [rank.receiver._communicators.names() for rank in ranks] == [[], []]
    repaired(ranks)


# -- the pace of the processes, and the order in which they begin and end ----------------------------------------------


def in_stages(sources, bounds):
    """Each process holds some of the tensors whole, as stages of a pipeline do: up to the bounds, in their order."""
    for source in sources:
        for number, (name, tensor) in enumerate(source.whole.items()):
            holder = sum(number >= bound for bound in bounds)
            whole = tuple((0, extent) for extent in tensor.shape)
            source.by_name[name] = Layout((holder,), (whole,)) if tensor.dim() else None
    return sources


@pytest.mark.parametrize("bounds", [(0, 11), (0, 2), (5, 6)], ids=["last", "first", "middle"])
def test_a_process_that_sends_little_keeps_pace_with_the_ranks(ranks, monkeypatch, bounds):
    """Its waits then end with the next bucket, and not with the whole transfer."""
    received, ahead = {}, []
    real_pack, real_load = parts.Parts._pack, session.Session._load

    def pack(self, number, slot, *arguments):
        begun = min(received.get(one, 0) for one in range(2))
        if begun < number - self._manifest.slots:
            ahead.append((self._division.process, number, begun))
        return real_pack(self, number, slot, *arguments)

    def load(self, *arguments):
        received[self.manager.rank] = received.get(self.manager.rank, 0) + 1
        time.sleep(0.02)
        yield from real_load(self, *arguments)

    monkeypatch.setattr(parts.Parts, "_pack", pack)
    monkeypatch.setattr(session.Session, "_load", load)
    found, receiving = update(ranks, in_stages(held(2), bounds), bucket_bytes=64)
    assert not any(isinstance(one, RLMemoryError) for one in found)
    assert [thread.error for thread in receiving] == [None, None]
    assert received[0] > 10 and not ahead
    assert_right(ranks, 2)


def test_a_link_that_cannot_be_made_leaves_all_ranks_their_weights(ranks, monkeypatch):
    """Although the process that it is missing would be the last to send."""
    real = Assembly.connect

    def connect(self, dial, hello, attach, timeout_s):
        def refusing(description, connection):
            if hello.rank == 1 and "process 2" in connection.peer:
                raise UnsupportedError("no memory for the slot")
            return attach(description, connection)

        return real(self, dial, hello, refusing, timeout_s)

    monkeypatch.setattr(Assembly, "connect", connect)
    found, receiving = update(ranks, in_stages(held(2), (5, 10)), bucket_bytes=64)
    monkeypatch.undo()
    assert all(isinstance(one, RLMemoryError) for one in found)
    refused(ranks, found, receiving, "no memory for the slot", UnsupportedError)


def test_a_process_that_has_no_buffer_leaves_all_ranks_their_weights(ranks, monkeypatch):
    real = routes.Routes.part_buffer

    def buffer(self, *arguments):
        if threading.current_thread().name == "sender 2":
            raise HostMemoryError("no memory here")
        return real(self, *arguments)

    monkeypatch.setattr(routes.Routes, "part_buffer", buffer)
    found, receiving = update(ranks, in_stages(held(2), (5, 10)), bucket_bytes=64)
    monkeypatch.undo()
    assert ["no memory here" in str(one) for one in found] == [True] * PROCESSES
    refused(ranks, found, receiving, "no memory here", HostMemoryError)


def test_a_rank_makes_its_links_at_the_same_time(ranks, monkeypatch):
    real = Assembly.connect

    def connect(self, dial, hello, attach, timeout_s):
        both = threading.Barrier(2, timeout=10)

        def attached(description, connection):
            both.wait()
            return attach(description, connection)

        return real(self, dial, hello, attached, timeout_s)

    monkeypatch.setattr(Assembly, "connect", connect)
    update(ranks, held(2))
    assert_right(ranks, 2)


def test_links_over_nccl_are_tried_only_where_both_ends_have_the_same():
    def refuse(rank):
        raise UnsupportedError("NCCL's version is 1 in the engine, and 2 in the trainer")

    made = parts.Parts.__new__(parts.Parts)
    made._routes, made._timeout_s = SimpleNamespace(require_nccl=refuse), 1.0
    group = SimpleNamespace(is_first=False, buffer=SimpleNamespace(export=lambda: ({}, [])))
    with pytest.raises(UnsupportedError, match="NCCL's version"):
        made._link([(SimpleNamespace(), "nccl", group)])


def test_an_error_of_a_process_between_two_ranks_reaches_both(ranks, monkeypatch):
    """It is not taken for the bytes that a message has announced."""
    real, sends = links._stream, itertools.count(1)

    def send(bucket, *arguments):
        if bucket.rank.number < 0 and next(sends) == 3:  # of the process that serves the ranks
            raise RLMemoryError("the source is broken")
        real(bucket, *arguments)

    monkeypatch.setattr(links, "_stream", send)
    found, receiving = update(ranks, held(2), bucket_bytes=256)
    assert "the source is broken" in str(found[0])
    assert ["the source is broken" in str(thread.error) for thread in receiving] == [True, True]


def test_an_error_between_a_message_and_its_bytes_is_not_taken_for_them(ranks, monkeypatch):
    real, sends = wire.Connection.send_bytes, itertools.count(1)

    def send(connection, data, timeout_s):
        if next(sends) == 7:
            raise RLMemoryError("the source is broken")
        real(connection, data, timeout_s)

    monkeypatch.setattr(wire.Connection, "send_bytes", send)
    found, receiving = update(ranks, held(2), bucket_bytes=256)
    assert "the source is broken" in [str(one) for one in found]
    assert all(thread.error.details.get("reason") != "checksum" for thread in receiving)


def test_a_trainer_over_tcp_names_no_socket_of_the_engines_host(ranks, tmp_path):
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as service:
        service.bind(path)
        service.listen()
        service.setblocking(False)

        def change(process, division):
            return division._replace(places=[[], [path], division.places[2]])

        found, receiving = update(ranks, held(2), change)
        with pytest.raises(BlockingIOError):
            service.accept()
    refused(ranks, found, receiving, "only a trainer on this host may name")


class FakeEnd:
    """The communicator and the GPU of a buffer. Freeing waits for all transfers of the GPU."""

    def __init__(self, log, name):
        self._log = log
        self.name = name

    def drop(self, communicator):
        self._log.append("ended")

    def synchronize(self):
        self._log.append("waited")

    def free(self, address): ...


def test_all_communicators_end_before_the_gpu_is_waited_for():
    log, made = [], Assembly.__new__(Assembly)

    def slot(name):
        found = ReceivedSlot(4, None)
        found._gpu = FakeEnd(log, name)
        return found

    made._sources, made._slot = [], slot("slot")
    for number in range(PROCESSES):
        buffer = CommunicatedAttached.__new__(CommunicatedAttached)
        buffer._communicator = buffer._kept = FakeEnd(log, number)
        buffer._slots = [slot(number)]
        made._sources.append(assembly._Source(number, None, buffer))
    made.close()
    assert log[:PROCESSES] == ["ended"] * PROCESSES and log.count("waited") == PROCESSES + 1


def test_the_trainer_hears_of_an_error_before_the_rank_closes_its_buffers(monkeypatch):
    ranks = [Rank(ToyModel(number, 2), number, check_finite=True) for number in range(2)]
    events = {}

    def noting(owner, name, event):
        real = getattr(owner, name)

        def noted(self, *arguments):
            events.setdefault(threading.current_thread(), []).append(event)
            return real(self, *arguments)

        monkeypatch.setattr(owner, name, noted)

    noting(Assembly, "close", "closed")
    noting(wire.Connection, "fail", "told")
    sources = held(2)
    for source in sources:
        source.whole["packed.weight"][3, 0] = torch.nan
    _, receiving = update(ranks, sources)
    assert [events[thread] for thread in receiving] == [["told"] * PROCESSES + ["closed"]] * 2
