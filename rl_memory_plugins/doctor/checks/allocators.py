"""The self-tests of the allocators: memory is released, comes back at its address, and can be used."""

from __future__ import annotations

from typing import Any

from rl_memory_plugins.doctor.finding import Finding, Status, failure, not_applicable, ok, worst
from rl_memory_plugins.doctor.given_options import given_options
from rl_memory_plugins.doctor.machine import is_importable, torch_without_gpus

NBYTES = 8 << 20


def host() -> Finding:
    """The allocator of CPU engines."""
    if not is_importable("torch"):
        return not_applicable("torch is not installed")
    import torch

    return _self_test(torch.device("cpu"))


def gpus() -> Finding:
    """The allocator that the options choose, on each GPU that this process sees."""
    import torch

    without = torch_without_gpus()
    if without:
        return not_applicable(without)
    if not torch.cuda.is_available():
        return failure("torch cannot use the GPU", "see the check `driver`")
    return worst([_self_test(torch.device("cuda", index)) for index in range(torch.cuda.device_count())])


def _self_test(device: Any) -> Finding:
    from rl_memory_plugins.errors import RLMemoryError
    from rl_memory_plugins.memory.select import choose_allocator
    from rl_memory_plugins.trainer.pause_options import PauseOptions

    given = given_options()
    if isinstance(given, Finding) and given.status is Status.FAILURE:
        return not_applicable("the options in the environment are not known: see the check `options`")
    config = PauseOptions() if isinstance(given, Finding) else given
    if device.type == "cpu" and config.allocator not in ("auto", "host"):
        return not_applicable(f"the environment asks for allocator={config.allocator}, which is none for CPUs")
    try:
        allocator, _ = choose_allocator(config, device, 0)
        problem = cycle(allocator, device)
    except RLMemoryError as error:
        return failure(f"{device}: {error.message}", "follow the message; docs/options.md describes the allocators")
    if problem:
        return failure(f"{device}, allocator {allocator.name}: {problem}", "report it with the versions above")
    return ok(
        f"{device}: allocator {allocator.name} released {NBYTES >> 20} MiB and took them back at their address",
        **{str(device): allocator.name},
    )


def cycle(allocator: Any, device: Any) -> str:
    """Release and take back the memory of one tensor. Returns what went wrong; empty if nothing did."""
    import torch

    with allocator.region("doctor"):
        tensor = torch.zeros(NBYTES, dtype=torch.uint8, device=device)
    tensor.fill_(5)
    address, held = tensor.data_ptr(), sum(block.nbytes for block in allocator.blocks("doctor"))
    if held < NBYTES // 2:
        return f"a tensor of {NBYTES} bytes has only {held} bytes in the region"
    allocator.device.synchronize()
    released = allocator.release("doctor")
    if released < held:
        return f"{released} of {held} bytes were released"
    allocator.reserve("doctor").commit()
    if tensor.data_ptr() != address:
        return "the memory came back at another address"
    tensor.fill_(7)
    if int(tensor.sum(dtype=torch.int64)) != 7 * NBYTES:
        return "the memory does not keep what is written after its return"
    return ""
