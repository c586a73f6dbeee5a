"""What is read of sleeping tensors, also after their memory has ended."""

import copy
import gc
import mmap
import threading
import weakref

import pytest
import torch
from models import Tied, same, whole
from test_pausable import PAGE, WIDTH, adamw, tensors_in, train
from torch import nn

from rl_memory_plugins.errors import StateConflictError, UnsupportedError
from rl_memory_plugins.trainer import Offloader, PausableMemory, RolloutHandoff
from rl_memory_plugins.trainer.offloading import host_view, temporarily_loaded
from rl_memory_plugins.trainer.sleeping_content import SleepingContent, forget_ended, remnants


def held_bytes(arena):
    for thread in [thread for thread in threading.enumerate() if thread.name == "rl-memory-close"]:
        thread.join()
    return arena.held_bytes


def test_sleeping_tensors_are_read_in_host_memory():
    model = Tied(width=WIDTH)
    expected = whole(model)
    memory = PausableMemory(model)
    assert host_view(model.blocks[0].up.weight.detach()) is not None
    memory.sleep()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert torch.equal(host_view(tensor.detach()), expected[name]), name
    assert torch.equal(host_view(model.blocks[0].up.weight.detach().t()), expected["blocks.0.up.weight"].t())
    with (
        pytest.raises(UnsupportedError, match="asleep in a PausableMemory"),
        temporarily_loaded(model.blocks[0].up.weight),
    ):
        pass
    memory.wake()
    weight = model.blocks[0].up.weight.detach()
    assert host_view(weight) is weight
    with temporarily_loaded(weight):
        pass


