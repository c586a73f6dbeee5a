"""Modes of vLLM in which the package's promises cannot be kept. An engine that asks for one is refused at its start.

Some are seen in the arguments, others only in the configuration that vLLM makes of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from rl_memory_plugins.errors import unsupported


class Mode(NamedTuple):
    """A mode: how a user asks for it, whether that was done, and why it is refused."""

    name: str
    is_asked_for: Callable[[Any], Any]
    why: str


_CONNECTORS = (
    "most KV connectors keep keys and values through an update, and requests would be answered from former weights'; "
    "none has been tried"
)
_NATIVE_SLEEP = "it belongs to vLLM's own sleep, which this package replaces"


def _prefetches(args: Any) -> bool:
    """As vLLM decides; version 0.26 has no choice of backends."""
    backend = getattr(args, "offload_backend", "auto")
    return bool(backend == "prefetch" or (backend == "auto" and getattr(args, "offload_group_size", 0)))


#: By the engine's arguments.
REFUSED_ARGUMENTS = (
    Mode(
        "--enable-eplb",
        lambda args: args.enable_eplb,
        "experts change places between updates, which vLLM's loaders do not follow, and a thread of its own may read "
        "the weights while they sleep",
    ),
    Mode("--kv-transfer-config", lambda args: args.kv_transfer_config, _CONNECTORS),
    Mode("--kv-offloading-size", lambda args: args.kv_offloading_size, _CONNECTORS),
    Mode(
        "--ec-transfer-config",
        lambda args: args.ec_transfer_config,
        "stored embeddings of images and audio are by former weights, and outlive an update",
    ),
    Mode(
        "--load-format ipc_cache",
        lambda args: args.load_format == "ipc_cache",
        "the weights are shared with other engines",
    ),
    Mode(
        "--offload-group-size",
        _prefetches,
        "layers take turns in buffers that vLLM fills from copies in host memory; an update does not reach the copies",
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
        "there is no Python server to put the routes and the gate in",
    ),
)


def _experts_behind_several_clients(config: Any) -> bool:
    """Whether each of several servers, or `LLM` objects, reaches only some of the engines that step together."""
    parallel = config.parallel_config
    if parallel.data_parallel_size == 1 or not config.model_config.is_moe:
        return False
    if parallel.distributed_executor_backend == "external_launcher":  # its ranks agree among themselves
        return False
    # The local rank is set here by `VLLM_DP_RANK` alone: a process for each rank, with an engine of its own.
    is_offline = parallel.data_parallel_rank_local is not None
    return bool(parallel.data_parallel_external_lb or parallel.data_parallel_hybrid_lb or is_offline)


#: By the configuration that vLLM makes of the arguments.
REFUSED_CONFIGURATIONS = (
    Mode(
        "--data-parallel-external-lb, --data-parallel-hybrid-lb, --data-parallel-rank or VLLM_DP_RANK, of a model with "
        "experts",
        _experts_behind_several_clients,
        "the engines step together, but each server reaches its own engines only; an engine that wakes alone would "
        "wait for the others without end. Start one server for all engines, with --data-parallel-size",
    ),
)


def refuse_arguments(args: Any) -> None:
    """
    Raises:
        UnsupportedError: names the first of `REFUSED_ARGUMENTS` that was asked for, and why it is refused.
    """
    _refuse(REFUSED_ARGUMENTS, args)


def refuse_configuration(config: Any) -> None:
    """
    Raises:
        UnsupportedError: as `refuse_arguments`, for `REFUSED_CONFIGURATIONS`.
    """
    _refuse(REFUSED_CONFIGURATIONS, config)


def _refuse(modes: tuple[Mode, ...], asked: Any) -> None:
    for mode in modes:
        if mode.is_asked_for(asked):
            raise unsupported(mode.name, mode.why)
