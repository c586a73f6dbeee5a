"""A trainer's memory that sleeps, on a GPU: addresses, CUDA graphs, the driver's free memory, scarcity.

`tests/unit/trainer/test_pausable.py` has what needs no GPU.
"""

from __future__ import annotations

import gc
import threading
import time
from contextlib import nullcontext

import pytest
import torch
from processes import gpu_memory_taken
from torch import nn

from rl_memory_plugins.errors import DeviceMemoryError
from rl_memory_plugins.trainer import Offloader, PausableMemory, RolloutHandoff
from rl_memory_plugins.trainer.offloading import host_view
from rl_memory_plugins.trainer.room import AMPLE_BYTES, cached_bytes

pytestmark = pytest.mark.gpu

MiB = 1 << 20
GiB = 1 << 30
WIDTH = 4096  # a layer has 64 MiB


def layers(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8))).cuda()


def adamw(model: nn.Module, **options) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **options)


def train(model, optimizer, steps=1):
    losses = []
    for step in range(steps):
        batch = torch.linspace(-1, 1 + step, 8 * WIDTH, device="cuda").view(8, WIDTH)
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def tensors_in(model, optimizer):
    state = [value for state in optimizer.state.values() for value in state.values()]
    return [tensor for tensor in [*model.parameters(), *state] if isinstance(tensor, torch.Tensor) and tensor.is_cuda]


def free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(0)[0]


@pytest.fixture
def close():
    """Calls the memories' allocators close at the end: a test's GPU memory would stay otherwise."""
    memories = []
    yield memories.append
    for memory in memories:
        memory.close()
        memory._allocator.close()


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
def test_losses_and_addresses_stay(options, close):
    model = layers()
    optimizer = adamw(model, **options)
    memory = PausableMemory(model, optimizer)
    close(memory)
    twin = layers()
    twin_optimizer = adamw(twin, **options)
    assert train(model, optimizer) == train(twin, twin_optimizer)
    kept = tensors_in(model, optimizer)
    assert all(memory.owned()(tensor.data_ptr()) for tensor in kept)
    addresses = [tensor.data_ptr() for tensor in kept]
    for _ in range(3):
        content = [tensor.detach().clone() for tensor in kept]
        memory.sleep()
        memory.wake()
        assert [tensor.data_ptr() for tensor in kept] == addresses
        assert all(torch.equal(*pair) for pair in zip(kept, content, strict=True))
        del content
        assert train(model, optimizer) == train(twin, twin_optimizer)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
def test_losses_stay_where_the_state_comes_during_forward_and_backward(options, close):
    model = layers()
    optimizer = adamw(model, **options)
    memory = PausableMemory(model, optimizer)
    close(memory)
    twin = layers()
    twin_optimizer = adamw(twin, **options)
    assert train(model, optimizer) == train(twin, twin_optimizer)
    for _ in range(5):
        memory.sleep()
        memory.wake(wait=False)
        assert memory._manager.unfinished == ["optimizer"]
        assert train(model, optimizer) == train(twin, twin_optimizer)
        assert memory._manager.unfinished == []
    assert all(
        torch.equal(*pair) for pair in zip(tensors_in(model, optimizer), tensors_in(twin, twin_optimizer), strict=True)
    )


def slow_down(monkeypatch, memory, name):
    """Make the copies of a memory in one direction wait for a second of work on their stream."""
    device = memory._manager.device
    copy = getattr(device, name)

    def begin(pairs):
        with torch.cuda.stream(device._stream):
            torch.cuda._sleep(2_000_000_000)
        return copy(pairs)

    monkeypatch.setattr(device, name, begin)


def test_a_step_waits_for_a_slow_copy(close, monkeypatch):
    model = layers()
    optimizer = adamw(model)
    memory = PausableMemory(model, optimizer)
    close(memory)
    twin = layers()
    twin_optimizer = adamw(twin)
    assert train(model, optimizer, 2) == train(twin, twin_optimizer, 2)
    state = optimizer.state[model[-1].weight]["exp_avg"]
    expected = twin_optimizer.state[twin[-1].weight]["exp_avg"]
    assert torch.equal(state, expected)  # also loads the kernel: CUDA would wait for the slow copy to do so
    memory.sleep()
    memory.wake(["parameters", "gradients"])
    slow_down(monkeypatch, memory, "begin_copy_from_host")
    memory.wake(wait=False)
    assert not torch.equal(state, expected)  # the copy is under way
    assert train(model, optimizer, 2) == train(twin, twin_optimizer, 2)
    assert torch.equal(state, expected)


