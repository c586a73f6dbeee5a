"""Whoever asks the model by HTTP goes through the gate: each route of the installed SGLang is known to do so or not."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from rl_memory_plugins.engines.sglang.server import GENERATION
from tests.routes import post_routes

#: They run no model: control, and what is done to text before and after.
OTHERS = """
    /abort_request /v1/responses/{response_id}/cancel /open_session /close_session
    /tokenize /detokenize /v1/tokenize /v1/detokenize /v1/messages/count_tokens
    /parse_function_call /separate_reasoning /api/show
    /release_memory_occupation /resume_memory_occupation /pause_generation /continue_generation /slow_down
    /begin_weight_update /end_weight_update /update_weight_version /weights_checker /get_weights_by_name
    /update_weights_from_disk /update_weights_from_distributed /update_weights_from_ipc /update_weights_from_tensor
    /init_weights_update_group /destroy_weights_update_group /register_transfer_engine_info
    /init_weights_send_group_for_remote_instance /send_weights_to_remote_instance
    /load_lora_adapter /load_lora_adapter_from_tensors /unload_lora_adapter
    /flush_cache /hicache/storage-backend /hicache/storage-backend/clear /clear_hicache_storage_backend
    /add_external_corpus /remove_external_corpus /scale_elastic_ep /pd_role_switch
    /set_internal_state /freeze_gc /dumper/{method} /configure_logging /set_trace_level /start_profile /stop_profile
    /start_expert_distribution_record /stop_expert_distribution_record /dump_expert_distribution_record
""".split()  # noqa: SIM905 (a line for each would be fifty)


def test_every_route_is_known_to_run_the_model_or_not() -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.origin is not None
    routes = post_routes(Path(spec.origin).parent / "srt" / "entrypoints")
    assert {"/v1/completions", "/release_memory_occupation"} <= routes
    assert routes - set(GENERATION) - set(OTHERS) == set()
