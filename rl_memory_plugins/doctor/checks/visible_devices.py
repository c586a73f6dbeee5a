"""`CUDA_VISIBLE_DEVICES` against the GPUs of the machine, by their UUIDs."""

from __future__ import annotations

import importlib
import os
import subprocess

from rl_memory_plugins.doctor.finding import Finding, failure, not_applicable, ok, warning
from rl_memory_plugins.doctor.machine import has_gpu

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_devices() -> Finding:
    if not has_gpu():
        return not_applicable("no GPU")
    try:
        uuids = all_uuids()
    except OSError as error:
        return warning(f"the UUIDs of the GPUs are not known: {error}", "pip install 'rl_memory_plugins[cuda]'")
    return compare(os.environ.get(VARIABLE), uuids)


def compare(value: str | None, uuids: list[str]) -> Finding:
    """
    Args:
        value: The variable; `None` if it is not set.
        uuids: Of all GPUs that the driver shows, in the order of their numbers.
    """
    if value is None:
        return ok(f"{VARIABLE} is not set: all {len(uuids)} GPUs ({', '.join(uuids)})", visible=uuids)
    entries = [entry.strip() for entry in value.split(",")] if value.strip() else []
    if not entries or entries[0] == "-1":
        return warning(f"{VARIABLE}={value!r} hides all {len(uuids)} GPUs", f"unset {VARIABLE}, or name GPUs")
    visible: list[str] = []
    for position, entry in enumerate(entries):
        uuid = _meant(entry, uuids)
        if uuid is None:
            return failure(
                f"{VARIABLE}={value}: {entry!r} names no GPU of this machine, and CUDA ignores it and all that follow, "
                f"so {position} of {len(entries)} are visible; the machine has {', '.join(uuids) or 'none'}",
                "name GPUs by their UUIDs (`nvidia-smi -L`), or by numbers from 0",
                visible=visible,
            )
        if uuid in visible:
            return failure(
                f"{VARIABLE}={value} names {uuid} twice: CUDA then shows no GPU", "name each GPU once", visible=visible
            )
        visible.append(uuid)
    told = ", ".join(f"{position} is {uuid}" for position, uuid in enumerate(visible))
    if len({entry.startswith(("GPU-", "MIG-")) for entry in entries}) > 1:
        return warning(f"{VARIABLE}={value} mixes numbers and UUIDs", "write only UUIDs", visible=visible)
    return ok(f"{VARIABLE}={value}: {told}. An update finds its GPU by the UUID, not by the number", visible=visible)


def _meant(entry: str, uuids: list[str]) -> str | None:
    """The UUID that an entry means. CUDA takes the beginning of a UUID if it is of one GPU only."""
    if entry.startswith(("GPU-", "MIG-")):
        found = [uuid for uuid in uuids if uuid.startswith(entry)]
        if entry.startswith("MIG-") and not found:
            return entry  # NVML lists whole GPUs; the driver knows the instances
        return found[0] if len(found) == 1 else None
    return uuids[int(entry)] if entry.isdigit() and int(entry) < len(uuids) else None


def all_uuids() -> list[str]:
    """Of all GPUs that the driver shows this container, whatever the variable says.

    Raises:
        OSError: neither NVML nor `nvidia-smi` tells.
    """
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return [str(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    except Exception:  # not installed, or the driver has no NVML here
        pass
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise OSError(f"neither NVML nor nvidia-smi answers ({error})") from None
    return listed.stdout.split()
