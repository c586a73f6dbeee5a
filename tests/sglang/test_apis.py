"""Each of SGLang's options, requests and handlers of requests that may concern this package is known."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from rl_memory_plugins.engines.sglang import modes
from tests.engine_apis import HELP, Place, functions, members, names, requests, unknown

PLACES: list[Place] = [
    ("srt/server_args.py", members("ServerArgs")),
    ("srt/arg_groups/fields/*.py", members()),
    ("srt/entrypoints/engine.py", members("Engine")),
    ("srt/entrypoints/EngineBase.py", members()),
    ("srt/managers/io_struct.py", requests),
    ("srt/managers/tokenizer_control_mixin.py", members()),
    ("srt/managers/tokenizer_manager.py", members("TokenizerManager")),
    ("srt/managers/scheduler.py", members("Scheduler")),
    ("srt/managers/scheduler_components/weight_updater.py", members()),
    ("srt/managers/tp_worker.py", members()),
    ("srt/model_executor/model_runner*.py", members()),
    ("srt/model_executor/model_runner_components/**/*.py", members()),
    ("srt/model_executor/model_runner_components/**/*.py", functions),
]
KNOWN = {
    "HONOURED": """
        enable_memory_saver enable_weights_cpu_backup enable_draft_weights_cpu_backup weight_version sleep_on_idle
        release_memory_occupation* resume_memory_occupation* pause_generation* pause_continue_broadcast_req is_pause
        begin_weight_update* end_weight_update* check_weights* get_weights_by_name* *update_weight_version*
        update_weights_from_* update_weight_from_disk* *init_weights_update_group* destroy_weights_update_group*
        init_weights_send_group_for_remote_instance* send_weights_to_remote_instance* remote_instance_weight_loader_*
        *custom_weight_loader* checkpoint_engine_wait_weights_before_ready *load_lora_adapter* *load_lo_raadapter*
        load_model load_model_with_memory_saver
    """,
    # The parameter itself lies in host memory: `tests/unit/engines/test_offloaded.py`.
    "PARAMETERS IN HOST MEMORY": """
        cpu_offload_gb ple_offload_embedding
    """,
    # No other way leads to them.
    "STEPS OF CALLS AND STARTS THAT ARE HONOURED": """
        load_weights_from_distributed receive_weights_from_distributed weight_update_runners update_model_fields
        init_weight_exporter init_remote_instance_weight_transporter maybe_register_and_publish_weight_info weight_info
        remote_instance_weight_info init_memory_saver_adapter memory_saver_adapter loaded_weights offload_tags
        flush_cache_after_weight_update record_weight_version_* init_weight_update init_weight_updater
    """,
    "REFUSED": """
        weight_cache_mode offload_group_size kt_weight_path ple_offload_backend speculative_draft_load_format
    """,
    "REFUSED BY SGLANG WITH THE MEMORY SAVER": """
        *startup_weight_load*
    """,
    # With more than one rank SGLang makes DTensors of the weights of its `TorchNative*` models. Their data has no
    # address: each sleep of the weights is a `RuntimeError`, and an update too.
    "NO SLEEP WORKS, AND SAYS SO": """
        maybe_apply_post_load_model_transforms
    """,
    "HARMLESS": """
        load_format weight_loader_* modelopt_checkpoint_* build_load_config weight_load_time dist_barrier_after_load
        load_balance_method load_publish_endpoint *load_snapshot* init_load_* mamba_full_memory_ratio
        load_kv_cache_scales enable_int8_mamba_checkpoint enable_unified_memory unified_memory_pool_bytes
        disable_hybrid_swa_memory min_free_slots_delay hicache_host_memory_* init_memory_pool init_memory_pools
        alloc_memory_pool get_memory_pool prealloc_symmetric_memory_pool init_target_memory_pool
        init_watch_dog_memory_saver_input_blocker graph_memory_usage memory_phase memory_usage memory_usage_gb
        refresh_deep_gemm_layout_memory_budget maybe_sleep_on_idle release_host_resources record_config_updates
        update_cache_from_scheduler update_running_batch update_active_ranks update_request_meta_info
        update_control_communicator_fan_out update_decode_attn_backend update_after_decode update_after_verify
        maybe_update_ngram_token_table update_ngram_token_table_after_sampling
        should_skip_auto_prefill_cuda_graph_for_memory
    """,
}
#: What does nothing without an option, and that option is refused.
REFUSED_WITH = {
    "weight_cache_mode": """
        weight_cache_socket weight_cache_timeout maybe_enable_ipc_weight_cache preloaded_weights_bytes
        account_preloaded_weights
    """,
    "offload_group_size": "offload_mode offload_num_in_group offload_prefetch_step",
    "ple_offload_backend": "ple_offload_dir",
    "disaggregation_mode": "disaggregation_decode_enable_offload_kvcache",
    "elastic_ep_backend": "*elastic_scale_update* update_expert_backup_req",
    "enable_eplb": "update_expert_location",
}


def folder() -> Path:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def test_every_api_is_known() -> None:
    found = names(folder(), PLACES)
    assert {one.split(": ")[1] for one in found} >= {
        "enable_memory_saver",
        "release_memory_occupation_req_input",
        "update_weights_from_tensor",
        "pause_generation",
        "alloc_memory_pool",
        "load_model",
    }
    assert unknown(found, KNOWN | REFUSED_WITH) == [], HELP


def test_what_counts_as_refused_is_refused() -> None:
    source = Path(modes.__file__).read_text()
    refused = [*KNOWN["REFUSED"].split(), *REFUSED_WITH]
    assert [name for name in refused if f'"{name}"' not in source and f".{name}" not in source] == []


def test_sglang_itself_refuses_to_load_weights_after_graphs_with_the_memory_saver() -> None:
    """`--startup-weight-load-mode overlap` would fill them after the plugin has seen them. Not in every version."""
    for file in folder().glob("srt/model_executor/**/startup_weight_load.py"):
        assert "(options.enable_memory_saver," in file.read_text()


def test_an_unknown_api_is_found(tmp_path: Path) -> None:
    sources = {
        "srt/managers/io_struct.py": "class OffloadWeightsReqInput: ...\nclass OffloadWeightsReqOutput: ...\n"
        "class TokenizedReq: ...\n",
        "srt/arg_groups/fields/memory.py": "class Memory:\n    enable_memory_saver: bool = False\n"
        "    discard_weights_when_idle: bool = False\n",
        "srt/managers/tp_worker.py": "class TpModelWorker:\n    def swap_weights(self): ...\n    def run(self): ...\n",
        "srt/model_executor/model_runner_components/swap.py": "def unload(model): ...\ndef _load(model): ...\n",
    }
    for file, source in sources.items():
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    assert unknown(names(tmp_path, PLACES), KNOWN | REFUSED_WITH) == [
        "srt/arg_groups/fields/memory.py: discard_weights_when_idle",
        "srt/managers/io_struct.py: offload_weights_req_input",
        "srt/managers/tp_worker.py: swap_weights",
        "srt/model_executor/model_runner_components/swap.py: unload",
    ]
