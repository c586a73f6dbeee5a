"""Modes of SGLang in which the contract cannot be kept. They are refused at the start, each with its reason."""

from __future__ import annotations

from typing import Any

from rl_memory_plugins.errors import unsupported

RAY = ("Ray schedulers", "their actors load no plugins")
LOCAL_CONTROL = (
    "local control broadcast of DP attention",
    "its ranks receive a request at different steps, so they cannot agree on a transition",
)
STORED = "it stores keys and values of the current weights, and requests after an update would find them again"


def refuse_servers(server_args: Any) -> None:
    """Refuse servers that start their processes by themselves: no plugin reaches these processes.

    Raises:
        UnsupportedError: names the option.
    """
    for option in ("encoder_only", "smg_grpc_mode", "grpc_mode"):
        if getattr(server_args, option, False):
            raise unsupported(f"--{option.replace('_', '-')}", "this server starts processes that no plugin reaches")


def refuse_modes(server_args: Any) -> None:
    """Refuse modes with processes that no plugin reaches, and modes in which a call cannot be made safe.

    Raises:
        UnsupportedError: names the mode and why.
    """
    from sglang.srt.environ import envs

    refuse_servers(server_args)
    if server_args.tokenizer_worker_num > 1:
        raise unsupported("--tokenizer-worker-num > 1", "its workers load no plugins")
    rust = getattr(envs, "SGLANG_RUST_SERVER", None)
    if rust is not None and rust.get():
        raise unsupported("SGLANG_RUST_SERVER", "it has no Python server to put the routes and the gate in")
    if getattr(server_args, "use_ray", False):
        raise unsupported(*RAY)
    if getattr(server_args, "weight_cache_mode", "off") != "off":
        raise unsupported("--weight-cache-mode", "the weights are shared with other engines and cannot be released")
    loads = (server_args.load_format, getattr(server_args, "speculative_draft_load_format", None))
    if (
        "remote_instance" in loads
        and getattr(server_args, "remote_instance_weight_loader_backend", "") == "modelexpress"
    ):
        raise unsupported(
            "--remote-instance-weight-loader-backend modelexpress",
            "it registers the memory of the weights by itself, and a sleep could not end the registration",
        )
    if getattr(server_args, "offload_group_size", -1) > 0:
        why = "layers are moved to memory that no sleep releases, and in some modes to copies that no update reaches"
        raise unsupported("--offload-group-size", why)
    if getattr(server_args, "ple_offload_backend", "pinned") == "file":
        why = "all engines of a checkpoint map one file, and an update or a start of one changes weights of the others"
        raise unsupported("--ple-offload-backend file", why)
    if getattr(server_args, "kt_weight_path", None):
        raise unsupported("--kt-weight-path", "experts are computed on the CPU from copies that no update reaches")
    if getattr(server_args, "dllm_algorithm", None):
        raise unsupported("--dllm-algorithm", "running requests also wait in queues that SGLang's pauses do not empty")
    if server_args.pp_size > 1:
        _refuse_pipelines(server_args)
    if server_args.disaggregation_mode not in (None, "null"):
        raise unsupported("--disaggregation-mode", "the other side reads the KV cache at any time")
    if server_args.enable_eplb:
        raise unsupported("--enable-eplb", "experts change places between updates, and the plugin does not follow them")
    if server_args.elastic_ep_backend is not None:
        raise unsupported("--elastic-ep-backend", "ranks that come and go cannot agree on a sleep")
    if getattr(server_args, "enable_pdmux", False):
        raise unsupported("--enable-pdmux", "its event loop ignores a pause")
    if server_args.hicache_storage_backend is not None:
        raise unsupported("--hicache-storage-backend", STORED)
    for option in ("enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker"):
        if getattr(server_args, option, False):
            raise unsupported(f"--{option.replace('_', '-')}", STORED)
    if getattr(server_args, "release_hicache", False):  # of slime's patch
        raise unsupported("--release-hicache", "it belongs to SGLang's own release, which this package replaces")
    if getattr(server_args, "radix_cache_backend", None) == "flexkv":
        raise unsupported("--radix-cache-backend=flexkv", STORED)
    is_local = getattr(server_args, "enable_dp_attention_local_control_broadcast", False)
    if is_local or (getattr(server_args, "dwdp_size", None) or 1) > 1:  # SGLang turns it on for the latter, later
        raise unsupported(*LOCAL_CONTROL)
    device = str(server_args.device or "cuda").partition(":")[0]
    if device not in ("cpu", "cuda"):
        raise unsupported(f"--device {device}", "no allocator supports it: use CUDA, ROCm or CPU")
    if not server_args.enable_memory_saver and server_args.device != "cpu":
        raise unsupported("enable_memory_saver=False", "SGLang sizes and registers memory by this argument; pass True")


def _refuse_pipelines(server_args: Any) -> None:
    """Refuse what cannot be kept honest over pipeline stages.

    Raises:
        UnsupportedError: names the options and why.
    """
    if getattr(server_args, "speculative_algorithm", None):
        raise unsupported("--pp-size > 1 with a draft model", "only the last stage has the draft")
    attention_dp = getattr(server_args, "enable_dp_attention", False)
    if attention_dp or (getattr(server_args, "attn_dp_size", None) or 1) > 1:
        why = "its ranks have requests of their own, and must find the pipeline empty at the same step"
        raise unsupported("--pp-size > 1 with DP attention", why)
