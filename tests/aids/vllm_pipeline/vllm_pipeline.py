"""A vLLM plugin: pipeline stages work on the CPU without compilation.

At the start vLLM runs the model once, and makes the memory into which a stage receives hidden states. Its worker for
CPUs leaves that run out where nothing is to be compiled (`--enforce-eager`), and fails at the first request.
"""

from typing import Any


def register() -> None:
    from vllm.v1.worker.cpu_worker import CPUWorker

    warm_up = CPUWorker.compile_or_warm_up_model

    def compile_or_warm_up_model(self: Any) -> Any:
        runner = self.model_runner
        if runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )
        return warm_up(self)

    CPUWorker.compile_or_warm_up_model = compile_or_warm_up_model
