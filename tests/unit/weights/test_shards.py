"""That parts from several processes make up what a rank would get of whole tensors, byte for byte."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from rl_memory_plugins.errors import WeightUpdateError
from rl_memory_plugins.trainer.sources import placements
from rl_memory_plugins.weights import shards
from rl_memory_plugins.weights.entries import tensor_of
from rl_memory_plugins.weights.manifest import Manifest, TensorSpec
from rl_memory_plugins.weights.shards import Layout, Layouts, Pieces, place, turn
from rl_memory_plugins.weights.slices import Cut, Slice


def on_mesh(whole, mesh_shape, placed):
    """By rank what DTensors of a tensor have, cut by `torch.chunk`, one dimension of the mesh after the other."""
    ranks = torch.arange(math.prod(mesh_shape)).reshape(mesh_shape)
    found = {}
    for place_ in itertools.product(*map(range, mesh_shape)):
        local = whole
        for number, placement, extent in zip(place_, placed, mesh_shape, strict=True):
            if isinstance(placement, Shard):
                chunks = local.chunk(extent, placement.dim)
                empty = local.narrow(placement.dim, 0, 0)
                local = chunks[number] if number < len(chunks) else empty
        mesh = SimpleNamespace(mesh=ranks)
        found[int(ranks[place_])] = SimpleNamespace(
            placements=placed, device_mesh=mesh, shape=whole.shape, _local_tensor=local
        )
    return found


def layout_of(rank, tensor):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "get_rank", lambda: rank)
        return placements.layout_of(tensor, {})


@st.composite
def cut_tensors(draw):
    """A tensor, its parts by process with their layout (`None` if it is gathered), and the slice that a rank needs."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    dtype = draw(st.sampled_from(["int32", "uint8", "int64"]))
    whole = torch.randint(0, 200, shape).to(getattr(torch, dtype))
    mesh = draw(st.sampled_from([(1, 4), (2, 2), (4, 1), (4,)]))
    placed = tuple(
        draw(st.sampled_from([Replicate(), Replicate(), *(Shard(dim) for dim in range(len(shape)))])) for _ in mesh
    )
    parts = on_mesh(whole, mesh, placed)
    layouts = {layout_of(rank, part) for rank, part in parts.items()}
    assert len(layouts) == 1
    part = None
    if draw(st.booleans()):
        dim = draw(st.integers(0, len(shape) - 1))
        bounds = sorted(draw(st.sets(st.integers(0, shape[dim]), max_size=6)))
        ranges = tuple((low, high - low) for low, high in zip(bounds[::2], bounds[1::2], strict=False))
        part = Slice(dim if ranges else 0, ranges)
    return whole, {rank: one._local_tensor for rank, one in parts.items()}, layouts.pop(), part


@settings(max_examples=300, deadline=None)
@given(st.lists(cut_tensors(), min_size=1, max_size=4), st.integers(1, 300), st.integers(0, 3))
def test_the_pieces_of_all_processes_are_what_a_rank_gets_of_whole_tensors(tensors, bucket_bytes, first):
    specs = [
        TensorSpec(str(number), str(whole.dtype).removeprefix("torch."), tuple(whole.shape))
        for number, (whole, *_) in enumerate(tensors)
    ]
    manifest = Manifest(specs, bucket_bytes)
    slices = [part for *_, part in tensors]
    layouts = Layouts.made_of(layout for _, _, layout, _ in tensors)
    layouts.require(specs)
    cut, pieces = Cut(manifest, slices), Pieces(specs, slices, layouts)
    for bucket in manifest.buckets():
        entries = cut.left_of(bucket)
        rows = {entry.index: entry for entry in bucket}
        slot = torch.full((4096,), 255, dtype=torch.uint8)
        expected = slot.clone()
        missing = sum(entry.nbytes for entry in entries.values())
        for process in range(4):
            end = 0
            for piece in pieces.of_bucket(entries.values(), process, rest=process == first):
                index, entry = piece.entry.index, piece.entry
                whole, parts, layout, _ = tensors[index]
                assert piece.packed.offset >= end and piece.packed.nbytes > 0
                end = piece.packed.offset + piece.packed.nbytes
                target = tensor_of(slot, entry, cut.specs[index])
                if piece.region is None:
                    part = cut.part(rows[index], rows_of(whole, rows[index], specs[index]))
                else:
                    part = pieces.cut_out(piece, layout.box(process), parts[process])
                assert part.nbytes == piece.packed.nbytes
                place(target, piece.region).copy_(part)
                missing -= part.nbytes
        assert missing == 0
        for index, entry in entries.items():
            part = cut.part(rows[index], rows_of(tensors[index][0], rows[index], specs[index]))
            tensor_of(expected, entry, cut.specs[index]).copy_(part)
        assert torch.equal(slot, expected)


