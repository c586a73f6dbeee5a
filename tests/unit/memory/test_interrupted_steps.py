"""Interrupts that come while the system or the driver works: what the allocators note is what has happened."""

import itertools
import threading
from collections import defaultdict
from contextlib import contextmanager, suppress

import pytest
import torch

from rl_memory_plugins.errors import EngineFaultError
from rl_memory_plugins.memory import adoption, host
from rl_memory_plugins.memory.allocator import Block
from rl_memory_plugins.memory.cuda_driver import Driver
from rl_memory_plugins.memory.cuda_vmm import CudaVmmAllocator, _Mapping
from rl_memory_plugins.memory.interrupts import TRIES, to_its_end
from rl_memory_plugins.memory.torch_saver import SaverReservation, TorchSaverAllocator
from rl_memory_plugins.trainer import PausableMemory


class Interrupts:
    """Raises `KeyboardInterrupt` at the end of chosen calls, as CPython does when a C function returns."""

    def __init__(self, *at):
        self.at = list(at)
        self.calls = itertools.count()

    def __call__(self):
        if next(self.calls) in self.at:
            raise KeyboardInterrupt

    def behind(self, call):
        """The call, which can be interrupted at its end."""

        def run(*arguments):
            result = call(*arguments)
            self()
            return result

        return run


# -- a step to its end --------------------------------------------------------------------------------------


def test_a_step_runs_to_its_end_and_the_interrupt_follows():
    ended = []
    interrupt = Interrupts(0, 1)

    def step():
        interrupt()
        ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        to_its_end(step)
    assert ended == [True]
    to_its_end(step)
    assert ended == [True, True]


def test_an_error_of_a_step_is_raised_at_once():
    calls = []

    def step():
        calls.append(1)
        raise ValueError("the step")

    with pytest.raises(ValueError, match="the step"):
        to_its_end(step)
    assert len(calls) == 1


def test_whoever_interrupts_again_and_again_gets_through():
    calls = []

    def step():
        calls.append(1)
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        to_its_end(step)
    assert len(calls) == TRIES


# -- host memory --------------------------------------------------------------------------------------------


def with_tensors(count=6):
    memory = PausableMemory()
    tensors = [torch.full((1 << 14,), float(number)) for number in range(count)]
    memory.adopt(tensors, tag="mine")
    return memory, tensors, [tensor.clone() for tensor in tensors]


@pytest.mark.parametrize("more", [(), (1,), (0, 1), (0, 2, 4)], ids=str)
def test_an_interrupt_while_pages_go_loses_no_content(monkeypatch, more):
    """`more`: further interrupts, counted from the first, while the first one is undone."""
    madvise = host._madvise
    for at in itertools.count():
        memory, tensors, expected = with_tensors()
        interrupts = Interrupts(at, *(at + 1 + one for one in more))
        with monkeypatch.context() as patch:
            patch.setattr(host, "_madvise", interrupts.behind(madvise))
            try:
                memory.sleep()
            except KeyboardInterrupt:
                was = True
            else:
                was = False
        if str(memory.status()["mine"].state) == "resident":
            assert all(map(torch.equal, tensors, expected)), at
        memory.wake()
        assert all(map(torch.equal, tensors, expected)), at
        memory.sleep()
        memory.wake()
        assert all(map(torch.equal, tensors, expected)), at
        memory.close()
        if not was:
            break
    assert at == len(tensors)


def test_an_interrupt_while_pages_come_loses_no_content(monkeypatch):
    madvise = host._madvise
    for at in itertools.count():
        memory, tensors, expected = with_tensors(3)
        memory.sleep()
        was = False
        with monkeypatch.context() as patch:
            patch.setattr(host, "_madvise", Interrupts(at, at + 1).behind(madvise))
            try:
                memory.wake()
            except KeyboardInterrupt:
                was = True
        memory.wake()
        assert all(map(torch.equal, tensors, expected)), at
        memory.close()
        if not was:
            break
    assert at > 0


