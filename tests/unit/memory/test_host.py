"""What is particular to the host allocator: how torch creates memory, and whose memory it is."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import threading

import numpy
import pytest
import torch
from torch import nn

from rl_memory_plugins.errors import DeviceMemoryError
from rl_memory_plugins.memory import host
from rl_memory_plugins.memory.host import PAGE, HostAllocator
from rl_memory_plugins.tags import Tag

N = 64 * PAGE


def covered(allocator: HostAllocator, tensor: torch.Tensor, tag: Tag = Tag.WEIGHTS) -> bool:
    storage = tensor.untyped_storage()
    middle = storage.data_ptr() + storage.nbytes() // 2
    return any(block.address <= middle < block.end for block in allocator.blocks(tag))


def on_device_context():
    with torch.device("cpu"):
        return torch.empty(N)


def in_inference_mode():
    with torch.inference_mode():
        return torch.zeros(N)


def legacy_constructor():
    return torch.Tensor(N)


FACTORIES = {
    "empty": lambda: torch.empty(N, device="cpu"),
    "zeros": lambda: torch.zeros(N),
    "randn": lambda: torch.randn(N),
    "arange": lambda: torch.arange(N),
    "strided": lambda: torch.empty_strided((N, 2), (2, 1)),
    "tensor": lambda: torch.tensor([1.0] * N),
    "legacy": legacy_constructor,
    "device context": on_device_context,
    "inference mode": in_inference_mode,
    "parameter": lambda: nn.Parameter(torch.empty(N), requires_grad=False),
    "module": lambda: nn.Linear(512, 512).weight,
    "module to dtype": lambda: nn.Linear(512, 512).to(torch.bfloat16).weight,
    "tuple of outputs": lambda: torch.sort(torch.rand(N))[1],
    "list of outputs": lambda: torch._foreach_add([torch.zeros(N)], 1.0)[0],
    "view of a new tensor": lambda: torch.zeros(N, 2)[:, 1],
    "resized": lambda: torch.empty(0).resize_(N),
    "clone": lambda: torch.zeros(N).clone(),
}


@pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)
def test_region_records_every_way_to_create_a_tensor(factory):
    allocator = HostAllocator()
    with allocator.region(Tag.WEIGHTS):
        tensor = factory()
    assert covered(allocator, tensor)


def test_region_leaves_tensors_of_others_alone():
    allocator = HostAllocator()
    foreign, array = torch.ones(N), numpy.ones(N)
    with allocator.region(Tag.WEIGHTS):
        view, same, written = foreign[1:], foreign.view(-1), foreign.add_(1)
        from_numpy = torch.from_numpy(array)
        from_buffer = torch.frombuffer(bytearray(N), dtype=torch.uint8)
        out = torch.add(foreign, 1, out=foreign)
        meta = torch.empty(N, device="meta")
        sparse = torch.eye(64).to_sparse()
    assert all(not covered(allocator, tensor) for tensor in (view, same, written, from_numpy, from_buffer, out))
    allocator.release(Tag.WEIGHTS)
    assert foreign.eq(3).all() and from_numpy.eq(1).all()
    assert meta.is_meta and sparse.is_sparse


def test_outside_of_a_region_nothing_is_recorded():
    allocator = HostAllocator()
    with allocator.region(Tag.WEIGHTS):
        pass
    assert not covered(allocator, torch.zeros(N))


def test_a_region_is_the_threads_own():
    allocator, made = HostAllocator(), []
    with allocator.region(Tag.WEIGHTS):
        thread = threading.Thread(target=lambda: made.append(torch.zeros(N)))
        thread.start()
        thread.join()
    assert not covered(allocator, made[0])


def test_the_innermost_region_of_two_allocators_has_the_tensor_alone():
    outer, inner = HostAllocator(), HostAllocator()
    with outer.region(Tag.WEIGHTS):
        with inner.region(Tag.KV_CACHE):
            of_inner = torch.zeros(N)
        of_outer = torch.zeros(N)
    assert covered(inner, of_inner, Tag.KV_CACHE) and not covered(outer, of_inner)
    assert covered(outer, of_outer) and not covered(inner, of_outer, Tag.KV_CACHE)


def test_shared_and_file_memory_is_never_released(tmp_path):
    allocator = HostAllocator()
    file = tmp_path / "weights"
    file.write_bytes(b"\7" * N)
    with allocator.region(Tag.WEIGHTS):
        mapped = torch.from_file(str(file), shared=False, size=N, dtype=torch.uint8)
        shared = torch.full((N,), 5, dtype=torch.uint8)
        shared.share_memory_()
    allocator.adopt(Tag.WEIGHTS, [mapped, shared])
    assert not covered(allocator, mapped)
    assert not covered(allocator, shared)
    allocator.release(Tag.WEIGHTS)
    assert mapped.eq(7).all() and shared.eq(5).all()


def test_adopt_takes_tensors_made_elsewhere_and_moves_them_between_tags():
    allocator = HostAllocator()
    array = numpy.ones(N)
    tensor = torch.from_numpy(array)
    allocator.adopt(Tag.WEIGHTS, [tensor, torch.empty(N, device="meta")])
    assert covered(allocator, tensor)
    allocator.adopt(Tag.KV_CACHE, [tensor])
    assert not covered(allocator, tensor)
    assert covered(allocator, tensor, Tag.KV_CACHE)
    assert allocator.release(Tag.KV_CACHE) > 0
    assert array[N // 2] == 0


def test_only_whole_pages_strictly_inside_are_touched():
    allocator = HostAllocator()
    memory = mmap.mmap(-1, 8 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(b"\1" * len(memory))
    inner = torch.frombuffer(memory, dtype=torch.uint8, offset=100, count=6 * PAGE)
    allocator.adopt(Tag.WEIGHTS, [inner])
    assert allocator.release(Tag.WEIGHTS) == 5 * PAGE
    anchor = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    content = ctypes.string_at(anchor, len(memory))
    assert content == b"\1" * PAGE + b"\0" * 5 * PAGE + b"\1" * 2 * PAGE


def test_small_storages_are_left_alone():
    allocator = HostAllocator()
    with allocator.region(Tag.WEIGHTS):
        small = torch.full((2 * PAGE - 1,), 3, dtype=torch.uint8)
    assert allocator.extents(Tag.WEIGHTS) == [(small.data_ptr(), small.nbytes)]
    assert allocator.blocks(Tag.WEIGHTS) == []
    assert allocator.release(Tag.WEIGHTS) == 0
    assert small.eq(3).all()


def test_a_tensor_resized_while_released_has_fresh_memory():
    allocator = HostAllocator()
    with allocator.region(Tag.WEIGHTS):
        tensor = torch.ones(N)
    allocator.release(Tag.WEIGHTS)
    tensor.resize_(16 * N).fill_(2)
    allocator.reserve(Tag.WEIGHTS).commit()
    assert tensor.eq(2).all()
    assert allocator.release(Tag.WEIGHTS) > 15 * 4 * N


def test_dead_tensors_leave_the_registry():
    allocator = HostAllocator()
    for _ in range(3):
        with allocator.region(Tag.WEIGHTS):
            tensor = torch.ones(N)
        del tensor
    gc.collect()
    assert allocator.blocks(Tag.WEIGHTS) == []
    assert allocator._entries == {}


def fail_populating(monkeypatch, code: int, after: int) -> list[int]:
    """Let madvise(MADV_POPULATE_WRITE) fail with `code` after so many successes; returns the advice given."""
    real, given = host._madvise, []

    def madvise(block, advice):
        given.append(advice)
        if advice == host.MADV_POPULATE_WRITE and given.count(advice) > after:
            raise OSError(code, "injected")
        real(block, advice)

    monkeypatch.setattr(host, "_madvise", madvise)
    return given


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EFAULT])
def test_populating_that_fails_half_way_is_undone(monkeypatch, code):
    allocator = HostAllocator()
    with allocator.region(Tag.WEIGHTS):
        tensors = [torch.ones(N), torch.ones(N)]
    allocator.release(Tag.WEIGHTS)
    given = fail_populating(monkeypatch, code, after=1)
    with pytest.raises(DeviceMemoryError):
        allocator.reserve(Tag.WEIGHTS)
    assert given == [host.MADV_POPULATE_WRITE] * 2 + [mmap.MADV_DONTNEED] * 2
    monkeypatch.undo()
    reservation = allocator.reserve(Tag.WEIGHTS)
    assert reservation.nbytes >= 2 * N
    reservation.commit()
    assert all(tensor[N // 2] == 0 for tensor in tensors)


def test_a_kernel_that_cannot_populate_leaves_the_check(monkeypatch):
    allocator = HostAllocator()
    with allocator.region(Tag.WEIGHTS):
        tensor = torch.ones(N)
    allocator.release(Tag.WEIGHTS)
    fail_populating(monkeypatch, errno.EINVAL, after=0)
    allocator.reserve(Tag.WEIGHTS).commit()
    tensor.fill_(4)
    assert allocator.release(Tag.WEIGHTS) > 0


def test_compiled_code_runs_inside_a_region():
    allocator = HostAllocator()
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    with allocator.region(Tag.WEIGHTS):
        result = compiled(torch.zeros(N))
    assert result.eq(1).all()


def test_an_interrupt_while_a_region_opens_leaves_none_open():
    class Interrupted(list):
        def append(self, item):
            super().append(item)
            raise KeyboardInterrupt

    allocator = HostAllocator()
    host._open.regions = Interrupted()
    try:
        with pytest.raises(KeyboardInterrupt), allocator.region(Tag.WEIGHTS):
            pass
    finally:
        host._open.regions = list(host._open.regions)
    with allocator.region(Tag.KV_CACHE):
        tensor = torch.zeros(N)
    assert covered(allocator, tensor, Tag.KV_CACHE)