def test_the_copy_of_a_tensor_that_has_ended_is_not_that_of_the_next_at_its_address():
    pages = mmap.mmap(-1, 8 * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    model = nn.Module()
    model.former = nn.Parameter(torch.frombuffer(pages, dtype=torch.float32), requires_grad=False)
    memory, address, other = PausableMemory(model), model.former.data_ptr(), torch.frombuffer(pages, dtype=torch.uint8)
    other.fill_(1)
    memory.sleep()
    assert not other.any() and (host_view(other) == 1).all()
    model.former, other = None, None
    for following in (torch.frombuffer(pages, dtype=torch.uint8), torch.frombuffer(pages, dtype=torch.float32)[9:12]):
        following.fill_(2)
        assert address <= following.data_ptr() < address + 8 * PAGE
        assert host_view(following) is following
    memory.close()


# -- the end of a memory ------------------------------------------------------------------------------------------


def test_tensors_that_sleep_are_read_after_the_end_of_their_memory():
    model = Tied(width=WIDTH)
    expected = whole(model)
    memory = PausableMemory(model)
    memory.sleep()
    gone, arena = weakref.ref(memory), memory._manager.arena
    del memory
    gc.collect()
    assert gone() is None and held_bytes(arena) > 0
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert torch.equal(host_view(tensor.detach()), expected[name]), name
    with pytest.raises(StateConflictError, match="belongs to another PausableMemory"):
        PausableMemory(model)
    with pytest.raises(StateConflictError, match="belongs to a PausableMemory"):
        Offloader(model, moves=lambda tensor: True).offload()
    del model, tensor
    PausableMemory()
    assert held_bytes(arena) == 0


def test_a_memory_that_has_ended_awake_leaves_nothing_behind():
    model = Tied(width=WIDTH)
    memory = PausableMemory(model)
    memory.sleep()
    memory.wake()
    arena, before = memory._manager.arena, len(remnants)
    del memory
    gc.collect()
    assert len(remnants) == before and held_bytes(arena) == 0
    PausableMemory(model).sleep()


def test_a_report_that_is_kept_keeps_no_memory():
    model = Tied(width=WIDTH)
    memory = PausableMemory(model)
    handoff = RolloutHandoff([], {}, others=[memory.part("parameters")])
    with handoff.training() as report:
        pass
    gone = weakref.ref(memory), weakref.ref(model)
    del memory, model, handoff
    gc.collect()
    assert [one() for one in gone] == [None, None]
    assert report.record().steps


@pytest.mark.parametrize("kept", [(), ("others",), ("model",), ("optimizer",)], ids=str)
def test_what_is_dropped_asleep_ends(kept):
    """In each order: also the optimiser, which keeps its memory, ends with it."""
    objects = {"model": Tied(width=WIDTH)}
    objects["optimizer"] = adamw(objects["model"])
    train(objects["model"], objects["optimizer"])
    objects["others"] = [torch.ones(WIDTH * WIDTH)]
    memory = PausableMemory(objects["model"], objects["optimizer"])
    memory.adopt(objects["others"], tag="others")
    memory.sleep()
    gone, arena = weakref.ref(memory), memory._manager.arena
    del memory
    kept = {name: objects[name] for name in kept}
    objects.clear()
    gc.collect()
    PausableMemory()
    assert (held_bytes(arena) > 0) == bool(kept)
    kept.clear()
    gc.collect()
    PausableMemory()
    assert gone() is None and held_bytes(arena) == 0


def test_an_optimiser_keeps_its_memory_while_it_sleeps():
    model = Tied(width=WIDTH)
    optimizer = adamw(model)
    train(model, optimizer)
    expected = whole(model)
    memory = PausableMemory(model, optimizer)
    memory.sleep()
    gone = weakref.ref(memory)
    del memory
    gc.collect()
    with pytest.raises(StateConflictError, match="the state of the optimiser is asleep"):
        optimizer.state_dict()
    assert type(copy.deepcopy(optimizer)) is type(optimizer)
    gone().wake()
    same(whole(model), expected)
    gc.collect()
    assert gone() is None
    train(model, optimizer)


@pytest.mark.parametrize("prepared", ["sleep", "begun sleep", "wake"])
def test_what_a_memory_had_prepared_ends_with_it(monkeypatch, prepared):
    model = Tied(width=WIDTH)
    memory = PausableMemory(model)
    manager, waited = memory._manager, []
    if prepared == "wake":
        memory.sleep()
        memory.prepare_wake()
    else:
        memory.prepare_sleep()
    if prepared == "begun sleep":
        monkeypatch.setattr(manager.device, "begin_copy_to_host", lambda pairs: lambda: waited.append(pairs))
        memory.begin()
    del memory
    gc.collect()
    PausableMemory()
    assert manager._prepared_wake is None and manager._prepared_sleep is None
    assert bool(held_bytes(manager.arena)) == (prepared == "wake")  # whose copy is the only one
    assert bool(waited) == (prepared == "begun sleep")


def test_state_that_comes_late_is_awaited_after_the_end_of_its_memory():
    model = Tied(width=WIDTH)
    optimizer = adamw(model)
    train(model, optimizer)
    memory = PausableMemory(model, optimizer)
    state = max(tensors_in(optimizer), key=torch.numel)
    expected = state.clone()
    memory.sleep()
    manager = memory._manager
    memory.wake(wait=False)
    assert manager.unfinished == ["optimizer"]
    del memory, optimizer
    gc.collect()
    assert torch.equal(host_view(state), expected) and manager.unfinished == []


def test_a_remnant_that_cannot_be_looked_at_is_no_error_of_others(monkeypatch):
    model, others = Tied(width=WIDTH), Tied(width=WIDTH)
    memory = PausableMemory(model)
    memory.sleep()
    del memory

    def broken(content):
        raise RuntimeError("an uncorrectable error")

    with monkeypatch.context() as patch:
        patch.setattr(SleepingContent, "is_used", broken)
        memory = PausableMemory(others)
        memory.sleep()
    memory.close()
    del model
    forget_ended()
    assert not remnants


def test_a_collection_while_remnants_are_looked_at_may_add_one(monkeypatch):
    first, second = Tied(width=WIDTH), Tied(width=WIDTH)
    memories = [PausableMemory(first), PausableMemory(second)]
    for memory in memories:
        memory.sleep()
    del memory, memories[0]
    is_used, before = SleepingContent.is_used, len(remnants)

    def collected(content):
        memories.clear()  # as a collection may
        return is_used(content)

    monkeypatch.setattr(SleepingContent, "is_used", collected)
    forget_ended()
    assert len(remnants) == before + 1
    del first, second
    forget_ended()
    assert len(remnants) == before - 1
