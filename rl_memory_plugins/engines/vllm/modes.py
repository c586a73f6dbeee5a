"""Modes of vLLM in which the contract cannot be kept. They are refused at the start, each with its reason.

Most modes show in the engine's arguments, some only in the configuration that vLLM derives from the arguments.
"""

from __future__ import annotations

import os
from typing import Any

from rl_memory_plugins.engines.vllm.options import suspends_communicators
from rl_memory_plugins.errors import unsupported

_CONNECTORS = (
    "most KV connectors keep keys and values over an update, and the engine would answer requests from those of the "
    "former weights; no connector has been tested"
)


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
    if getattr(args, "sleep_mode_backend", "cumem") != "cumem":  # not in every version
        raise unsupported("--sleep-mode-backend", "this package replaces vLLM's own sleep and would never call it")
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        raise unsupported("VLLM_USE_RUST_FRONTEND", "it has no Python server for the control routes and the gate")


def refuse_resident_graphs(config: Any, why: str) -> None:
    """Refuse `--sleep-mode-offload-cudagraph` where CUDA graphs cannot be released. Elsewhere a sleep releases them.

    Args:
        why: Why the graphs of this rank stay on the device; empty if they can be released.

    Raises:
        UnsupportedError: they stay, and vLLM's own sleep would release them.
    """
    from vllm.platforms import current_platform

    asked = getattr(config.model_config, "sleep_mode_offload_cudagraph", False)  # not in every version
    if asked and why and current_platform.is_cuda_alike() and str(config.compilation_config.cudagraph_mode) != "NONE":
        raise unsupported("--sleep-mode-offload-cudagraph", f"CUDA graphs stay on the device: {why}")


def refuse_configuration(config: Any) -> None:
    """Refuse weights that are not the engine's own, communicators that cannot be suspended, and engines that step
    together but belong to several servers or `LLM` objects, which reach only their own.

    Raises:
        UnsupportedError: names the options, and the reason.
    """
    from vllm.distributed import parallel_state

    _refuse_draft(getattr(config, "speculative_config", None))
    _refuse_shared_tables(config)
    suspends = suspends_communicators(config)
    if suspends and not hasattr(parallel_state, "suspend_device_comms"):
        raise unsupported("nccl_suspend", "this version of vLLM cannot suspend its communicators")
    parallel = config.parallel_config
    if parallel.data_parallel_size == 1 or not config.model_config.is_moe:
        return
    if suspends:
        raise unsupported(
            "nccl_suspend or --enable-nccl-comm-suspend for data-parallel engines of a model with experts",
            "their communicators connect the engines, so an engine that fails to sleep would leave the others waiting",
        )
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


def _refuse_draft(speculative: Any) -> None:
    """Refuse what `--speculative-config` may say of the draft's weights. `speculative` is `None` without a draft.

    Raises:
        UnsupportedError: names the field, and the reason.
    """
    load = getattr(speculative, "draft_load_config", None)
    if load is not None and load.load_format == "ipc_cache":
        mode = "load_format ipc_cache in draft_load_config of --speculative-config"
        raise unsupported(mode, "the weights of the draft are shared with other engines")
    if getattr(speculative, "draft_lm_head_quantization", None):  # since 0.33
        raise unsupported(
            "draft_lm_head_quantization of --speculative-config",
            "an update does not reach the draft's quantised copy of the output layer",
        )


def _refuse_shared_tables(config: Any) -> None:
    """Refuse n-gram tables that data-parallel engines share. DeepSeek V4.1 has them; vLLM shares them by default.

    Raises:
        UnsupportedError: the tables are shared.
    """
    engram = getattr(config, "engram_config", None)  # not in every version
    if not getattr(engram, "dp_shared_memory", False):
        return
    if getattr(config.model_config.hf_text_config, "engram_layer_ids", None):  # other models ignore the field
        raise unsupported(
            "dp_shared_memory of --engram-config, which vLLM sets for data-parallel engines",
            "one engine writes the tables of the others, and each load waits for all of them. "
            """Pass --engram-config '{"dp_shared_memory": false}'""",
        )
