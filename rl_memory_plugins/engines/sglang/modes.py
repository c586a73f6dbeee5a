"""Modes of SGLang in which the contract cannot be kept. They are refused at the start, each with its reason."""

from __future__ import annotations

from typing import Any

from rl_memory_plugins.errors import unsupported

RAY = ("Ray schedulers", "their actors load no plugins")
STORED = "what it stores is of the weights of its time, and is found again after an update"


def refuse_servers(server_args: Any) -> None:
    """Servers that start their processes by themselves: no launch is seen there, and no hook put in.

    Raises:
        UnsupportedError: names the option.
    """
    for option in ("encoder_only", "smg_grpc_mode", "grpc_mode"):
        if getattr(server_args, option, False):
            raise unsupported(f"--{option.replace('_', '-')}", "that server starts processes that no plugin reaches")


def refuse_modes(server_args: Any) -> None:
    """Modes in which processes exist that no plugin reaches, or that no call can be kept safe in.

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
    if server_args.pp_size > 1:
        raise unsupported("--pp-size > 1", "a stage forwards a request only after handling it, so stages cannot agree")
    if server_args.disaggregation_mode not in (None, "null"):
        raise unsupported("--disaggregation-mode", "transfers read the KV cache whenever the other side wants")
    if server_args.enable_eplb:
        raise unsupported("--enable-eplb", "experts change places between updates, which is not followed here")
    if server_args.elastic_ep_backend is not None:
        raise unsupported("--elastic-ep-backend", "ranks that come and go cannot agree on a sleep")
    if getattr(server_args, "enable_pdmux", False):
        raise unsupported("--enable-pdmux", "its loop takes no notice of a pause")
    if server_args.hicache_storage_backend is not None:
        raise unsupported("--hicache-storage-backend", STORED)
    for option in ("enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker"):
        if getattr(server_args, option, False):
            raise unsupported(f"--{option.replace('_', '-')}", STORED)
    if getattr(server_args, "radix_cache_backend", None) == "flexkv":
        raise unsupported("--radix-cache-backend=flexkv", STORED)
    if not server_args.enable_memory_saver and server_args.device != "cpu":
        raise unsupported("enable_memory_saver=False", "SGLang sizes and registers memory by it; pass True")