def test_a_sleep_waits_for_a_slow_copy(close, monkeypatch):
    model = layers()
    optimizer = adamw(model)
    memory = PausableMemory(model, optimizer)
    close(memory)
    train(model, optimizer)
    expected = [tensor.clone().cpu() for tensor in tensors_in(model, optimizer)]
    memory.sleep()
    memory.wake(["parameters", "gradients"])
    slow_down(monkeypatch, memory, "begin_copy_from_host")
    memory.wake(wait=False)
    memory.prepare_sleep()
    assert memory._manager.unfinished == []
    memory.commit()
    memory.wake()
    assert all(torch.equal(a.cpu(), b) for a, b in zip(tensors_in(model, optimizer), expected, strict=True))


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_the_gpu_works_while_a_sleep_copies(close, monkeypatch, end):
    model = layers()
    optimizer = adamw(model)
    memory = PausableMemory(model, optimizer)
    close(memory)
    train(model, optimizer)
    expected = [tensor.clone().cpu() for tensor in tensors_in(model, optimizer)]
    memory.sleep()  # allocates the host memory
    memory.wake()
    batch = torch.ones(8, WIDTH, device="cuda")
    assert model(batch).isfinite().all()  # loads the kernels: CUDA would wait for the slow copy to do so
    slow_down(monkeypatch, memory, "begin_copy_to_host")
    start = time.perf_counter()
    memory.prepare_sleep(["optimizer"])
    memory.begin()
    assert model(batch).isfinite().all()
    assert time.perf_counter() - start < 0.5 and memory.status()["optimizer"].state == "resident"
    getattr(memory, end)()
    assert time.perf_counter() - start > 0.7  # it waited for the copies
    assert memory.status()["optimizer"].state == ("preserved" if end == "commit" else "resident")
    memory.wake()
    assert all(torch.equal(a.cpu(), b) for a, b in zip(tensors_in(model, optimizer), expected, strict=True))


def test_a_tag_leaves_while_the_copies_of_another_run(close, monkeypatch):
    model = layers()
    optimizer = adamw(model)
    memory = PausableMemory(model, optimizer)
    close(memory)
    train(model, optimizer)
    expected = [tensor.clone().cpu() for tensor in tensors_in(model, optimizer)]
    memory.sleep()  # allocates the host memory
    memory.wake()
    device = memory._manager.device
    copy, begun = device.begin_copy_to_host, []

    def begin(pairs):
        if begun:  # the copies of the second tag
            with torch.cuda.stream(device._stream):
                torch.cuda._sleep(2_000_000_000)
        begun.append(pairs)
        return copy(pairs)

    monkeypatch.setattr(device, "begin_copy_to_host", begin)
    start = time.perf_counter()
    memory.prepare_sleep(["optimizer", "parameters"])
    memory.begin()
    memory.commit(tags=["optimizer"])
    assert time.perf_counter() - start < 0.5 and len(begun) == 2
    assert memory.status()["optimizer"].state == "preserved" and memory.status()["parameters"].state == "resident"
    memory.commit()
    assert time.perf_counter() - start > 0.7  # it waited for the copies
    memory.wake()
    assert all(torch.equal(a.cpu(), b) for a, b in zip(tensors_in(model, optimizer), expected, strict=True))


def test_a_sleep_goes_on_behind_its_caller(close, monkeypatch):
    model = layers()
    optimizer = adamw(model)
    memory = PausableMemory(model, optimizer)
    close(memory)
    train(model, optimizer)
    expected = [tensor.clone().cpu() for tensor in tensors_in(model, optimizer)]
    asleep_bytes = []
    for _ in range(2):  # the first allocates the host memory
        awake = free_bytes()
        memory.sleep()
        asleep_bytes.append(free_bytes() - awake)
        memory.wake()
    other = torch.ones(8, WIDTH, device="cuda")
    assert (other + other).isfinite().all()  # loads the kernels: CUDA would wait for the slow copy to do so
    slow_down(monkeypatch, memory, "begin_copy_to_host")
    awake = free_bytes()
    start = time.perf_counter()
    memory.prepare_sleep()
    memory.begin()
    sizes = memory.commit_behind(torch.cuda.empty_cache)
    assert (other + other).isfinite().all()
    assert memory.status()["optimizer"].state == "resident"  # the copies of a second go on
    memory.wait()
    assert time.perf_counter() - start > 0.7  # it waited for the copies
    assert {str(status.state) for status in memory.status().values()} == {"preserved", "discarded"}
    assert free_bytes() - awake >= 0.9 * asleep_bytes[-1] and sum(sizes.values()) >= 0.9 * asleep_bytes[-1]
    memory.wake()
    assert all(torch.equal(a.cpu(), b) for a, b in zip(tensors_in(model, optimizer), expected, strict=True))


