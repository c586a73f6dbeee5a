"""Modes of vLLM in which the contract cannot be kept. They are refused at the start, each with its reason.

Most modes show in the engine's arguments, some only in the configuration that vLLM derives from the arguments.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from rl_memory_plugins.errors import unsupported


class Mode(NamedTuple):
    """The option of a mode, a test whether the option is set, and the reason of the refusal."""

    name: str
    is_asked_for: Callable[[Any], Any]
    why: str


_CONNECTORS = (
    "most KV connectors keep keys and values over an update, and the engine would answer requests from those of the "
    "former weights; no connector has been tested"
)
_NATIVE_SLEEP = "it is an option of vLLM's own sleep, which this package replaces"


def _prefetches(args: Any) -> bool:
    """Whether vLLM uses its prefetch offloader. Version 0.26 has no `offload_backend`."""
    backend = getattr(args, "offload_backend", "auto")
    return bool(backend == "prefetch" or (backend == "auto" and getattr(args, "offload_group_size", 0)))


#: Modes that show in the engine's arguments.
REFUSED_ARGUMENTS = (
    Mode(
        "--enable-eplb",
        lambda args: args.enable_eplb,
        "experts change places between updates, vLLM's loaders do not follow them, and a background thread may read "
        "sleeping weights",
    ),
    Mode("--kv-transfer-config", lambda args: args.kv_transfer_config, _CONNECTORS),
    Mode("--kv-offloading-size", lambda args: args.kv_offloading_size, _CONNECTORS),
    Mode(
        "--ec-transfer-config",
        lambda args: args.ec_transfer_config,
        "stored embeddings of images and audio come from former weights and outlive an update",
    ),
    Mode(
        "--load-format ipc_cache",
        lambda args: args.load_format == "ipc_cache",
        "the weights are shared with other engines",
    ),
    Mode(
        "--offload-group-size",
        _prefetches,
        "layers share device buffers that vLLM fills from host copies, and an update does not reach these copies",
    ),
    Mode(
        "--sleep-preserve-parameter-names",
        lambda args: getattr(args, "sleep_preserve_parameter_names", None),
        f"{_NATIVE_SLEEP}; the parameters would be discarded at level 2 like all others",
    ),
    Mode(
        "--enable-nccl-comm-suspend",
        lambda args: getattr(args, "enable_nccl_comm_suspend", False),
        f"{_NATIVE_SLEEP}; the communicators would keep their memory",
    ),
    Mode(
        "--sleep-mode-offload-cudagraph",
        lambda args: getattr(args, "sleep_mode_offload_cudagraph", False),
        f"{_NATIVE_SLEEP}; without the flag, this package releases the memory of CUDA graphs under the tag cuda_graph",
    ),
    Mode(
        "--sleep-mode-backend",
        lambda args: getattr(args, "sleep_mode_backend", "cumem") != "cumem",
        f"{_NATIVE_SLEEP}; the backend would never be called",
    ),
    Mode(
        "VLLM_USE_RUST_FRONTEND",
        lambda args: os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"),
        "it has no Python server for the control routes and the gate",
    ),
)


def _experts_behind_several_clients(config: Any) -> bool:
    """Whether engines that step together belong to several servers or `LLM` objects, which reach only their own."""
    parallel = config.parallel_config
    if parallel.data_parallel_size == 1 or not config.model_config.is_moe:
        return False
    if parallel.distributed_executor_backend == "external_launcher":  # its ranks agree by themselves
        return False
    # Only `VLLM_DP_RANK` sets the local rank: each rank is then a process with an engine of its own.
    is_offline = parallel.data_parallel_rank_local is not None
    return bool(parallel.data_parallel_external_lb or parallel.data_parallel_hybrid_lb or is_offline)


#: Modes that show in vLLM's configuration only.
REFUSED_CONFIGURATIONS = (
    Mode(
        "--data-parallel-external-lb, --data-parallel-hybrid-lb, --data-parallel-rank or VLLM_DP_RANK for a model with "
        "experts",
        _experts_behind_several_clients,
        "the engines step together, but each server reaches only its own engines, so an engine that wakes alone would "
        "wait for the others without end. Start one server for all engines, with --data-parallel-size",
    ),
)


def refuse_arguments(args: Any) -> None:
    """Refuse the modes of `REFUSED_ARGUMENTS`.

    Raises:
        UnsupportedError: names the first mode that is set, and the reason.
    """
    _refuse(REFUSED_ARGUMENTS, args)


def refuse_configuration(config: Any) -> None:
    """Refuse the modes of `REFUSED_CONFIGURATIONS`; raises as `refuse_arguments` does."""
    _refuse(REFUSED_CONFIGURATIONS, config)


def _refuse(modes: tuple[Mode, ...], asked: Any) -> None:
    for mode in modes:
        if mode.is_asked_for(asked):
            raise unsupported(mode.name, mode.why)
