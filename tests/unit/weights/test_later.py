"""Frees that wait until a GPU has nothing else to do."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from fake_gpu import gpu_rank
from test_transports import send
from toys import checkpoint, loaded

from rl_memory_plugins.errors import RLMemoryError
from rl_memory_plugins.memory.threads import on_this_gpu
from rl_memory_plugins.weights import later


def test_the_slots_of_an_update_are_freed_when_the_frees_run(gpus):
    rank, tensors, frees = gpu_rank(), checkpoint(1), later.Frees()
    with frees.noted():
        send([rank], tensors, transport="cuda_ipc")
    rank.model.assert_unchanged(loaded(tensors))
    assert gpus["GPU-0"].memory
    frees.run()
    assert not gpus["GPU-0"].memory
    frees.run()
    send([rank], checkpoint(2), transport="cuda_ipc")
    assert not gpus["GPU-0"].memory


def test_an_update_that_broke_off_frees_at_once(gpus):
    with later.Frees().noted():
        error, _ = send([gpu_rank()], {"unknown": torch.ones(4)}, transport="cuda_ipc")
    assert isinstance(error, RLMemoryError)
    assert not gpus["GPU-0"].memory


def test_two_threads_may_free_at_once():
    frees, freed, both = later.Frees(), [], threading.Barrier(2)
    with frees.noted():
        for number in range(100):
            later.free(lambda number=number: freed.append(number))

    def run():
        both.wait(10)
        frees.run()

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(run), pool.submit(run)]:
            done.result(10)
    assert sorted(freed) == list(range(100))


def test_threads_note_what_they_free_in_the_context_that_started_them():
    frees, freed = later.Frees(), []
    with frees.noted():
        thread = threading.Thread(target=on_this_gpu(lambda: later.free(lambda: freed.append(1))))
        thread.start()
        thread.join()
        later.free(lambda: freed.append(2))
    later.free(lambda: freed.append(3))
    assert freed == [3]
    frees.run()
    assert freed == [3, 1, 2]