def test_interrupted_aborts_leave_no_copy(monkeypatch):
    memory, tensors, expected = with_tensors()
    memory.adopt([torch.ones(1 << 14)], tag="other")  # freed after the interrupt
    memory.sleep()
    memory.wake()
    memory.free_host_memory()
    arena = memory._manager.arena
    assert arena.held_bytes == 0
    memory.prepare_sleep()
    memory.begin()
    with monkeypatch.context() as patch:
        patch.setattr(arena, "release", Interrupts(0).behind(arena.release))
        with pytest.raises(KeyboardInterrupt):
            memory.abort()
    memory.free_host_memory()
    assert arena.held_bytes == 0
    assert all(map(torch.equal, tensors, expected))


# -- the driver ---------------------------------------------------------------------------------------------


class Result:
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_SUCCESS = 0


class Api:
    """The calls of the driver that map memory, over a table of mappings. Each call can be interrupted at its end."""

    CUresult = Result

    def __init__(self):
        self.mapped, self.handles, self.numbers = {}, {}, itertools.count(1)
        self.interrupt = Interrupts()

    def cuMemCreate(self, nbytes, properties, flags):
        handle = next(self.numbers)
        self.handles[handle] = 1
        self.interrupt()
        return 0, handle

    def cuMemRelease(self, handle):
        if not self.handles.get(handle):
            raise EngineFaultError("a handle is released twice")
        self.handles[handle] -= 1
        self.interrupt()
        return (0,)

    def cuMemMap(self, address, nbytes, offset, handle, flags):
        assert address not in self.mapped, "mapped twice"
        assert self.handles[handle] > 0
        self.mapped[address] = handle
        self.handles[handle] += 1
        self.interrupt()
        return (0,)

    def cuMemSetAccess(self, address, nbytes, access, count):
        self.interrupt()
        return (0,)

    def cuMemUnmap(self, address, nbytes):
        self.handles[self.mapped.pop(address)] -= 1
        self.interrupt()
        return (0,)

    def cuMemGetAccess(self, location, address):
        return (0 if address in self.mapped else 1, 0)

    @property
    def held(self):
        """How many blocks of memory exist."""
        return sum(bool(count) for count in self.handles.values())


class OwnDriver(Driver):
    def __init__(self, api):
        self._api, self._properties, self._access, self.granularity = api, self, None, 1

    location = None

    @contextmanager
    def context(self):
        yield

    def _check(self, result):
        return result[1] if len(result) > 1 else None

    def free_bytes(self):
        return 1 << 40


BLOCKS = [Block(1000 * number, 100) for number in range(1, 5)]


def vmm():
    allocator = object.__new__(CudaVmmAllocator)
    api = Api()
    allocator.index, allocator._margin_bytes, allocator._lock = 0, 0, threading.Lock()
    allocator._driver = OwnDriver(api)
    allocator._mappings, allocator._idle_pools, allocator._retired_pools = (
        defaultdict(dict),
        defaultdict(list),
        defaultdict(list),
    )
    allocator.forget_freed = lambda tag: set()
    allocator._drop_empty_pools = lambda tag: None
    for block in BLOCKS:
        allocator._driver.map(*block, allocator._driver.create(block.nbytes))
        allocator._mappings["w"][block.address] = _Mapping(block)
    return allocator, api


def addresses(blocks):
    return [block.address for block in blocks]


@pytest.mark.parametrize("more", [(), (1,), (0, 1)], ids=str)
def test_an_interrupt_while_the_driver_unmaps_forgets_no_block(more):
    for at in range(len(BLOCKS)):
        allocator, api = vmm()
        api.interrupt = Interrupts(at)
        with pytest.raises(KeyboardInterrupt):
            allocator.release("w")
        assert addresses(allocator.blocks("w")) == addresses(BLOCKS)
        api.interrupt = Interrupts(*more)
        with suppress(KeyboardInterrupt):
            allocator.reserve("w").commit()
        api.interrupt = Interrupts()
        allocator.reserve("w").commit()
        assert sorted(api.mapped) == addresses(BLOCKS) == addresses(allocator.blocks("w"))
        assert all(mapping.mapped for mapping in allocator._mappings["w"].values())


