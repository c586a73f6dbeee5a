"""Communicators of two GPUs that give their memory back: the driver's free memory, sums afterwards, CUDA graphs.

`tests/unit/memory/test_nccl.py` has what needs no GPU. Each test prints its figures as a line of JSON.
"""

from __future__ import annotations

import importlib.util
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from processes import run

from integration.engines.ports import reserve_port
from rl_memory_plugins.memory import nccl

MiB = 1 << 20
CYCLES = 50

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a communicator of NCCL needs two GPUs"),
    pytest.mark.skipif(nccl.why_not() != "", reason=nccl.why_not() or "torch can suspend"),
]

START = """
import json, os, time
import torch
import torch.distributed as dist
from rl_memory_plugins.memory import nccl

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
device = torch.device("cuda", rank)
dist.init_process_group("nccl", rank=rank, world_size=2)
gloo = dist.new_group(backend="gloo")
values = torch.empty(32 << 20, device=device)

def free():
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info(rank)[0]

def is_right(reduce):
    values.fill_(rank + 1)
    reduce()
    torch.cuda.synchronize()
    return bool((values == 3).all())

def cycles(communicators, reduce, number):
    suspension = nccl.Suspension()
    seconds, freed, right = {"suspend": [], "resume": []}, [], is_right(reduce)
    for _ in range(number):
        before = free()
        dist.barrier(gloo)
        started = time.perf_counter()
        suspension.suspend(communicators())
        seconds["suspend"].append(time.perf_counter() - started)
        freed.append(free() - before)
        dist.barrier(gloo)
        started = time.perf_counter()
        suspension.resume()
        seconds["resume"].append(time.perf_counter() - started)
        right = right and is_right(reduce)
    median = {name: sorted(each)[number // 2] for name, each in seconds.items()}
    return {"right": right, "freed_mib_least": min(freed) >> 20, "freed_mib_most": max(freed) >> 20, **median}
"""


def of_both_ranks(code: str) -> list[dict]:
    """Run the code in a process for each of two GPUs. Returns what each prints last, as JSON."""
    reservation, port = reserve_port()
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NCCL_GRAPH_REGISTER": "0"}
    end = "\ndist.barrier(gloo)\ndist.destroy_process_group()\nprint(json.dumps(result), flush=True)\n"

    def one(rank: int) -> dict:
        return json.loads(run(START + code + end, timeout=300, RANK=str(rank), **address).splitlines()[-1])

    with reservation, ThreadPoolExecutor(2) as pool:
        results = list(pool.map(one, range(2)))
    print(json.dumps(results))
    return results


def test_groups_of_torch_give_their_memory_back():
    code = f"""
other = dist.new_group()  # its communicator does not exist yet
result = cycles(lambda: nccl.of_groups([dist.group.WORLD, other, gloo]), lambda: dist.all_reduce(values), {CYCLES})
result["stats"] = dist.group.WORLD._get_backend(device).memory_stats()
result["counted_mib"] = nccl.bytes_of_groups(rank) >> 20
"""
    for result in of_both_ranks(code):
        assert result["right"]
        assert result["freed_mib_least"] >= 32
        assert result["counted_mib"] >= 32


def test_a_captured_sum_is_right_after_the_memory_is_back():
    code = """
dist.all_reduce(values)
graph = torch.cuda.CUDAGraph()
torch.cuda.synchronize()
with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog asks for events meanwhile
    dist.all_reduce(values)
result = cycles(lambda: nccl.of_groups([dist.group.WORLD]), graph.replay, 5)
graph.reset()  # a communicator in a graph cannot be destroyed
"""
    assert all(result["right"] for result in of_both_ranks(code))


def test_the_account_of_the_process_follows():
    code = """
from rl_memory_plugins.memory import residual
from rl_memory_plugins.memory.cuda_vmm import CudaVmmAllocator
vmm = CudaVmmAllocator(rank)
dist.all_reduce(values)
torch.cuda.synchronize()
suspension = nccl.Suspension()
awake = vmm.residual_memory()
with residual.moved("nccl"):
    suspension.suspend(nccl.of_groups([dist.group.WORLD]))
asleep = vmm.residual_memory()
with residual.moved("nccl"):
    suspension.resume()
result = {"awake": awake, "asleep": asleep, "again": vmm.residual_memory()}
"""
    for result in of_both_ranks(code):
        awake, asleep, again = (result[name] for name in ("awake", "asleep", "again"))
        if "context" not in awake:
            continue  # NVML does not tell processes apart here
        assert asleep.get("nccl", 0) <= awake["nccl"] - 32 * MiB
        assert abs(again["nccl"] - awake["nccl"]) <= 8 * MiB
        assert all(abs(asleep.get(cause, 0) - awake.get(cause, 0)) <= 64 * MiB for cause in ("context", "other"))


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
def test_communicators_of_sglang_give_their_memory_back():
    code = f"""
from sglang.srt.distributed.device_communicators.pynccl import PyNcclCommunicator
from rl_memory_plugins.engines.sglang.nccl_suspend import OwnCommunicator
own = PyNcclCommunicator(gloo, device)
with own.change_state(enable=True):
    result = cycles(lambda: [OwnCommunicator(own)], lambda: own.all_reduce(values), {CYCLES})
"""
    for result in of_both_ranks(code):
        assert result["right"]
        assert result["freed_mib_least"] >= 32


def test_a_trainer_s_groups_sleep_with_its_memory():
    code = f"""
from rl_memory_plugins.trainer import PausableMemory
torch.manual_seed(0)
model = torch.nn.Linear(4096, 4096, device=device)
memory = PausableMemory(model, process_groups=[dist.group.WORLD, gloo])
weight = model.weight.detach().clone()
right, freed, seconds = is_right(lambda: dist.all_reduce(values)), [], []
for _ in range({CYCLES}):
    before = free()
    report = memory.sleep()
    freed.append(free() - before)
    seconds.append({{**report.seconds, **memory.wake().seconds}})
    right = right and is_right(lambda: dist.all_reduce(values)) and bool(torch.equal(model.weight, weight))
result = {{"right": right, "freed_mib_least": min(freed) >> 20, "freed_mib_most": max(freed) >> 20,
    "seconds": {{name: sorted(each[name] for each in seconds)[{CYCLES} // 2] for name in ("suspend", "resume")}}}}
"""
    for result in of_both_ranks(code):
        assert result["right"]
        assert result["freed_mib_least"] >= 64 + 32  # the weights, and the communicator
