"""Each of vLLM's flags, methods of its engine and methods of its workers that may concern this package is known."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from rl_memory_plugins.engines.vllm import modes
from tests.engine_apis import HELP, Place, members, names, unknown

PLACES: list[Place] = [
    ("engine/arg_utils.py", members("EngineArgs", "AsyncEngineArgs")),
    ("entrypoints/openai/cli_args.py", members()),
    ("entrypoints/llm.py", members("LLM")),
    ("entrypoints/offline_utils.py", members()),
    ("v1/engine/llm_engine.py", members("LLMEngine")),
    ("v1/engine/async_llm.py", members("AsyncLLM")),
    ("v1/engine/core.py", members("EngineCore", "EngineCoreProc", "DPEngineCoreProc")),
    ("v1/executor/abstract.py", members("Executor")),
    ("v1/worker/worker_base.py", members("WorkerBase")),
    ("v1/worker/gpu_worker.py", members("Worker")),
    ("v1/worker/cpu_worker.py", members("CPUWorker")),
]
KNOWN = {
    "HONOURED": """
        enable_sleep_mode sleep wake_up is_sleeping discard release_kv_cache_memory
        pause_generation resume_generation is_paused pause_scheduler resume_scheduler is_scheduler_paused
        weight_transfer_config init_weight_transfer_engine shutdown_weight_transfer_engine
        start_weight_update start_draft_weight_update update_weights finish_weight_update supports_draft_weight_updates
        reload_weights reset_weights compute_weight_checksums
        get_weight_version set_weight_version update_weight_version
        load_model cpu_offload_gb cpu_offload_params
    """,
    "REFUSED": """
        offload_group_size kv_offloading_size sleep_mode_backend
    """,
    # Each is honoured or refused; see `modes.py`.
    "OPTIONS OF VLLM'S OWN SLEEP": """
        enable_nccl_comm_suspend sleep_mode_offload_cudagraph sleep_preserve_parameter_names
    """,
    "HARMLESS": """
        reset_*cache release_late_interaction_query_cache determine_available_memory
        gpu_memory_utilization kv_cache_memory_bytes mm_ipc_gpu_memory_gb
        create_load_config load_format use_tqdm_on_load pt_load_map_location safetensors_load_strategy model_weights
        enable_ep_weight_filter update_config update_max_model_len enable_server_load_tracking
        kv_offloading_backend offload_backend offload_num_in_group offload_params offload_prefetch_step
        get_simple_cpu_offload_num_* enable_mamba_shared_prefix_checkpoint
        checkpoint_prepare checkpoint_restore
    """,
}


def test_every_api_is_known() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    found = names(Path(spec.origin).parent, PLACES)
    assert {one.split(": ")[1] for one in found} >= {
        "enable_sleep_mode",
        "wake_up",
        "update_weights",
        "pause_scheduler",
    }
    assert unknown(found, KNOWN) == [], HELP


def test_what_counts_as_refused_is_refused() -> None:
    source = Path(modes.__file__).read_text()
    assert [name for name in KNOWN["REFUSED"].split() if name not in source] == []


def test_an_unknown_api_is_found(tmp_path: Path) -> None:
    arguments = "class EngineArgs:\n    enable_sleep_mode: bool = False\n    unload_weights_when_idle: bool = False\n"
    worker = "class Worker:\n    def swap_out(self): ...\n    def _wake(self): ...\n    def execute_model(self): ...\n"
    for file, source in (("engine/arg_utils.py", arguments), ("v1/worker/gpu_worker.py", worker)):
        path = tmp_path / file
        path.parent.mkdir(parents=True)
        path.write_text(source)
    assert unknown(names(tmp_path, PLACES), KNOWN) == [
        "engine/arg_utils.py: unload_weights_when_idle",
        "v1/worker/gpu_worker.py: swap_out",
    ]
