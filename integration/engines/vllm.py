"""vLLM on the CPU or on GPUs."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from integration.engines.base import REPOSITORY, EngineKind, Launch, Sampling

if TYPE_CHECKING:
    import httpx

FORKING = REPOSITORY / "tests" / "aids" / "vllm_fork"
PIPELINE = REPOSITORY / "tests" / "aids" / "vllm_pipeline"
RAY = REPOSITORY / "tests" / "aids" / "vllm_ray"


def _device_arguments(launch: Launch) -> list[str]:
    if launch.device == "cuda":  # with `--kv-cache-memory-bytes` the share only says what must be free at the start
        return ["--gpu-memory-utilization", str(launch.memory or 0.05)]
    # Without `PIPELINE` only compiled stages work.
    return ["--enforce-eager"] if launch.pp == 1 or launch.forked else []


def _cache(launch: Launch) -> list[str]:
    return [] if launch.memory else ["--kv-cache-memory-bytes", str(launch.kv_bytes)]


def _compilation(launch: Launch) -> list[str]:
    if not launch.graphs:
        return ["--enforce-eager"]
    sizes = [1, 2, 4, *range(8, launch.max_running + 1, 8)]
    config: dict[str, Any] = {}
    if not launch.compiled:
        config |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    if launch.tp > 1:  # fused kernels are compiled at first use
        config["pass_config"] = {"fuse_allreduce_rms": False}
    arguments = ["--cudagraph-capture-sizes", *map(str, sizes)]
    arguments += ["--compilation-config", json.dumps(config)] if config else []
    return arguments if launch.compiled else [*arguments, "--no-enable-flashinfer-autotune"]


class Vllm(EngineKind):
    name = "vllm"
    generation_route = "/v1/completions"
    imports = (
        "rl_memory_plugins.cli",
        "vllm.entrypoints.openai.api_server",
        "vllm.entrypoints.launchers.api_server.entry",
        "vllm.v1.engine.async_llm",
        "vllm.v1.engine.core",
        "vllm.v1.worker.cpu_worker",
        "vllm.model_executor.models.qwen2",
    )

    def arguments(self, launch: Launch) -> list[str]:
        arguments = [
            *("--max-model-len", str(launch.context), "--max-num-seqs", str(launch.max_running)),
            *_device_arguments(launch),
            *_cache(launch),
            *("--tensor-parallel-size", str(launch.tp), "--pipeline-parallel-size", str(launch.pp)),
            "--enable-prompt-tokens-details",
        ]
        if launch.device == "cuda":
            arguments += _compilation(launch)
        if launch.adapter_rank:
            arguments += ["--enable-lora", "--max-lora-rank", str(launch.adapter_rank)]
            arguments += ["--max-loras", "2", "--max-cpu-loras", "2"]
        if launch.ray:
            arguments += ["--distributed-executor-backend", "ray"]
        if launch.dp > 1:
            arguments += ["--data-parallel-size", str(launch.dp)]
        return arguments

    def environment(self, launch: Launch) -> dict[str, str]:
        variables = {
            "VLLM_SERVER_DEV_MODE": "1",  # adds vLLM's own sleep routes, which the tests call too
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "VLLM_HOST_IP": "127.0.0.1",
        }
        if launch.device == "cuda":
            # FlashInfer compiles its kernels at first use, which takes minutes and CUDA's headers.
            return {**variables, "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}
        # Else vLLM would bind the workers of two engines, or of two nodes, to the same core.
        unbound = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        if launch.ray:
            of_ray = {"RAY_ADDRESS": launch.ray, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(RAY)}
            return {**variables, **unbound, **of_ray}
        if launch.forked:
            aids = os.pathsep.join(map(str, [FORKING, *([PIPELINE] if launch.pp > 1 else [])]))
            return {**variables, **unbound, "PYTHONPATH": aids, "TORCH_COMPILE_DISABLE": "1"}
        cores = range(os.cpu_count() or 1)
        bind = "|".join(str(cores[rank % len(cores)]) for rank in range(launch.ranks)) if launch.ranks > 1 else "auto"
        return {**variables, "VLLM_CPU_OMP_THREADS_BIND": bind}

    def body(self, prompt: list[int], tokens: int, sampling: Sampling) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": sampling.adapter or "model",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": sampling.stream,
        }
        return {**body, "logprobs": 0} if sampling.logprobs else body  # 0: only the generated token's

    def tokens(self, answer: dict[str, Any]) -> list[int]:
        return list(answer["choices"][0]["token_ids"])

    def streamed_tokens(self, events: list[dict[str, Any]]) -> list[int]:
        return [token for event in events for choice in event["choices"] for token in choice["token_ids"] or ()]

    def logprobs(self, answer: dict[str, Any]) -> list[float]:
        return list(answer["choices"][0]["logprobs"]["token_logprobs"])

    def cached_tokens(self, answer: dict[str, Any]) -> int:
        details = answer["usage"].get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens") or 0)

    def recomputations(self, http: httpx.Client, answer: dict[str, Any]) -> int:
        return _sum_of_metrics(http, {"vllm:num_preemptions_total"})

    def was_aborted(self, answer: dict[str, Any]) -> bool:
        return answer["choices"][0]["finish_reason"] == "abort"

    def requests_held(self, http: httpx.Client) -> int:
        return _sum_of_metrics(http, {"vllm:num_requests_running", "vllm:num_requests_waiting"})


def _sum_of_metrics(http: httpx.Client, names: set[str]) -> int:
    from prometheus_client.parser import text_string_to_metric_families  # comes with vLLM

    families = text_string_to_metric_families(http.get("/metrics").text)
    return sum(int(sample.value) for family in families for sample in family.samples if sample.name in names)
