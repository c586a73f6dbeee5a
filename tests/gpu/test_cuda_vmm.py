"""What the common suite does not reach: other processes, threads, shutdown, graphs, real scarcity."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest
import torch
from processes import gpu_memory_taken, memory_taker, run

from rl_memory_plugins.errors import DeviceMemoryError, UnsupportedError
from rl_memory_plugins.memory import cuda_driver, cuda_vmm
from rl_memory_plugins.memory.arena import PagedArena
from rl_memory_plugins.memory.backup import Backup
from rl_memory_plugins.memory.cuda_device import gpu_name
from rl_memory_plugins.memory.cuda_vmm import TORCH_SYMBOLS, CudaVmmAllocator
from rl_memory_plugins.memory.manager import MemoryManager
from rl_memory_plugins.memory.torch_saver import TorchSaverAllocator
from rl_memory_plugins.tags import Content, Level, Tag

MiB = 1 << 20
GiB = 1 << 30


@pytest.fixture
def vmm():
    allocator = CudaVmmAllocator(0)
    yield allocator
    allocator.close()


def used_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(0)
    return total - free


def filled(allocator, tag: Tag, nbytes: int, byte: int) -> torch.Tensor:
    with allocator.region(tag):
        tensor = torch.full((nbytes,), byte, dtype=torch.uint8, device=f"cuda:{allocator.index}")
    allocator.device.synchronize()
    return tensor


# -- scarcity ---------------------------------------------------------------------------------------------


def test_out_of_memory_in_a_wake_is_typed_and_undone(vmm):
    """Another process takes the memory while this one sleeps; when it goes, the wake works."""
    arena = PagedArena()
    parameter = filled(vmm, Tag.WEIGHTS, 1 * GiB, 5)
    caches = [filled(vmm, Tag.KV_CACHE, 256 * MiB, 6) for _ in range(8)]
    manager = MemoryManager(0, vmm, arena, lambda tag: vmm.blocks(tag) if tag is Tag.KV_CACHE else [])
    manager.prepare_sleep(Level.PRESERVE, [Tag.KV_CACHE, Tag.WEIGHTS])
    manager.commit_sleep()
    asleep = used_bytes()
    with gpu_memory_taken(left_bytes=5 * GiB // 2):
        before = used_bytes()
        with pytest.raises(DeviceMemoryError) as caught:  # the cache fits, the weights after it do not
            manager.prepare_wake([Tag.WEIGHTS, Tag.KV_CACHE])
        assert caught.value.details["needed_bytes"] == 1 * GiB
        assert caught.value.details["free_bytes"] < 1 * GiB
        assert used_bytes() == before
        assert not any(vmm._driver.is_mapped(block.address) for tag in Tag for block in vmm.blocks(tag))
        assert manager.status().tags["weights"].state == "preserved"
    assert abs(used_bytes() - asleep) < 64 * MiB
    manager.prepare_wake([Tag.WEIGHTS, Tag.KV_CACHE])
    manager.commit_wake()
    assert manager.content is Content.VALID
    assert int(parameter.min()) == int(parameter.max()) == 5
    assert len(caches) == 8
    manager.check_integrity()
    arena.close()


def test_what_is_reserved_cannot_be_taken_before_the_commit(vmm):
    tensor = filled(vmm, Tag.WEIGHTS, 2 * GiB, 5)
    vmm.release(Tag.WEIGHTS)
    reservation = vmm.reserve(Tag.WEIGHTS)
    with gpu_memory_taken(left_bytes=64 * MiB):
        reservation.commit()
        tensor.fill_(9)
        assert int(tensor[-1]) == 9


def test_reclaiming_takes_nothing_and_needs_nothing(vmm):
    tensor = filled(vmm, Tag.WEIGHTS, 512 * MiB, 7)
    vmm.release(Tag.WEIGHTS)
    with memory_taker() as taker:
        taker.leave(0)  # of what there is, but for the pieces that are too small for it
        free = torch.cuda.mem_get_info()[0]
        vmm.reclaim()
        assert torch.cuda.mem_get_info()[0] == free
    vmm.reclaim()
    vmm.reserve(Tag.WEIGHTS).commit()
    tensor.fill_(8)
    assert int(tensor[-1]) == 8


def test_what_is_unused_is_asked_of_torch_again_once_a_region_was_entered(vmm):
    """A tensor that came into what was unused must not be left out of a copy."""
    first = filled(vmm, Tag.WEIGHTS, 3 * MiB, 1)
    unused = vmm.unused(Tag.WEIGHTS)
    assert sum(block.nbytes for block in unused) > 10 * MiB
    torch.zeros(1, device="cuda:0")
    assert vmm.unused(Tag.WEIGHTS) is unused
    second = filled(vmm, Tag.WEIGHTS, 3 * MiB, 2)
    assert any(block.address <= second.data_ptr() < block.end for block in unused), "it should have come there"
    start, end = second.data_ptr(), second.data_ptr() + second.numel()
    assert all(block.end <= start or end <= block.address for block in vmm.unused(Tag.WEIGHTS))
    assert int(first[0]) == 1


def test_the_margin_stays_free():
    free, _ = torch.cuda.mem_get_info(0)
    vmm = CudaVmmAllocator(0, margin_bytes=free)
    filled_tensor = filled(vmm, Tag.WEIGHTS, 64 * MiB, 1)
    vmm.release(Tag.WEIGHTS)
    with pytest.raises(DeviceMemoryError) as caught:
        vmm.reserve(Tag.WEIGHTS)
    assert caught.value.details == {
        "needed_bytes": filled_tensor.numel(),
        "free_bytes": caught.value.details["free_bytes"],
        "margin_bytes": free,
    }
    vmm.close()


def test_a_trainer_scribbling_over_the_freed_memory_changes_nothing(vmm):
    arena = PagedArena()
    generator = torch.Generator(device="cuda").manual_seed(0)
    with vmm.region(Tag.WEIGHTS):
        tensor = torch.randint(0, 256, (1 * GiB,), dtype=torch.uint8, device="cuda", generator=generator)
    blocks = vmm.blocks(Tag.WEIGHTS)
    before = vmm.device.fingerprint(blocks)
    backup = Backup(arena, blocks)
    backup.begin_save(vmm.device, 0)
    backup.finish()
    vmm.release(Tag.WEIGHTS)
    with gpu_memory_taken(left_bytes=2 * GiB):
        pass
    vmm.reserve(Tag.WEIGHTS).commit()
    backup.begin_restore(vmm.device, blocks)
    backup.finish()
    assert vmm.device.fingerprint(blocks) == before
    assert tensor.data_ptr() == blocks[0].address
    arena.close()


# -- torch's side -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", TORCH_SYMBOLS)
def test_a_missing_torch_symbol_is_named(path, monkeypatch):
    holder, _, name = path.rpartition(".")
    target = torch
    for part in holder.split("."):
        target = getattr(target, part)
    monkeypatch.delattr(target, name)
    if name == "id":  # the class's base has one too
        monkeypatch.setattr(target, name, None, raising=False)
    with pytest.raises(UnsupportedError, match=f"torch.{path}"):
        cuda_vmm.require_torch_symbols()


def test_expandable_segments_are_handled_and_other_settings_kept():
    output = run(
        """
        import torch
        from rl_memory_plugins.memory.cuda_vmm import CudaVmmAllocator
        from rl_memory_plugins.memory.torch_settings import torch_options
        from rl_memory_plugins.tags import Tag
        vmm = CudaVmmAllocator(0)
        with vmm.region(Tag.WEIGHTS):
            tensor = torch.ones(256 << 20, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        before = torch.cuda.mem_get_info()[0]
        vmm.release(Tag.WEIGHTS)
        print(torch.cuda.mem_get_info()[0] - before, torch_options())
        """,
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True,max_split_size_mb:333",
    )
    freed, _, options = output.partition(" ")
    assert int(freed) == 256 * MiB
    assert "max_split_size_mb:333" in options
    assert "release_lock_on_cudamalloc:True" in options


def test_unused_memory_is_given_back_at_the_end_of_a_region(vmm):
    torch.full((MiB,), 3, dtype=torch.uint8, device="cuda").add_(1)  # loading a kernel takes memory
    before = used_bytes()
    with vmm.region(Tag.WEIGHTS):
        kept = torch.full((64 * MiB,), 3, dtype=torch.uint8, device="cuda")
        scratch = torch.full((512 * MiB,), 4, dtype=torch.uint8, device="cuda")
        for _ in range(200):  # still running when the region ends
            scratch.add_(1)
        del scratch
    assert used_bytes() - before == 64 * MiB
    assert sum(block.nbytes for block in vmm.blocks(Tag.WEIGHTS)) == 64 * MiB
    again = filled(vmm, Tag.WEIGHTS, 512 * MiB, 7)
    assert int(again.min()) == int(again.max()) == 7
    assert int(kept.min()) == int(kept.max()) == 3


def test_regions_that_come_and_go_leave_nothing(vmm):
    filled(vmm, Tag.RUNTIME, 32 * MiB, 1)
    before, reserved = used_bytes(), torch.cuda.memory_reserved()
    for byte in range(50):
        filled(vmm, Tag.RUNTIME, 32 * MiB, byte)
        with vmm.region(Tag.RUNTIME):
            torch.ones(8 * MiB, device="cuda").sum()
    assert used_bytes() - before <= 40 * MiB
    torch.cuda.synchronize()
    vmm.release(Tag.RUNTIME)
    vmm.reserve(Tag.RUNTIME).commit()  # torch is made to forget the addresses only now
    assert used_bytes() - before <= 40 * MiB
    assert torch.cuda.memory_reserved() - reserved <= 80 * MiB


def test_threads_that_allocate_free_and_sleep_at_once_do_not_deadlock():
    """Without the allocator's lock being released around ctypes' callback, this hangs in seconds."""
    run(
        """
        import gc, threading, time, torch
        from rl_memory_plugins.memory.cuda_vmm import CudaVmmAllocator
        from rl_memory_plugins.tags import Tag
        vmm = CudaVmmAllocator(0)
        end = time.monotonic() + 8
        rounds = dict.fromkeys(["region", "default", "sleep"], 0)
        failures = []

        def forever(name, work):
            try:
                torch.cuda.set_device(0)
                while time.monotonic() < end:
                    work()
                    rounds[name] += 1
            except BaseException as error:
                failures.append(error)
                raise

        def region():
            with vmm.region(Tag.WEIGHTS):
                tensors = [torch.empty(4 << 20, dtype=torch.uint8, device="cuda") for _ in range(8)]
                tensors.clear()  # so that the region gives all back, and the next one asks for new segments

        def default():
            tensors = [torch.empty(n << 10, dtype=torch.uint8, device="cuda") for n in range(1, 50)]
            torch.cuda.memory_stats()
            tensors.clear()

        cache = []
        with vmm.region(Tag.KV_CACHE):
            cache.append(torch.empty(256 << 20, dtype=torch.uint8, device="cuda"))

        def sleep():
            vmm.release(Tag.KV_CACHE)
            vmm.reserve(Tag.KV_CACHE).commit()
            torch.cuda.empty_cache()

        threads = [threading.Thread(target=forever, args=("region", region), daemon=True) for _ in range(3)]
        threads += [threading.Thread(target=forever, args=("default", default), daemon=True) for _ in range(3)]
        threads += [threading.Thread(target=forever, args=("sleep", sleep), daemon=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(40)
            assert not thread.is_alive(), "deadlock"
        assert not failures, failures
        assert min(rounds.values()) > 10, rounds
        print(rounds)
        """,
        timeout=90,
    )


@pytest.mark.parametrize("moment", ["released", "reserved", "resident"])
def test_the_interpreter_shuts_down_cleanly(moment):
    run(
        f"""
        import torch
        from rl_memory_plugins.memory.cuda_vmm import CudaVmmAllocator
        from rl_memory_plugins.tags import Tag
        vmm = CudaVmmAllocator(0)
        class Cycle: pass
        cycle = Cycle()
        cycle.me = cycle
        with vmm.region(Tag.WEIGHTS):
            tensor = torch.ones(64 << 20, dtype=torch.uint8, device="cuda")
            cycle.tensor = torch.ones(64 << 20, dtype=torch.uint8, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=vmm.pool_id()):
            out = tensor[:1024] + 1
        torch.cuda.synchronize()
        if {moment!r} != "resident":
            vmm.release(Tag.WEIGHTS)
            vmm.release(Tag.CUDA_GRAPH)
        if {moment!r} == "reserved":
            reservation = vmm.reserve(Tag.WEIGHTS)
        """
    )


# -- CUDA graphs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [CudaVmmAllocator, TorchSaverAllocator])
def test_a_graph_replays_identically_after_sleeping(kind):
    """Weights go to the host and come back five times; with `vmm`, so does the graph's own memory."""
    allocator = kind(0)
    arena = PagedArena()
    generator = torch.Generator(device="cuda").manual_seed(1)
    with allocator.region(Tag.WEIGHTS):
        weights = [torch.randn(2048, 2048, device="cuda", generator=generator) for _ in range(4)]
    static = torch.randn(64, 2048, device="cuda", generator=generator)

    def forward():
        hidden = static
        for weight in weights:
            hidden = torch.tanh(hidden @ weight) + hidden.mean()
        return hidden

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    if kind is CudaVmmAllocator:
        with torch.cuda.graph(graph, pool=allocator.pool_id()):
            result = forward()
        blocks = allocator.blocks(Tag.CUDA_GRAPH)
        assert any(block.address <= result.data_ptr() < block.end for block in blocks)
    else:
        with torch.cuda.graph(graph):
            result = forward()
    graph.replay()
    expected = result.clone()
    tags = [Tag.WEIGHTS, Tag.CUDA_GRAPH]
    manager = MemoryManager(0, allocator, arena, lambda tag: [], poison=True)
    for _ in range(5):
        manager.prepare_sleep(Level.PRESERVE, tags)
        manager.commit_sleep()
        scribble = torch.full((256 * MiB,), 0xFF, dtype=torch.uint8, device="cuda")
        del scribble
        torch.cuda.empty_cache()
        manager.prepare_wake(tags)
        manager.commit_wake()
        result.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result, expected)
    arena.close()  # the allocator stays awake: cuBLAS keeps a workspace that it got during the capture


# -- devices ----------------------------------------------------------------------------------------------


def test_a_device_has_the_name_that_every_process_sees():
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    name = gpu_name(0)
    assert f"UUID: {name})" in listed
    code = "from rl_memory_plugins.memory.cuda_device import gpu_name; print(gpu_name(0))"
    assert run(code, CUDA_VISIBLE_DEVICES=name).strip() == name


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_devices_in_one_process(vmm):
    other = CudaVmmAllocator(1)
    assert other.device.name != vmm.device.name
    first, second = filled(vmm, Tag.WEIGHTS, 64 * MiB, 1), filled(other, Tag.WEIGHTS, 64 * MiB, 2)
    free = [torch.cuda.mem_get_info(index)[0] for index in (0, 1)]
    assert other.release(Tag.WEIGHTS) == 64 * MiB
    assert [torch.cuda.mem_get_info(index)[0] for index in (0, 1)] == [free[0], free[1] + 64 * MiB]
    assert int(first[-1]) == 1
    other.reserve(Tag.WEIGHTS).commit()
    second.fill_(3)
    assert int(second[-1]) == 3
    permuted = run(
        """
        from rl_memory_plugins.memory.cuda_vmm import CudaVmmAllocator
        print(CudaVmmAllocator(0).device.name, CudaVmmAllocator(1).device.name)
        """,
        CUDA_VISIBLE_DEVICES=f"{other.device.name},{vmm.device.name}",
    )
    assert permuted.split() == [other.device.name, vmm.device.name]
    other.close()


def test_a_driver_without_what_is_needed_is_refused(monkeypatch):
    def absent(name):
        raise ImportError(f"no module named {name}")

    monkeypatch.setattr(cuda_driver, "importlib", SimpleNamespace(import_module=absent))
    with pytest.raises(UnsupportedError, match="cuda-bindings"):
        CudaVmmAllocator(0)