@pytest.mark.parametrize("overlap", [True, False])
def test_losses_stay_over_handoffs(overlap, close):
    model = layers()
    optimizer = adamw(model)
    memory = PausableMemory(model, optimizer)
    close(memory)
    twin = layers()
    twin_optimizer = adamw(twin)
    handoff = RolloutHandoff(
        [],
        {},
        weights=[memory.part("parameters")],
        others=[memory.part("gradients", "optimizer")],
        overlap=overlap,
    )
    for step in range(5):
        with handoff.training():
            assert memory._manager.unfinished == (["optimizer"] if overlap and step else [])
            assert train(model, optimizer) == train(twin, twin_optimizer)
            ample = memory.device_memory()[1] + cached_bytes(memory.device) >= AMPLE_BYTES
        assert (memory._leaves is not None) == (overlap and ample)
        memory.wait()
        assert {str(status.state) for status in memory.status().values()} == {"preserved", "discarded"}


def test_the_driver_has_the_bytes_while_all_sleeps(close):
    model = layers()
    optimizer = adamw(model)
    memory = PausableMemory(model, optimizer)
    close(memory)
    train(model, optimizer)
    memory.sleep()
    memory.wake()
    total = sum(tensor.nbytes for tensor in tensors_in(model, optimizer))
    before = free_bytes()
    released = sum(change.bytes_released for change in memory.sleep().changes)
    assert abs(free_bytes() - before - released) < 8 * MiB
    assert 0 <= released - total < 0.1 * total + 64 * MiB
    memory.wake()
    assert abs(free_bytes() - before) < 8 * MiB


def test_a_sleep_empties_what_training_has_left_in_the_cache(close):
    model = layers()
    memory = PausableMemory(model)
    close(memory)
    scratch = torch.empty(4 * GiB, dtype=torch.uint8, device="cuda")
    del scratch
    reserved = torch.cuda.memory_reserved()
    memory.sleep()  # the tensors of sleeping tags stay in torch's count
    assert reserved - torch.cuda.memory_reserved() >= 4 * GiB


def test_a_region_makes_tensors_that_need_no_move(close):
    memory = PausableMemory()
    close(memory)
    with memory.region("parameters"):
        model = layers()
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    memory.adopt(model)
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert sum(change.bytes_released for change in memory.sleep(["parameters"]).changes) >= 512 * MiB


def graph_of(model, optimizer, batch, gradients):
    """A graph of a whole training step. The optimiser has stepped before.

    Args:
        gradients: A context for the gradients, whose addresses the graph keeps.
    """
    graph = torch.cuda.CUDAGraph()
    with gradients:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    with torch.cuda.graph(graph):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return graph


@pytest.mark.parametrize("wait", [True, False])
def test_a_graph_of_a_training_step_replays_after_a_wake(close, wait):
    """No hook runs before a replay, so the state does not come later."""
    batch = torch.linspace(-1, 1, 8 * WIDTH, device="cuda").view(8, WIDTH)
    results = []
    for sleeps in (False, True):
        model = layers()
        optimizer = adamw(model, capturable=True)
        memory = PausableMemory(model, optimizer) if sleeps else None
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        torch.cuda.current_stream().wait_stream(stream)
        graph = graph_of(model, optimizer, batch, memory.region("gradients") if sleeps else nullcontext())
        for _ in range(4):
            graph.replay()
            if memory is not None:
                memory.sleep()
                memory.wake(wait=wait)
        torch.cuda.synchronize()
        results.append([parameter.detach().clone() for parameter in model.parameters()])
        if memory is not None:
            close(memory)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_flat_gradients_come_back_as_zeros_at_their_address(close):
    memory = PausableMemory()
    close(memory)
    with memory.region("gradients"):
        flat = torch.full((300 * MiB,), 7, dtype=torch.uint8, device="cuda")
    address = flat.data_ptr()
    (change,) = [change for change in memory.sleep().changes if change.tag == "gradients"]
    assert change.bytes_released >= 300 * MiB and change.bytes_copied == 0
    memory.wake()
    assert flat.data_ptr() == address and not flat.any()


def test_frozen_parameters_are_copied_once(close):
    model = layers().requires_grad_(False)
    memory = PausableMemory(model)
    close(memory)
    expected = [parameter.clone() for parameter in model.parameters()]
    copied = []
    for _ in range(3):
        (change,) = [change for change in memory.sleep().changes if change.tag == "parameters"]
        copied.append(change.bytes_copied)
        memory.wake()
    assert copied[0] >= 512 * MiB and max(copied[1:]) < 8 * MiB
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), expected, strict=True))


