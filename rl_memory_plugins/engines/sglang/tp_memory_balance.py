"""SGLang's check that all tensor-parallel ranks see the same free memory.

SGLang stops the start when they differ. In colocated training they usually differ, so here they give a warning.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.engines.sglang import worker
from rl_memory_plugins.hooking import Hooks
from rl_memory_plugins.memory.host_memory import host_memory_info

logger = logging.getLogger(__name__)

MODULE = "sglang.srt.distributed.bootstrap"
CHECK = f"{MODULE}:_check_tp_memory_balance"
METHOD_WITH_CHECK = "sglang.srt.model_executor.model_runner:ModelRunner.init_torch_distributed"  # where MODULE is not
LEGACY_VARIABLE = "SGL_DISABLE_TP_MEMORY_INBALANCE_CHECK"  # SGLang no longer reads it, but users still export it
THRESHOLD = 0.9  # SGLang's own


def install(hooks: Hooks) -> None:
    if find_spec(MODULE) is not None:
        hooks.wrap(CHECK, _check)
    else:
        hooks.wrap(METHOD_WITH_CHECK, _init_torch_distributed)


def _check(original: Callable[..., None]) -> Callable[..., None]:
    def check(*, pre_model_load_memory: float, local_gpu_memory: float) -> None:
        config = worker.config()
        if config is None:
            original(pre_model_load_memory=pre_model_load_memory, local_gpu_memory=local_gpu_memory)
        else:
            _compare(local_gpu_memory, config)

    return check


def _init_torch_distributed(original: Callable[[Any], float]) -> Callable[[Any], float]:
    """Let SGLang's check in the middle of the method give a warning only, and make the check of this file after it."""

    def init_torch_distributed(self: Any) -> float:
        config = worker.config()
        if config is None:
            return original(self)
        from sglang.srt.environ import envs
        from sglang.srt.utils import get_available_gpu_memory

        with envs.SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK.override(False):
            lowest = original(self)
        if self.tp_size > 1 and not self.is_draft_worker:
            _compare(get_available_gpu_memory(self.device, self.gpu_id), config)
        return lowest

    return init_torch_distributed


def _compare(free: float, config: RLMemoryConfig) -> None:
    """Compare the free memory of all ranks, in GiB. All ranks call it together.

    Raises:
        RuntimeError: the ranks differ, and the configuration asks for an end of the start.
    """
    ranks = _all_ranks(free)
    if min(rank["free"] for rank in ranks) >= THRESHOLD * max(rank["free"] for rank in ranks):
        return
    text = diagnosis(ranks, config)
    if ranks[0]["rank"] == _tp_rank():
        logger.warning(text)
    if is_strict(config):
        raise RuntimeError(text)


def is_strict(config: RLMemoryConfig) -> bool:
    """Whether an imbalance stops the start: the option asks for it, and the legacy variable forbids it."""
    legacy = os.environ.get(LEGACY_VARIABLE, "").strip().lower()
    return config.strict_tp_balance and legacy not in ("1", "true", "yes", "on")


def diagnosis(ranks: list[dict[str, Any]], config: RLMemoryConfig) -> str:
    """A text for the log: free memory by rank, the processes that hold the rest, the usual cause, and the remedy.

    Args:
        ranks: Of each rank: `rank`, `device`, `free` and `total` (GiB), `processes` (pairs of pid and GiB;
            None if they cannot be read).
    """
    lines = [f"Free memory differs by more than {1 - THRESHOLD:.0%} between the tensor-parallel ranks:"]
    for rank in ranks:
        used = rank["total"] - rank["free"]
        line = f"  rank {rank['rank']} on {rank['device']}: {rank['free']:.2f} GiB free, {used:.2f} GiB used"
        if rank["processes"] is None:
            line += " (NVML does not name the processes)"
        elif rank["processes"]:
            line += ", held by " + ", ".join(f"process {pid} ({size:.2f} GiB)" for pid, size in rank["processes"])
        lines.append(line)
    lines.append(
        "In colocated training this is usual: trainers load at different times, have uneven shards, and release "
        "offloaded parameters rank by rank. SGLang sizes the KV cache of all ranks by the rank with the least free "
        "memory. For a larger KV cache, offload the trainer and empty its CUDA cache on every rank before the start."
    )
    if is_strict(config):
        lines.append(f"strict_tp_balance=true stops the start here; {LEGACY_VARIABLE}=1 lets the start go on.")
    else:
        lines.append("The start goes on; strict_tp_balance=true would stop it here.")
    return "\n".join(lines)


def _all_ranks(free: float) -> list[dict[str, Any]]:
    """Every rank's memory, in the order of ranks. All ranks call it together."""
    import torch
    from sglang.srt.distributed import get_tp_group
    from torch import distributed

    mine: dict[str, Any] = {"rank": _tp_rank(), "free": free, "device": "the host", "processes": None}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        mine |= {"device": f"GPU-{properties.uuid}", "total": properties.total_memory / (1 << 30)}
        mine["processes"] = _processes(mine["device"])
    else:
        mine["total"] = host_memory_info()[1] / (1 << 30)
    group = get_tp_group()
    ranks: list[Any] = [None] * group.world_size
    distributed.all_gather_object(ranks, mine, group=group.cpu_group)
    return ranks


def _tp_rank() -> int:
    from sglang.srt.distributed import get_tp_group

    return int(get_tp_group().rank_in_group)


def _processes(uuid: str) -> list[tuple[int, float]] | None:
    """The processes that hold memory of a GPU, with GiB each, largest first."""
    try:
        import pynvml

        pynvml.nvmlInit()
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByUUID(uuid))
    except Exception:  # not installed, no driver, or not permitted in this container
        return None
    held = [(process.pid, (process.usedGpuMemory or 0) / (1 << 30)) for process in running]
    return sorted(held, key=lambda pair: -pair[1])
