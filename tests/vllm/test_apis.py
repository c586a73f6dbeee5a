"""Each of vLLM's flags, methods of its engine and methods of its workers that may concern this package is known."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rl_memory_plugins.engines.vllm import modes
from tests.engine_apis import HELP, Place, members, names, unknown

PLACES: list[Place] = [
    ("config/**/*.py", members()),
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
    ("v1/worker/gpu_model_runner.py", members("GPUModelRunner")),
    ("v1/worker/gpu/model_runner.py", members("GPUModelRunner")),
]
KNOWN = {
    "HONOURED": """
        enable_sleep_mode sleep wake_up is_sleeping discard release_kv_cache_memory post_kv_cache_wake_up
        pause_generation resume_generation is_paused pause_scheduler resume_scheduler is_scheduler_paused
        weight_transfer_config init_weight_transfer_engine shutdown_weight_transfer_engine
        start_weight_update start_draft_weight_update update_weights finish_weight_update supports_draft_weight_updates
        apply_sparse_weight_patches reload_weights reset_weights compute_weight_checksums
        get_weight_version set_weight_version update_weight_version load_model
    """,
    # The parameter itself lies in host memory: `tests/unit/engines/test_offloaded.py`. `cpu_offload` is of
    # `--engram-config`, and on for models with n-gram tables.
    "PARAMETERS IN HOST MEMORY": """
        cpu_offload_gb cpu_offload_params cpu_offload
    """,
    "REFUSED": """
        offload_group_size offload_backend kv_offloading_size sleep_mode_backend draft_load_config dp_shared_memory
    """,
    # Each is honoured or refused; see `modes.py`.
    "OPTIONS OF VLLM'S OWN SLEEP": """
        enable_nccl_comm_suspend sleep_mode_offload_cudagraph sleep_preserve_parameter_names
    """,
    # A step of vLLM's own calls. Of what it does, an update by the plugin needs only the last: it derives the draft's
    # quantised output layer again, which is refused as `draft_lm_head_quantization`.
    "STEPS OF CALLS THAT ARE HONOURED": """
        reset_lora_state
    """,
    # If a checkpoint has an output layer that is equal to its embedding, vLLM ties the two after the first load. An
    # update in which they differ then writes one over the other, as vLLM's own reload does.
    "AS WITHOUT THE PLUGIN": """
        word_embeddings_untied_by_checkpoint
    """,
    "HARMLESS": """
        reset_*cache release_late_interaction_query_cache determine_available_memory
        gpu_memory_utilization device_memory_utilization kv_cache_memory_bytes mm_ipc_gpu_memory_gb
        sync_kv_cache_memory_size profile_cudagraph_memory torch_profiler_with_memory is_attention_free
        create_load_config load_config load_format use_tqdm_on_load pt_load_map_location safetensors_load_strategy
        model_weights weight enable_ep_weight_filter offload_config enable_server_load_tracking
        update_config try_verify_and_update_config update_max_model_len update_arch_ update_requests
        update_pp_decode_requests update_sizes_for_sequence_parallelism splitting_ops_contain_kv_cache_update
        free_states enable_mamba_shared_prefix_checkpoint checkpoint_prepare checkpoint_restore
    """,
}
#: What does nothing without an option, and that option is refused.
REFUSED_WITH = {
    "kv_transfer_config": "kv_load_failure_policy get_simple_cpu_offload_num_* simple_cpu_offload_num_blocks",
    "kv_offloading_size": "kv_offloading_backend",
    "offload_group_size": "offload_num_in_group offload_params offload_prefetch_step validate_offload_config",
    "dp_shared_memory": "resolve_dp_shared_memory verify_load_config",
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
        "offload_config",
        "reload_weights",
    }
    assert unknown(found, KNOWN | REFUSED_WITH) == [], HELP


def test_what_counts_as_refused_is_refused() -> None:
    source = Path(modes.__file__).read_text()
    refused = [*KNOWN["REFUSED"].split(), *REFUSED_WITH]
    assert [name for name in refused if f'"{name}"' not in source and f".{name}" not in source] == []


def test_the_checkpoint_of_a_process_reaches_communicators_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """So `checkpoint_prepare` and `checkpoint_restore` are harmless. Not every version has them."""
    from vllm.distributed import parallel_state
    from vllm.v1.worker.gpu_worker import Worker

    class Communicator:
        def __getattr__(self, name: str) -> Callable[[], None]:
            return lambda: called.append(name)

    called: list[str] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(parallel_state, "_apply_to_device_comms", lambda call: call(Communicator()), raising=False)
    has = [name for name in ("checkpoint_prepare", "checkpoint_restore") if hasattr(Worker, name)]
    for name in has:
        getattr(Worker, name)(object())  # a worker without a model
    assert called == has


def test_an_unknown_api_is_found(tmp_path: Path) -> None:
    sources = {
        "engine/arg_utils.py": "class EngineArgs:\n    enable_sleep_mode: bool = False\n"
        "    unload_weights_when_idle: bool = False\n",
        "v1/worker/gpu_worker.py": "class Worker:\n    def swap_out(self): ...\n    def _wake(self): ...\n"
        "    def execute_model(self): ...\n",
        "config/kernel.py": "class KernelConfig:\n    backend: str\n    share_weights: bool = False\n",
    }
    for file, source in sources.items():
        path = tmp_path / file
        path.parent.mkdir(parents=True)
        path.write_text(source)
    assert unknown(names(tmp_path, PLACES), KNOWN | REFUSED_WITH) == [
        "config/kernel.py: share_weights",
        "engine/arg_utils.py: unload_weights_when_idle",
        "v1/worker/gpu_worker.py: swap_out",
    ]