def test_an_interrupt_while_the_driver_maps_leaves_what_can_be_mapped():
    for at in itertools.count():
        allocator, api = vmm()
        allocator.release("w")
        assert not api.mapped and not api.held
        reservation = allocator.reserve("w")
        api.interrupt = Interrupts(at, at + 1)
        try:
            reservation.commit()
        except KeyboardInterrupt:
            api.interrupt = Interrupts()
            assert not api.mapped and not api.held, at
            allocator.reserve("w").commit()
        else:
            break
        assert sorted(api.mapped) == addresses(BLOCKS), at
        assert api.held == len(BLOCKS)
        allocator.release("w")
        assert not api.mapped and not api.held, at
    assert at == 3 * len(BLOCKS)


def test_an_error_of_the_driver_leaves_nothing_mapped_and_no_memory():
    allocator, api = vmm()
    allocator.release("w")
    reservation = allocator.reserve("w")
    calls, access = itertools.count(), api.cuMemSetAccess

    def fails(*arguments):
        if next(calls) == 2:
            raise EngineFaultError("no access")
        return access(*arguments)

    api.cuMemSetAccess = fails
    with pytest.raises(EngineFaultError, match="no access"):
        reservation.commit()
    assert not api.mapped and not api.held


# -- torch_memory_saver -------------------------------------------------------------------------------------


class Saver:
    def __init__(self):
        self.paused, self.interrupt, self.error = set(), Interrupts(), None

    def pause(self, name):
        if self.error:
            raise self.error
        assert name not in self.paused
        self.paused.add(name)
        self.interrupt()

    def resume(self, name):
        if self.error:
            raise self.error
        self.paused.remove(name)
        self.interrupt()


def saver():
    allocator = object.__new__(TorchSaverAllocator)
    allocator._saver, allocator._margin_bytes, allocator.reserved_bytes = Saver(), 0, 0
    allocator._names, allocator._paused = {"w": ["a", "b"]}, defaultdict(set)
    allocator._blocks_of = lambda names: [Block(1000 * (1 + "ab".index(name)), 10) for name in names if name in "ab"]
    allocator.require_free = lambda nbytes: None
    return allocator


@pytest.mark.parametrize("at", [0, 1])
def test_an_interrupt_while_the_saver_works_is_no_lie(at):
    allocator = saver()
    allocator._saver.interrupt = Interrupts(at)
    with pytest.raises(KeyboardInterrupt):
        allocator.release("w")
    assert allocator._paused["w"] == allocator._saver.paused
    allocator._saver.interrupt = Interrupts()
    allocator.release("w")
    assert allocator._saver.paused == {"a", "b"}
    allocator._saver.interrupt = Interrupts(at)
    with pytest.raises(KeyboardInterrupt):
        SaverReservation(allocator, "w").commit()
    assert allocator._paused["w"] == allocator._saver.paused
    SaverReservation(allocator, "w").commit()
    assert not allocator._saver.paused


def test_an_error_of_the_saver_changes_nothing():
    allocator = saver()
    allocator._saver.error = RuntimeError("cannot")
    with pytest.raises(RuntimeError):
        allocator.release("w")
    assert not allocator._paused["w"]
    allocator._saver.error = None
    allocator.release("w")
    allocator._saver.error = RuntimeError("cannot")
    with pytest.raises(RuntimeError):
        SaverReservation(allocator, "w").commit()
    assert allocator._paused["w"] == {"a", "b"}


# -- adoption -----------------------------------------------------------------------------------------------


class Regions:
    """A region in which storages are made anew."""

    def __init__(self):
        self.device = self

    @contextmanager
    def region(self, tag):
        yield

    def memory_info(self):
        return 0, 0

    def trim(self, min_bytes=0):
        pass

    def synchronize(self):
        pass


def test_an_interrupt_at_the_end_of_an_adoption_loses_no_content(monkeypatch):
    bytes_of = adoption.bytes_of
    for at in itertools.count():
        tensors = [torch.full((1000,), float(number)) for number in range(5)]
        expected = [tensor.clone() for tensor in tensors]
        with monkeypatch.context() as patch:
            patch.setattr(adoption, "bytes_of", Interrupts(at, at + 1).behind(bytes_of))
            try:
                adoption.move_storages(Regions(), "mine", tensors)
            except KeyboardInterrupt:
                assert all(map(torch.equal, tensors, expected)), at
            else:
                break
    assert at > len(tensors)