def rows_of(whole, entry, spec):
    return whole.narrow(0, entry.start // spec.row_nbytes, entry.nbytes // spec.row_nbytes)


@pytest.mark.parametrize(
    ("mesh", "placed", "holders"),
    [
        ((4,), (Shard(0),), (0, 1, 2, 3)),
        ((2, 2), (Replicate(), Shard(1)), (0, 1)),  # HSDP: the first replica
        ((2, 2), (Shard(0), Shard(1)), (0, 1, 2, 3)),
        ((2, 2), (Shard(0), Shard(0)), None),
        ((4,), (Replicate(),), None),
        ((4,), (Partial(),), None),
        ((2, 2), (Shard(-1), Replicate()), (0, 2)),
    ],
)
def test_who_holds_a_dtensor(mesh, placed, holders):
    whole = torch.arange(35).reshape(7, 5)
    for rank, tensor in on_mesh(whole, mesh, placed).items():
        layout = layout_of(rank, tensor)
        assert holders is None if layout is None else layout.holders == holders


def test_a_part_that_is_not_what_the_placements_say_is_gathered():
    parts = on_mesh(torch.zeros(8, 2), (4,), (Shard(0),))
    parts[1]._local_tensor = torch.zeros(3, 2)
    assert layout_of(1, parts[1]) is None and layout_of(2, parts[2]) is not None


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 3), (0, 4)), ((2, 3), (0, 4))],  # overlap, and the volumes are too large
        [((0, 2), (0, 4)), ((2, 2), (0, 4))],  # a row is missing
        [((0, 3), (0, 4)), ((1, 2), (0, 4))],  # overlap, and the volumes fit
        [((0, 3), (0, 4)), ((3, 3), (0, 4))],
        [((0, 5),), ((0, 0),)],
        [((-1, 3), (0, 4)), ((3, 2), (0, 4))],
    ],
)
def test_a_layout_that_is_no_partition_is_refused(boxes):
    layouts = Layouts([Layout((0, 1), tuple(boxes))], [0])
    with pytest.raises(WeightUpdateError, match="w in disjoint parts"):
        layouts.require([TensorSpec("w", "float32", (5, 4))])


def test_a_layout_of_many_holders_is_checked_without_comparing_each_with_each(monkeypatch):
    spec = TensorSpec("w", "uint8", (200_000, 2))
    boxes = tuple(((0, 200_000) if half else (0, 0), (half, 1)) for half in (0, 1))
    many = tuple(((row, 4), (0, 2)) for row in range(0, 200_000, 4))  # the comparisons would take half an hour
    Layout(tuple(range(len(many))), many).require(spec)
    with pytest.raises(WeightUpdateError, match="disjoint parts"):
        Layout((0, 1), boxes).require(spec)
    pinwheel = (((0, 1), (0, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 2), (0, 1)), ((1, 1), (1, 1)))
    Layout(tuple(range(5)), pinwheel).require(TensorSpec("w", "uint8", (3, 3)))
    monkeypatch.setattr(shards, "MOST_CELLS", 8)
    with pytest.raises(WeightUpdateError, match="disjoint parts"):
        Layout(tuple(range(5)), pinwheel).require(TensorSpec("w", "uint8", (3, 3)))


@pytest.mark.parametrize("of", [[], [1], [-2], [0, 0]])
def test_layouts_of_other_tensors_are_refused(of):
    layouts = Layouts([Layout((0,), (((0, 5),),))], of)
    with pytest.raises(WeightUpdateError, match="do not belong"):
        layouts.require([TensorSpec("w", "float32", (5,))])


@pytest.mark.parametrize(("processes", "ranks"), [(1, 1), (2, 2), (3, 5), (8, 3), (5, 5)])
def test_no_process_and_no_rank_wait_for_each_other(processes, ranks):
    """With sends that end when they are received: each process sends in its order, each rank receives in its own."""
    sends = [sorted(range(ranks), key=lambda rank, one=one: turn(one, rank, ranks)) for one in range(processes)]
    receives = [
        sorted(range(processes), key=lambda one, rank=rank: (turn(one, rank, ranks), one)) for rank in range(ranks)
    ]
    while any(sends):
        ready = [one for one, left in enumerate(sends) if left and receives[left[0]][0] == one]
        assert ready
        for one in ready:
            receives[sends[one].pop(0)].pop(0)
    assert not any(receives)
