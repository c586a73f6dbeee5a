"""What the adapter needs of SGLang, checked in SGLang's sources without importing them.

python -m tests.sglang.symbols PATH_OF_AN_SGLANG_PACKAGE…
"""

from __future__ import annotations

from tests.symbols import Needs, Symbols

ENGINE = "sglang.srt.entrypoints.engine"
SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"
TOKENIZER = "sglang.srt.managers.tokenizer_manager:TokenizerManager"
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"
REMOTE = "sglang.srt.model_loader.remote_instance_weight_loader_utils"
MESSAGES = "sglang.srt.managers.io_struct"
REQUEST = ("self", "recv_req")
CALL = ("self", "obj", "request")

SYMBOLS: Symbols = {
    "sglang.srt.server_args:ServerArgs.add_cli_args": ("parser",),
    "sglang.srt.server_args:ServerArgs.from_cli_args": ("cls", "args"),
    "sglang.srt.plugins:load_plugins": (),
    "sglang.srt.runtime_context:get_parallel": (),
    # the engine and its server
    f"{ENGINE}:Engine.server_args_class": (),
    f"{ENGINE}:Engine._launch_subprocesses": ("cls", "server_args", "run_scheduler_process_func"),
    f"{ENGINE}:Engine.generate": ("self",),
    f"{ENGINE}:Engine.encode": ("self",),
    f"{ENGINE}:Engine.async_generate": ("self",),
    f"{ENGINE}:Engine.async_encode": ("self",),
    f"{ENGINE}:Engine.update_weights_from_ipc": ("self", "zmq_handles", "flush_cache"),
    f"{ENGINE}:run_data_parallel_controller_process": (),
    "sglang.srt.entrypoints.http_server:app": (),
    "sglang.srt.entrypoints.http_server:get_global_state": (),
    "sglang.srt.entrypoints.http_server:_wait_and_warmup": ("server_args", "execute_warmup_func"),
    # the tokenizer's process
    f"{TOKENIZER}.init_request_dispatcher": ("self",),
    f"{TOKENIZER}.generate_request": CALL,
    f"{TOKENIZER}.release_memory_occupation": CALL,
    f"{TOKENIZER}.resume_memory_occupation": CALL,
    f"{TOKENIZER}.update_weights_from_disk": CALL,
    f"{TOKENIZER}.update_weights_from_distributed": CALL,
    f"{TOKENIZER}.update_weights_from_tensor": CALL,
    f"{TOKENIZER}.update_weights_from_ipc": CALL,
    f"{TOKENIZER}.init_weights_update_group": CALL,
    f"{TOKENIZER}.init_weights_send_group_for_remote_instance": CALL,
    f"{TOKENIZER}.send_weights_to_remote_instance": CALL,
    # adapters
    "sglang.srt.lora.lora_manager:LoRAManager.unload_lora_adapter": ("self", "lora_ref"),
    "sglang.srt.lora.lora_config:LoRAConfig.from_dict": ("config_dict",),
    "sglang.srt.lora.mem_pool:LoRAMemoryPool.can_support": ("self", "config"),
    "sglang.srt.lora.lora_registry:LoRARegistry._register_adapter": ("self", "lora_ref"),
    "sglang.srt.lora.lora_registry:LoRARef": (),
    # the schedulers
    f"{SCHEDULER}.__init__": ("self", "server_args"),
    f"{SCHEDULER}._add_request_to_queue": ("self", "req"),
    f"{SCHEDULER}.abort_request": REQUEST,
    f"{SCHEDULER}.continue_generation": REQUEST,
    f"{SCHEDULER}.flush_cache": ("self", "empty_cache"),
    f"{SCHEDULER}.get_next_batch_to_run": ("self",),
    f"{SCHEDULER}.handle_embedding_request": REQUEST,
    f"{SCHEDULER}.handle_generate_request": REQUEST,
    f"{SCHEDULER}.init_request_dispatcher": ("self",),
    f"{SCHEDULER}.is_fully_idle": ("self", "for_health_check"),
    f"{SCHEDULER}.maybe_sleep_on_idle": ("self",),
    f"{SCHEDULER}.pause_generation": REQUEST,
    f"{SCHEDULER}.process_batch_result": ("self", "batch", "result"),
    f"{SCHEDULER}.process_input_requests": ("self", "recv_reqs"),
    f"{SCHEDULER}.init_weights_send_group_for_remote_instance": REQUEST,
    f"{SCHEDULER}.send_weights_to_remote_instance": REQUEST,
    f"{UPDATER}.check_weights": REQUEST,
    f"{UPDATER}.get_weights_by_name": REQUEST,
    f"{UPDATER}.release_memory_occupation": REQUEST,
    f"{UPDATER}.resume_memory_occupation": REQUEST,
    f"{UPDATER}.save_remote_model": ("self", "params"),
    f"{UPDATER}.save_sharded_model": ("self", "params"),
    f"{UPDATER}.update_weights_from_disk": REQUEST,
    f"{UPDATER}.update_weights_from_distributed": REQUEST,
    f"{UPDATER}.update_weights_from_ipc": REQUEST,
    f"{UPDATER}.update_weights_from_tensor": REQUEST,
    # their workers
    "sglang.srt.distributed.device_communicators.pynccl:PyNcclCommunicator.__init__": ("self",),
    "sglang.srt.distributed.device_communicators.custom_all_reduce:CustomAllreduce.__init__": ("self",),
    "sglang.srt.distributed.device_communicators.custom_all_reduce_v2:CustomAllReduceV2.__init__": ("self",),
    "sglang.srt.distributed.parallel_state:get_tp_group": (),
    f"{REMOTE}:register_memory_region_v1": ("model", "transfer_engine"),
    f"{REMOTE}:register_memory_region_v2": ("model", "transfer_engine"),
    "sglang.srt.model_loader.loader:_initialize_model": ("model_config", "load_config"),
    "sglang.srt.utils.torch_memory_saver_adapter:TorchMemorySaverAdapter.create": ("enable",),
    # messages
    f"{MESSAGES}:hook_custom_types": (),
    f"{MESSAGES}:AbortReq": (),
    f"{MESSAGES}:HealthCheckOutput": (),
    f"{MESSAGES}:PauseGenerationReqInput.mode": (),
    f"{MESSAGES}:ContinueGenerationReqInput": (),
    f"{MESSAGES}:ReleaseMemoryOccupationReqInput.tags": (),
    f"{MESSAGES}:ResumeMemoryOccupationReqInput.tags": (),
    f"{MESSAGES}:CheckWeightsReqOutput.success": (),
    f"{MESSAGES}:GetWeightsByNameReqOutput.parameter": (),
    f"{MESSAGES}:UpdateWeightsFromTensorReqOutput.success": (),
}
#: The check of the ranks' free memory: a function, or in 0.5.15.post1 the middle of a method.
BALANCE: tuple[Symbols, ...] = (
    {"sglang.srt.distributed.bootstrap:_check_tp_memory_balance": ("pre_model_load_memory", "local_gpu_memory")},
    {"sglang.srt.model_executor.model_runner:ModelRunner.init_torch_distributed": ("self",)},
)
#: Not in every version, or inherited from a class that the check of sources does not find.
OPTIONAL = (
    "sglang.srt.arg_groups.model_path_hook:validate_transfer_engine",
    "sglang.srt.server_args:ServerArgs.validate_transfer_engine",
    *(f"{ENGINE}:Engine.{name}" for name in ("rerank", "score", "async_score")),
    f"{TOKENIZER}._validate_and_resolve_lora",
    f"{TOKENIZER}._weight_update_session_call",
    f"{TOKENIZER}.is_ready",
    f"{SCHEDULER}.attach_hicache_storage_wrapped",
    f"{SCHEDULER}.handle_update_weight_version",
    "sglang.srt.lora.lora_manager:LoRAManager.load_lora_adapter_from_tensors",
    f"{UPDATER}.begin_weight_update",
    f"{UPDATER}.end_weight_update",
    f"{UPDATER}.post_process_weights",
)
NEEDS = Needs("sglang", SYMBOLS, (BALANCE,), OPTIONAL)

if __name__ == "__main__":
    NEEDS.main()
