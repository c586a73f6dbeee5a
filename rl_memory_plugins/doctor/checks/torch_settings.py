"""Variables that change how torch allocates: expandable segments, and preloaded libraries."""

from __future__ import annotations

import os

from rl_memory_plugins.doctor.finding import Finding, failure, not_applicable, ok, warning
from rl_memory_plugins.doctor.given_options import given_options

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def expandable_segments() -> Finding:
    found = {name: os.environ[name] for name in VARIABLES if _is_on(os.environ.get(name, ""))}
    if not found:
        return ok("torch's expandable_segments are not on in this environment")
    seen = ", ".join(f"{name}={value}" for name, value in found.items())
    unset = f"unset {' and '.join(found)} for the engine"
    if os.environ.get("RL_MEMORY_ALLOCATOR") == "tms":
        return failure(f"{seen}: allocator=tms does not see this memory, and the engine does not start", unset)
    return warning(
        f"{seen}: allocator=vmm switches the setting off where it is in the way; a trainer's tensors in such memory "
        "cannot be shared by CUDA IPC, so they are copied once more",
        f"{unset} and for the trainer, unless fragmentation needs it",
    )


def _is_on(text: str) -> bool:
    pairs = (pair.partition(":") for pair in text.replace(" ", "").split(","))
    return any(name == "expandable_segments" and value.lower() in ("true", "1") for name, _, value in pairs)


def preload() -> Finding:
    """Whether torch_memory_saver's library is preloaded where the options ask for it."""
    config = given_options()
    if isinstance(config, Finding):
        return not_applicable("the options in the environment are not known: see the check `options`")
    if config.allocator != "tms" or config.tms_hook_mode != "preload":
        return not_applicable("the environment does not ask for allocator=tms with tms_hook_mode=preload")
    from rl_memory_plugins.errors import UnsupportedError
    from rl_memory_plugins.memory.torch_saver import resolve_hook_mode

    try:
        resolve_hook_mode("preload")  # looks for the library in this process, which has the same LD_PRELOAD
    except UnsupportedError as error:
        return failure(error.message, "start with `rl-memory serve`, which sets LD_PRELOAD")
    return ok(f"LD_PRELOAD={os.environ['LD_PRELOAD']}, and the library is loaded")
