"""The identity of the weights of one rank: a hash of their bytes. It costs one read of the weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rl_memory_plugins.errors import DeviceMemoryError
from rl_memory_plugins.memory.allocator import Block, Device
from rl_memory_plugins.memory.fingerprint import fingerprint, memory_view
from rl_memory_plugins.weights.coverage import canonical

if TYPE_CHECKING:
    import torch


def identity(parameters: Iterable[torch.Tensor], device: Device) -> str:
    """A hash of the parameters' bytes in their order. It does not depend on addresses.

    Args:
        device: The device of the rank. Parameters in host memory are hashed by the CPU.

    Returns: 32 hexadecimal digits; empty if the device lacks memory for the hash, or a parameter has no bytes.
    """
    on_host: list[Block] = []
    on_device: list[Block] = []
    for parameter in parameters:
        if parameter.is_meta:
            return ""
        (on_host if parameter.device.type == "cpu" else on_device).append(_block(parameter))
    try:
        on_device_hash = device.fingerprint(on_device) if on_device else 0
    except DeviceMemoryError:
        return ""
    return f"{on_device_hash:016x}{fingerprint(memory_view(*block) for block in on_host):016x}"


def _block(parameter: torch.Tensor) -> Block:
    """The bytes of a parameter. Those of a parameter with gaps include the gaps."""
    storage = parameter.untyped_storage()
    if canonical(parameter.shape, parameter.stride())[1] in ((), (1,)):
        return Block(parameter.data_ptr(), parameter.nbytes)
    return Block(storage.data_ptr(), storage.nbytes())
