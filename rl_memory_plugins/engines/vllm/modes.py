"""Modes of vLLM in which the contract cannot be kept. They are refused at the start, each with its reason.

Most modes show in the engine's arguments, some only in the configuration that vLLM derives from the arguments.
"""

from __future__ import annotations

import os
from typing import Any

from rl_memory_plugins.errors import unsupported

_CONNECTORS = (
    "most KV connectors keep keys and values over an update, and the engine would answer requests from those of the "
    "former weights; no connector has been tested"
)
#: Options of vLLM's own sleep, and the effect that they would have.
_NATIVE_SLEEP = {
    "enable_nccl_comm_suspend": "the communicators would keep their memory",
    "sleep_mode_offload_cudagraph": "without the flag, this package releases the memory of CUDA graphs under the tag "
    "cuda_graph",
    "sleep_mode_backend": "the backend would never be called",
}


def refuse_arguments(args: Any) -> None:
    """Refuse modes that show in the engine's arguments.

    Raises:
        UnsupportedError: names the first mode that is set, and the reason.
    """
    if args.enable_eplb:
        raise unsupported(
            "--enable-eplb",
            "experts change places between updates, vLLM's loaders do not follow them, and a background thread may "
            "read sleeping weights",
        )
    for option in ("kv_transfer_config", "kv_offloading_size"):
        if getattr(args, option):
            raise unsupported(f"--{option.replace('_', '-')}", _CONNECTORS)
    if args.ec_transfer_config:
        why = "stored embeddings of images and audio come from former weights and outlive an update"
        raise unsupported("--ec-transfer-config", why)
    if args.load_format == "ipc_cache":
        raise unsupported("--load-format ipc_cache", "the weights are shared with other engines")
    offload = getattr(args, "offload_backend", "auto")  # vLLM 0.26 has no such option
    if offload == "prefetch" or (offload == "auto" and getattr(args, "offload_group_size", 0)):
        raise unsupported(
            "--offload-group-size",
            "layers share device buffers that vLLM fills from host copies, and an update does not reach these copies",
        )
    for option, effect in _NATIVE_SLEEP.items():
        value = getattr(args, option, None)
        if value and value != "cumem":  # the default backend
            why = f"it is an option of vLLM's own sleep, which this package replaces; {effect}"
            raise unsupported(f"--{option.replace('_', '-')}", why)
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        raise unsupported("VLLM_USE_RUST_FRONTEND", "it has no Python server for the control routes and the gate")


def refuse_configuration(config: Any) -> None:
    """Refuse engines that step together but belong to several servers or `LLM` objects, which reach only their own.

    Raises:
        UnsupportedError: names the options, and the reason.
    """
    parallel = config.parallel_config
    if parallel.data_parallel_size == 1 or not config.model_config.is_moe:
        return
    if parallel.distributed_executor_backend == "external_launcher":  # its ranks agree by themselves
        return
    # Only `VLLM_DP_RANK` sets the local rank: each rank is then a process with an engine of its own.
    is_offline = parallel.data_parallel_rank_local is not None
    if parallel.data_parallel_external_lb or parallel.data_parallel_hybrid_lb or is_offline:
        raise unsupported(
            "--data-parallel-external-lb, --data-parallel-hybrid-lb, --data-parallel-rank or VLLM_DP_RANK for a model "
            "with experts",
            "the engines step together, but each server reaches only its own engines, so an engine that wakes alone "
            "would wait for the others without end. Start one server for all engines, with --data-parallel-size",
        )
