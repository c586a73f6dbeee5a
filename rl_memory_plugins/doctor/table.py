"""All checks of this machine and this environment, in the order in which they are shown."""

from __future__ import annotations

from rl_memory_plugins.doctor.check import Check
from rl_memory_plugins.doctor.checks import (
    allocators,
    cuda_ipc,
    hooks,
    host_sharing,
    limits,
    places,
    plugin,
    torch_settings,
    versions,
    visible_devices,
)

IMPORTS_TORCH_S = 120.0
"""A deadline for what imports torch or an engine, which takes tens of seconds from a cold disk."""

IMPORTS_ENGINE_S = 240.0

LOCAL = (
    Check("package", versions.package, "starting"),
    Check("engine", versions.engine, "starting"),
    Check("vllm-command", versions.vllm_command, "starting"),
    Check("torch", versions.torch_build, "starting", IMPORTS_TORCH_S, own_process=True),
    Check("driver", versions.driver, "starting", IMPORTS_TORCH_S, own_process=True, needs_gpu=True),
    Check("nccl", versions.nccl, "memory", IMPORTS_TORCH_S, own_process=True),
    Check("plugin", plugin.loaded, "starting"),
    Check("options", plugin.options, "starting"),
    Check("processes", plugin.processes, "starting"),
    Check("hooks", hooks.targets, "starting", IMPORTS_ENGINE_S, own_process=True),
    Check("expandable-segments", torch_settings.expandable_segments, "starting"),
    Check("preload", torch_settings.preload, "starting", IMPORTS_TORCH_S, own_process=True),
    Check("host-allocator", allocators.host, "starting", IMPORTS_TORCH_S, own_process=True),
    Check("gpu-allocator", allocators.gpus, "starting", IMPORTS_TORCH_S, own_process=True, needs_gpu=True),
    Check("cuda-ipc", cuda_ipc.between_processes, "updates", IMPORTS_TORCH_S, own_process=True, needs_gpu=True),
    Check("visible-devices", visible_devices.visible_devices, "updates", 30.0),
    Check("shared-files", host_sharing.shared_files, "updates", 30.0),
    Check("pidfd-getfd", host_sharing.pidfd_getfd, "updates", 30.0),
    Check("shared-memory", host_sharing.shared_memory, "memory"),
    Check("host-memory", limits.host_memory, "memory"),
    Check("locked-memory", limits.locked_memory, "memory", IMPORTS_TORCH_S, own_process=True),
    Check("private-directory", places.private_place, "starting"),
    Check("sockets", places.sockets, "updates"),
)
