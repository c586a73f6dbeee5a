"""Each of SGLang's options, requests and handlers of requests that may concern this package is known."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from rl_memory_plugins.engines.sglang import modes
from tests.engine_apis import HELP, Place, members, names, requests, unknown

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
]
KNOWN = {
    "HONOURED": """
        enable_memory_saver enable_weights_cpu_backup enable_draft_weights_cpu_backup weight_version sleep_on_idle
        release_memory_occupation* resume_memory_occupation* pause_generation* pause_continue_broadcast_req is_pause
        begin_weight_update* end_weight_update* check_weights* get_weights_by_name* *update_weight_version*
        update_weights_from_* update_weight_from_disk* *init_weights_update_group* destroy_weights_update_group*
        init_weights_send_group_for_remote_instance* send_weights_to_remote_instance* remote_instance_weight_loader_*
        custom_weight_loader checkpoint_engine_wait_weights_before_ready cpu_offload_gb
        *load_lora_adapter* *load_lo_raadapter*
    """,
    "REFUSED": """
        weight_cache_mode offload_group_size kt_weight_path
    """,
    # They need one of the options that are refused, or SGLang refuses them with the memory saver.
    "REFUSED WITH ANOTHER OPTION": """
        weight_cache_socket weight_cache_timeout offload_mode offload_num_in_group offload_prefetch_step
        startup_weight_load_mode is_startup_weight_load_overlap disaggregation_decode_enable_offload_kvcache
        *elastic_scale_update* update_expert_backup_req
    """,
    "HARMLESS": """
        load_format speculative_draft_load_format weight_loader_* modelopt_checkpoint_* ple_offload_*
        load_balance_method load_publish_endpoint *load_snapshot* init_load_* mamba_full_memory_ratio
        enable_int8_mamba_checkpoint enable_unified_memory disable_hybrid_swa_memory min_free_slots_delay
        hicache_host_memory_* init_memory_pools init_target_memory_pool init_watch_dog_memory_saver_input_blocker
        init_weight_update init_weight_updater maybe_sleep_on_idle release_host_resources memory_saver_adapter
        offload_tags loaded_weights flush_cache_after_weight_update record_weight_version_* record_config_updates
        update_cache_from_scheduler update_running_batch update_active_ranks update_request_meta_info
        update_control_communicator_fan_out
    """,
}


def test_every_api_is_known() -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.origin is not None
    found = names(Path(spec.origin).parent, PLACES)
    assert {one.split(": ")[1] for one in found} >= {
        "enable_memory_saver",
        "release_memory_occupation_req_input",
        "update_weights_from_tensor",
        "pause_generation",
    }
    assert unknown(found, KNOWN) == [], HELP


def test_what_counts_as_refused_is_refused() -> None:
    source = Path(modes.__file__).read_text()
    assert [name for name in KNOWN["REFUSED"].split() if name not in source] == []


def test_an_unknown_api_is_found(tmp_path: Path) -> None:
    messages = "class OffloadWeightsReqInput: ...\nclass OffloadWeightsReqOutput: ...\nclass TokenizedReq: ...\n"
    options = "class Memory:\n    enable_memory_saver: bool = False\n    discard_weights_when_idle: bool = False\n"
    for file, source in (("srt/managers/io_struct.py", messages), ("srt/arg_groups/fields/memory.py", options)):
        path = tmp_path / file
        path.parent.mkdir(parents=True)
        path.write_text(source)
    assert unknown(names(tmp_path, PLACES), KNOWN) == [
        "srt/arg_groups/fields/memory.py: discard_weights_when_idle",
        "srt/managers/io_struct.py: offload_weights_req_input",
    ]
