"""What a rank names of each tensor, and that both ends cut it alike."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_network_update import offered, update
from toys import Rank, ToyModel, checkpoint, loaded

from rl_memory_plugins.errors import WeightUpdateError
from rl_memory_plugins.weights import wire
from rl_memory_plugins.weights.manifest import ITEMSIZE, Manifest, TensorSpec
from rl_memory_plugins.weights.plan import trace
from rl_memory_plugins.weights.slices import Cut, Slice


def plan_of(load, *shapes):
    """The plan of a loader of tensors `t0`, `t1` and so on, which gets a dict."""
    specs = [TensorSpec(f"t{number}", "float32", shape) for number, shape in enumerate(shapes)]
    return trace(lambda weights: load(dict(weights)), Manifest(specs))


def copied(*views):
    """The slices of tensors of which a loader copies these views."""

    def slices(*shapes):
        plan = plan_of(
            lambda tensors: [torch.zeros(view(tensors).shape).copy_(view(tensors)) for view in views], *shapes
        )
        return plan.slices

    return slices


@pytest.mark.parametrize(
    ("view", "shape", "expected"),
    [
        (lambda t: t[2:4], (8, 6), Slice(0, ((2, 2),))),
        (lambda t: t[:, 3:], (8, 6), Slice(1, ((3, 3),))),
        (lambda t: t[2:4, 3:], (8, 6), Slice(0, ((2, 2),))),  # the smaller of the two
        (lambda t: t[1], (8, 6), Slice(0, ((1, 1),))),
        (lambda t: t[:, 5], (8, 6), Slice(1, ((5, 1),))),
        (lambda t: t, (8, 6), None),
        (lambda t: t.t(), (8, 6), None),
        (lambda t: t.t()[2:4], (8, 6), Slice(1, ((2, 2),))),
        (lambda t: t.view(2, 4, 6)[1], (8, 6), Slice(0, ((4, 4),))),
        (lambda t: t.view(2, 4, 6)[:, 1], (8, 6), Slice(0, ((1, 5),))),  # also what lies between the two rows
        (lambda t: t.view(-1)[13:17], (8, 6), Slice(0, ((2, 1),))),
        (lambda t: t[:, 2:6], (3, 8, 5), Slice(1, ((2, 4),))),
        (lambda t: t[1, 2:6], (3, 8, 5), Slice(0, ((1, 1),))),
        (lambda t: t.permute(2, 0, 1)[:, :, 2:6], (3, 8, 5), Slice(1, ((2, 4),))),
        (lambda t: t[3:], (7,), Slice(0, ((3, 4),))),
        (lambda t: t, (), None),
        (lambda t: t[:, :1].expand(8, 4), (8, 6), Slice(1, ((0, 1),))),
    ],
)
def test_the_slice_of_a_view(view, shape, expected):
    assert copied(lambda tensors: view(tensors["t0"]))(shape) == [expected]


def test_ranges_that_several_copies_read_travel_and_what_is_between_does_not():
    slices = copied(lambda t: t["t0"][:2], lambda t: t["t0"][4:5], lambda t: t["t0"][5:6])((8, 6))
    assert slices == [Slice(0, ((0, 2), (4, 2)))]


def test_what_no_copy_reads_does_not_travel_and_what_the_loader_computes_with_travels_whole():
    memory = torch.zeros(4, 6)

    def load(tensors):
        memory.copy_(tensors["t0"][:4] * 2)

    plan = plan_of(load, (8, 6), (8, 6))
    assert plan.opaque.keys() == {"t0"}
    assert plan.slices == [None, Slice(0, ())]


@st.composite
def views(draw):
    """A shape, and functions that give views of a tensor of this shape, of which a loader copies the elements."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))

    def view():
        steps = []
        sizes = list(shape)
        for _ in range(draw(st.integers(0, 4))):
            dimension = draw(st.integers(0, len(sizes) - 1))
            kind = draw(st.sampled_from(["narrow", "narrow", "swap", "flatten", "split"]))
            if kind == "narrow":
                first = draw(st.integers(0, sizes[dimension] - 1))
                sizes[dimension] = draw(st.integers(1, sizes[dimension] - first))
                steps.append(lambda t, d=dimension, f=first, n=sizes[dimension]: t.narrow(d, f, n))
            elif kind == "swap":
                other = draw(st.integers(0, len(sizes) - 1))
                sizes[dimension], sizes[other] = sizes[other], sizes[dimension]
                steps.append(lambda t, d=dimension, o=other: t.transpose(d, o))
            elif kind == "flatten":
                sizes = [math.prod(sizes)]
                steps.append(lambda t: t.flatten())
            elif sizes[dimension] % 2 == 0:
                sizes[dimension : dimension + 1] = [2, sizes[dimension] // 2]
                steps.append(lambda t, d=dimension: t.unflatten(d, (2, -1)))

        def apply(tensor):
            for step in steps:
                tensor = step(tensor)
            return tensor

        return apply

    return shape, [view() for _ in range(draw(st.integers(1, 3)))]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_cut_plan_loads_from_the_slices_what_the_plan_loads_from_whole_tensors(data):
    tensors, loads = {}, []
    for number in range(data.draw(st.integers(1, 3))):
        shape, found = data.draw(views())
        tensors[f"t{number}"] = torch.randint(1, 1 << 30, shape, dtype=torch.int32)
        loads.append(found)
    memory = [
        [torch.zeros(view(tensor).shape, dtype=torch.int32) for view in found]
        for tensor, found in zip(tensors.values(), loads, strict=True)
    ]

    def load(weights):
        for (_, tensor), found, destinations in zip(weights, loads, memory, strict=True):
            for view, destination in zip(found, destinations, strict=True):
                destination.copy_(view(tensor))

    specs = [TensorSpec(name, "int32", tuple(tensor.shape)) for name, tensor in tensors.items()]
    manifest = Manifest(specs, bucket_bytes=data.draw(st.sampled_from([1, 16, 64, 1 << 10])))
    plan = trace(load, manifest)
    cut = Cut(manifest, plan.slices)
    assert cut.specs == list(plan.cut.specs.values())
    received = {spec.name: [] for spec in cut.specs}
    for entries in manifest.buckets():
        left, end = cut.left_of(entries), 0
        for entry in entries:
            spec = manifest.tensors[entry.index]
            rows = tensors[spec.name]
            if entry.nbytes != spec.nbytes:
                rows = rows.narrow(0, entry.start // spec.row_nbytes, entry.nbytes // spec.row_nbytes)
            if entry.index in left:
                own = left[entry.index]
                part = cut.part(entry, rows)
                assert own.nbytes == part.numel() * ITEMSIZE[spec.dtype]
                assert own.start == 4 * sum(one.numel() for one in received[spec.name])
                assert end <= own.offset <= entry.offset
                end = own.offset + own.nbytes
                received[spec.name].append(part.contiguous().flatten())
    for spec in cut.specs:
        if plan.cut.steps.get(spec.name):
            plan.cut.apply(spec.name, torch.cat(received[spec.name]).view(spec.shape))
    for tensor, found, destinations in zip(tensors.values(), loads, memory, strict=True):
        for view, destination in zip(found, destinations, strict=True):
            expected = view(tensor) if f"t{loads.index(found)}" not in plan.opaque else torch.zeros(())
            assert bool((destination == expected).all())


# Updates

TRANSPORTS = ["tcp", "gloo"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_ranks_together_receive_little_more_than_the_tensors(transport):
    tensors = checkpoint(1, opaque=False)
    ranks = [Rank(ToyModel(i, 2, opaque=False), i) for i in range(2)]
    report, threads = update(ranks, tensors, transport=transport)
    for i, (rank, thread) in enumerate(zip(ranks, threads, strict=True)):
        assert thread.error is None
        rank.model.assert_unchanged(loaded(tensors, i, 2, opaque=False))
        assert thread.report["tensors"] == len(tensors)
        halves = sum(tensors[name].nbytes / 2 for name in ("q.weight", "o.weight"))
        everywhere = sum(t.nbytes for name, t in tensors.items() if name.startswith(("experts", "norm", "k.", "v.")))
        rows = (6, 4)[i]  # of 10 rows of the embedding, beside padding
        assert thread.report["bytes"] == halves + everywhere + rows * tensors["embed.weight"].nbytes / 10
    assert report["bytes"] == sum(tensor.nbytes for tensor in tensors.values())


def test_a_rank_that_needs_nothing_of_the_first_buckets_begins_once(monkeypatch):
    rank = Rank(ToyModel(1, 2, opaque=False), 1)
    begun, begin = [], rank.manager.begin_writing
    monkeypatch.setattr(rank.manager, "begin_writing", lambda *arguments: begun.append(begin(*arguments)))
    report, _ = update([rank], checkpoint(opaque=False), transport="tcp", bucket_bytes=1)
    assert report["buckets"] > 20 and len(begun) == 1


def test_a_transport_with_shared_memory_offers_whole_tensors():
    rank = Rank(ToyModel(0, 2, opaque=False))
    _, (thread,) = update([rank], checkpoint(opaque=False))
    assert thread.report["transport"] == "shm"
    assert thread.report["bytes"] == sum(tensor.nbytes for tensor in checkpoint(opaque=False).values())


@pytest.mark.parametrize(
    "slices",
    [
        [],
        [None, None],
        [Slice(2, ((0, 1),))],
        [Slice(-1, ((0, 1),))],
        [Slice(0, ((0, 11),))],
        [Slice(0, ((-1, 2),))],
        [Slice(0, ((4, 2), (0, 2)))],
        [Slice(0, ((0, 2), (2, 2)))],
        [Slice(0, ((0, 0),))],
    ],
)
def test_slices_that_cannot_be_are_refused(slices):
    with pytest.raises(WeightUpdateError, match="the rank named"):
        Cut(Manifest([TensorSpec("a", "float32", (10, 4))]), slices)


def test_a_rank_that_lies_about_its_slices_ends_the_update(monkeypatch):
    send = wire.Connection.send

    def lying(self, message, *arguments):
        if isinstance(message, wire.Accept):
            message = wire.Accept(message.unused, slices=[Slice(5, ((0, 1),))])
        send(self, message, *arguments)

    monkeypatch.setattr(wire.Connection, "send", lying)
    rank = Rank(ToyModel(opaque=False))
    former = rank.model.snapshot()
    outcome, (thread,) = update([rank], checkpoint(opaque=False), transport="tcp")
    assert isinstance(outcome, WeightUpdateError) and isinstance(thread.error, WeightUpdateError)
    rank.model.assert_unchanged(former)


def test_a_trainer_that_asks_for_no_slices_gets_none():
    rank = Rank(ToyModel(0, 2, opaque=False))
    with offered(rank, {"kind": "tcp", "slot_bytes": 4096}) as (connection, thread):
        assert connection.receive(wire.Accept, timeout_s=5).slices == []
    thread.join()