@pytest.mark.parametrize("wait", [True, False])
def test_out_of_memory_at_a_wake_leaves_all_asleep(close, wait):
    model = layers()
    optimizer = adamw(model)
    memory = PausableMemory(model, optimizer)
    close(memory)
    train(model, optimizer)
    expected = [tensor.clone().cpu() for tensor in tensors_in(model, optimizer)]
    memory.sleep()
    with gpu_memory_taken(left_bytes=768 * MiB):  # the parameters fit, the state beside them does not
        before = torch.cuda.mem_get_info(0)[0]
        with pytest.raises(DeviceMemoryError, match="still sleep"):
            memory.wake(wait=wait)
        assert {str(status.state) for status in memory.status().values()} == {"preserved", "discarded"}
        assert abs(torch.cuda.mem_get_info(0)[0] - before) < 64 * MiB
    memory.wake()
    assert all(torch.equal(a.cpu(), b) for a, b in zip(tensors_in(model, optimizer), expected, strict=True))


def test_out_of_memory_at_an_adoption_keeps_the_content(close):
    model = layers()
    expected = [parameter.detach().clone().cpu() for parameter in model.parameters()]
    memory = PausableMemory()
    close(memory)
    torch.cuda.empty_cache()
    with gpu_memory_taken(left_bytes=256 * MiB), pytest.raises(DeviceMemoryError):
        memory.adopt(model)
    assert all(torch.equal(a.detach().cpu(), b) for a, b in zip(model.parameters(), expected, strict=True))
    memory.adopt(model)
    memory.sleep()
    memory.wake()
    assert all(torch.equal(a.detach().cpu(), b) for a, b in zip(model.parameters(), expected, strict=True))


def test_many_cycles_do_not_grow(close):
    model = layers()
    optimizer = adamw(model)
    memory = PausableMemory(model, optimizer)
    close(memory)
    train(model, optimizer)
    memory.sleep()
    memory.wake()
    before = free_bytes()
    for _ in range(50):
        memory.sleep()
        memory.wake()
        train(model, optimizer)
    assert before - free_bytes() < 128 * MiB


def test_a_memory_that_is_dropped_asleep_frees_its_host_memory_once_its_tensors_are_gone():
    model = torch.nn.Linear(4096, 4096, device="cuda")
    expected = model.weight.detach().cpu()
    memory = PausableMemory(model)
    memory.sleep()
    arena = memory._manager.arena
    del memory
    gc.collect()
    assert torch.equal(host_view(model.weight.detach()), expected)
    del model
    gc.collect()
    PausableMemory().close()
    for thread in [thread for thread in threading.enumerate() if thread.name == "rl-memory-close"]:
        thread.join()
    assert arena.held_bytes == 0


@pytest.mark.parametrize("after", ["another memory", "an offloader", "it ended awake"])
def test_tensors_that_leave_a_closed_memory_free_its_device_memory(close, after):
    model = torch.nn.Linear(16384, 16384, device="cuda")  # 1 GiB
    memory = PausableMemory(model)
    before = free_bytes()
    if after == "it ended awake":
        del memory
        gc.collect()
    else:
        memory.close()
    if after == "an offloader":
        assert Offloader(model).offload().bytes > 0.9 * GiB
        assert free_bytes() - before > 0.9 * GiB
        return
    other = PausableMemory(model if after == "another memory" else torch.nn.Linear(2, 2, device="cuda"))
    close(other)
    if after == "it ended awake":
        del model
        other.adopt(torch.nn.Linear(2, 2, device="cuda"))
        assert free_bytes() - before > 0.9 * GiB
    else:
        assert abs(free_bytes() - before) < 0.1 * GiB, "the model is there once"


def test_regions_of_two_memories_may_be_nested(close):
    outer, inner = PausableMemory(), PausableMemory()
    close(outer)
    close(inner)
    with outer.region("a"):
        with inner.region("b"):
            of_inner = torch.full((1 << 20,), 7.0, device="cuda")
        of_outer = torch.full((1 << 20,), 5.0, device="cuda")
        inner.sleep()
        inner.wake()
    outer.sleep()
    outer.wake()
    assert of_inner.eq(7).all() and of_outer.eq(5).all()
    assert inner.owned()(of_inner.data_ptr()) and outer.owned()(of_outer.data_ptr())


def test_close_frees_the_device_memory_without_a_tensor(close):
    memory = PausableMemory()
    close(memory)
    with memory.region("mine"):
        gone = torch.ones(GiB, dtype=torch.uint8, device="cuda")
        kept = torch.ones(GiB, dtype=torch.uint8, device="cuda")
    del gone
    before = free_bytes()
    memory.close()
    assert free_bytes() - before > 0.9 * GiB
    assert kept.eq(1).all()
