"""What the adapter needs of vLLM, checked in vLLM's sources without importing them.

python -m tests.vllm.symbols PATH_OF_A_VLLM_PACKAGE…
"""

from __future__ import annotations

from tests.symbols import Needs, Symbols

#: "module:Class.method", or with a signature's parameters that are given by name or position.
SYMBOLS: Symbols = {
    "vllm.engine.arg_utils:EngineArgs.add_cli_args": ("parser",),
    "vllm.engine.arg_utils:EngineArgs.create_engine_config": ("self",),
    "vllm.plugins:load_general_plugins": (),
    # the worker
    "vllm.v1.worker.worker_base:WorkerBase.__init__": ("self", "vllm_config", "local_rank", "rank"),
    "vllm.v1.worker.gpu_worker:Worker._maybe_get_memory_pool_context": ("self", "tag"),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_model": ("self",),
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.get_model": ("self",),
    "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm": ("layer", "remove_weight"),
    "vllm.model_executor.model_loader.reload.layerwise:finalize_layerwise_processing": ("model", "model_config"),
    "vllm.model_executor.model_loader.reload.layerwise:get_layerwise_info": ("layer",),
    "vllm.model_executor.model_loader.reload.layerwise:restore_layer_on_meta": (),
    "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory": (),
    "vllm.distributed.weight_transfer.base:WeightTransferEngine": (),
    "vllm.v1.engine.core:EngineCore.add_request": ("self", "request"),
    "vllm.model_executor.model_loader.reload.layerwise:initialize_layerwise_reload": ("model",),
    "vllm.model_executor.model_loader.reload.layerwise:_place_kernel_tensors": ("layer", "info"),
    "vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model": ("self",),
    "vllm.v1.worker.gpu_worker:Worker.execute_dummy_batch": ("self",),
    "vllm.platforms.interface:Platform._global_graph_pool": (),
    "vllm.platforms.interface:Platform.is_cpu": ("self",),
    "vllm.v1.worker.gpu_worker:Worker.start_weight_update": ("self",),
    "vllm.v1.worker.gpu_worker:Worker.update_weights": ("self", "update_info"),
    "vllm.v1.worker.gpu_worker:Worker.finish_weight_update": ("self",),
    "vllm.model_executor.model_loader.reload.meta:restore_layer_on_meta": (),
    "vllm.model_executor.model_loader.reload.meta:SKIP_TENSORS": (),
    "vllm.model_executor.model_loader.reload.meta:materialize_meta_tensor": ("meta_tensor",),
    "vllm.model_executor.model_loader.weight_utils:default_weight_loader": ("param", "loaded_weight"),
    "vllm.model_executor.model_loader.utils:record_metadata_for_reloading": (),
    "vllm.model_executor.model_loader.dummy_loader:DummyModelLoader.load_weights": ("self", "model"),
    "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase": (),
    "vllm.distributed.device_communicators.pynccl:PyNcclCommunicator.__init__": ("self",),
    "vllm.distributed.device_communicators.custom_all_reduce:CustomAllreduce.__init__": ("self",),
    "vllm.distributed.device_communicators.custom_all_reduce:CustomAllreduce.all_reduce": ("self", "registered"),
    "vllm.model_executor.layers.linear:UnquantizedLinearMethod": (),
    "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding": (),
    "vllm.config:set_current_vllm_config": (),
    "vllm.v1.serial_utils:run_method": ("obj", "method", "args", "kwargs"),
    # the engine core
    "vllm.v1.engine.core:EngineCore._initialize_kv_caches": ("self", "vllm_config"),
    "vllm.v1.engine.core:EngineCore.sleep": ("self", "level", "mode"),
    "vllm.v1.engine.core:EngineCore.wake_up": ("self", "tags"),
    "vllm.v1.engine.core:EngineCore.is_sleeping": ("self",),
    "vllm.v1.engine.core:EngineCore.pause_scheduler": ("self", "mode", "clear_cache"),
    "vllm.v1.engine.core:EngineCore.resume_scheduler": ("self",),
    "vllm.v1.engine.core:EngineCore.is_scheduler_paused": ("self",),
    "vllm.v1.engine.core:EngineCore.reset_prefix_cache": ("self", "reset_running_requests", "reset_connector"),
    "vllm.v1.engine.core:EngineCore.reset_encoder_cache": ("self",),
    "vllm.v1.engine.core:EngineCore.collective_rpc": ("self", "method", "timeout", "args", "kwargs"),
    "vllm.v1.engine.core:EngineCoreProc._reject_add_in_shutdown": ("self", "request"),
    "vllm.v1.engine.core:EngineCoreProc._send_abort_outputs": ("self", "aborted_reqs"),
    "vllm.v1.engine.core:EngineCoreProc._notify_idle_state_callbacks": ("self",),
    "vllm.v1.engine.core:DPEngineCoreProc._has_global_unfinished_reqs": ("self",),
    "vllm.v1.engine.core:DPEngineCoreProc.resume_scheduler": ("self",),
    "vllm.v1.engine:EngineCoreOutput.finish_reason": (),
    "vllm.v1.engine:EngineCoreOutput.stop_reason": (),
    "vllm.v1.engine:EngineCoreOutputs.finished_requests": (),
    "vllm.v1.engine:FinishReason.ABORT": (),
    "vllm.v1.core.sched.scheduler:Scheduler.finish_requests": ("self", "request_ids", "finished_status"),
    "vllm.v1.request:RequestStatus.FINISHED_ABORTED": (),
    "vllm.v1.core.block_pool:BlockHashToBlockMap": (),
    "vllm.v1.core.kv_cache_utils:KVCacheBlock.reset_hash": ("self",),
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager": (),
    "vllm.distributed.kv_events:AllBlocksCleared": (),
    "vllm.v1.request:RequestStatus.WAITING_FOR_STREAMING_REQ": (),
    "vllm.v1.executor.abstract:Executor.collective_rpc": ("self", "method", "timeout", "args", "kwargs"),
    # adapters
    "vllm.lora.worker_manager:WorkerLoRAManager._load_adapter": ("self", "lora_request"),
    "vllm.lora.peft_helper:PEFTHelper.from_local_dir": ("lora_path", "max_position_embeddings"),
    "vllm.lora.peft_helper:PEFTHelper.from_dict": ("config_dict",),
    "vllm.lora.peft_helper:PEFTHelper.validate_legal": ("self", "lora_config"),
    "vllm.lora.lora_model:LoRAModel.from_local_checkpoint": ("lora_dir",),
    "vllm.lora.lora_model:LoRAModel.from_lora_tensors": ("tensors",),
    "vllm.lora.request:LoRARequest.__eq__": ("self", "value"),
    "vllm.lora.utils:parse_fine_tuned_lora_name": ("name", "weights_mapper"),
    "vllm.lora.utils:is_base_embedding_weights": ("name",),
    "vllm.v1.core.kv_cache_utils:_gen_lora_extra_hash_keys": ("request",),
    "vllm.v1.engine.input_processor:InputProcessor._get_mm_identifier": ("self", "mm_hash", "lora_request"),
    "vllm.entrypoints.openai.models.serving:OpenAIServingModels.__init__": ("self", "engine_client"),
    # the client
    "vllm.v1.engine.core_client:AsyncMPClient._call_utility_async": ("self", "method", "engine"),
    "vllm.v1.engine.core_client:SyncMPClient.call_utility": ("self", "method"),
    "vllm.v1.engine.core_client:MPClient.shutdown": ("self", "timeout"),
    "vllm.v1.engine.exceptions:EngineDeadError": (),
    "vllm.v1.engine.llm_engine:LLMEngine.add_request": ("self",),
    "vllm.v1.engine.llm_engine:LLMEngine.step": ("self",),
    "vllm.v1.engine.llm_engine:LLMEngine.sleep": ("self", "level", "mode"),
    "vllm.v1.engine.llm_engine:LLMEngine.wake_up": ("self", "tags"),
    "vllm.v1.engine.llm_engine:LLMEngine.is_sleeping": ("self",),
    "vllm.v1.engine.llm_engine:LLMEngine.reset_mm_cache": ("self",),
    "vllm.v1.engine.output_processor:OutputProcessor.process_outputs": ("self", "engine_core_outputs"),
    "vllm.v1.engine.async_llm:AsyncLLM.generate": ("self",),
    "vllm.v1.engine.async_llm:AsyncLLM.encode": ("self",),
    "vllm.v1.engine.async_llm:AsyncLLM.sleep": ("self", "level", "mode"),
    "vllm.v1.engine.async_llm:AsyncLLM.wake_up": ("self", "tags"),
    "vllm.v1.engine.async_llm:AsyncLLM.is_sleeping": ("self",),
    "vllm.v1.engine.async_llm:AsyncLLM.pause_generation": ("self",),
    "vllm.v1.engine.async_llm:AsyncLLM.resume_generation": ("self",),
    "vllm.entrypoints.llm:LLM.sleep": ("self", "level", "mode"),
    "vllm.entrypoints.llm:LLM.wake_up": ("self", "tags"),
}
#: The server's side: an endpoint plugin, or the function by which vLLM 0.25 and earlier register their first routes.
ENDPOINTS: tuple[Symbols, ...] = (
    {
        "vllm.plugins:load_endpoint_plugins": ("supported_tasks",),
        "vllm.plugins.endpoint_plugins.interface:EndpointPlugin.attach_router": ("self", "app"),
        "vllm.plugins.endpoint_plugins.interface:EndpointPlugin.init_state": ("self", "engine_client", "state", "args"),
    },
    {
        "vllm.entrypoints.serve:register_vllm_serve_api_routers": ("app",),
        "vllm.entrypoints.openai.api_server:build_app": ("args",),
        "vllm.entrypoints.openai.api_server:init_app_state": ("engine_client", "state", "args"),
    },
)
#: Not in every version, and replaced where they are there.
OPTIONAL = (
    "vllm.v1.engine.core:EngineCore.add_lora",
    "vllm.v1.engine.core:EngineCore.compute_weight_checksums",
    "vllm.v1.engine.core:EngineCore.pin_lora",
    "vllm.v1.engine.core:EngineCore.release_kv_cache_memory",
    "vllm.v1.engine.core:EngineCore.remove_lora",
    "vllm.v1.engine.core:EngineCore.save_sharded_state",
    "vllm.v1.engine.core:EngineCore.set_weight_version",
    "vllm.v1.engine.core:EngineCoreProc.resume_scheduler",
    "vllm.v1.worker.gpu_worker:Worker.start_draft_weight_update",
)
#: Text that must stand somewhere in a module: attributes that are set and not declared.
TEXTS = {
    "vllm.config.parallel": ("data_parallel_index: int",),
    "vllm.config.device": ("device_type",),
    "vllm.v1.engine.core": (
        *("self.output_queue", "self.input_queue", "client_index", "self.model_executor"),
        *("self.step_fn = ", "self._idle_state_callbacks"),
    ),
    "vllm.v1.engine.core_client": ("self.engine_core = EngineCore(", "self.core_engines", "engine_core.step_fn()"),
    "vllm.v1.core.sched.scheduler": ("self.requests: dict[str, Request]",),
    "vllm.lora.model_manager": ("self.packed_modules: dict", "self.modules: dict", "self.model: "),
    "vllm.lora.worker_manager": ("self._adapter_manager", "self.lora_config"),
    "vllm.v1.worker.lora_model_runner_mixin": ("self.lora_manager = ",),
    "vllm.entrypoints.openai.models.serving": ("self.lora_requests: dict[str, LoRARequest]",),
    "vllm.engine.arg_utils": (
        *("enable_eplb: bool", "kv_transfer_config: ", "kv_offloading_size: ", "ec_transfer_config: ", "load_format: "),
    ),
    "vllm.config.model": ("def is_multimodal_model",),
    "vllm.v1.engine.async_llm": ("self.vllm_config", "self.engine_core", "self.logger_manager"),
    "vllm.v1.engine.llm_engine": ("self.vllm_config", "self.engine_core", "self.logger_manager"),
    "vllm.v1.metrics.loggers": ("def record_sleep_state(self, sleep",),
    "vllm.v1.executor.abstract": ("self.sleeping_tags",),
    "vllm.v1.executor.uniproc_executor": ("self.driver_worker = ",),
    "vllm.v1.worker.worker_base": ("self.worker = ",),
    "vllm.v1.worker.gpu_model_runner": ("self.kv_caches",),
    "vllm.v1.worker.gpu.model_runner": ("self.kv_caches",),
    "vllm.v1.worker.gpu_worker": ('_maybe_get_memory_pool_context(tag="weights")', 'pool_context(tag="kv_cache")'),
    "vllm.model_executor.layers.linear": ("import dispatch_cpu_unquantized_gemm",),  # inside the function
    "vllm.model_executor.model_loader.reload.types": ("load_numel:", "load_numel_total:", "def can_load"),
}

NEEDS = Needs("vllm", SYMBOLS, (ENDPOINTS,), OPTIONAL, TEXTS)

if __name__ == "__main__":
    NEEDS.main()
