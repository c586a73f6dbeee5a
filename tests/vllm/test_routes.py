"""Whoever asks the model by HTTP goes through the gate: each route of the installed vLLM is known to do so or not."""

from __future__ import annotations

from rl_memory_plugins.engines.vllm.server import GENERATION
from tests.routes import post_routes
from tests.vllm.symbols import NEEDS

#: They run no model: control, and what is done to text before and after.
OTHERS = """
    /abort_requests /inference/v1/abort_requests /v1/responses/{response_id}/cancel
    /tokenize /detokenize /v1/messages/count_tokens
    /v1/chat/completions/render /v1/chat/completions/derender /v1/completions/render /v1/completions/derender
    /v1/messages/render /v1/responses/render /cohere/v2/chat/render
    /collective_rpc /pause /resume /sleep /wake_up /release_kv_cache_memory
    /reset_encoder_cache /reset_mm_cache /reset_prefix_cache
    /init_weight_transfer_engine /shutdown_weight_transfer_engine /start_weight_update /start_draft_weight_update
    /update_weights /finish_weight_update /update_weight_version /weight_checker
    /v1/load_lora_adapter /v1/unload_lora_adapter
    /scale_elastic_ep /is_scaling_elastic_ep /fault_tolerance/apply /start_profile /stop_profile /ping
""".split()  # noqa: SIM905 (a line for each would be fifty)


def test_every_route_is_known_to_run_the_model_or_not() -> None:
    routes = post_routes(NEEDS.installed() / "entrypoints")
    assert {"/v1/completions", "/sleep"} <= routes
    assert routes - set(GENERATION) - set(OTHERS) == set()
