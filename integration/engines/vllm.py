"""vLLM on the CPU."""

from __future__ import annotations

import json
import os
from typing import Any

from integration.engines.base import EngineKind, Launch, python


class Vllm(EngineKind):
    name = "vllm"
    generation_route = "/v1/completions"

    def command(self, launch: Launch, port: int) -> list[str]:
        arguments = [
            *(python(), "-m", "rl_memory_plugins.cli", "serve", "vllm", str(launch.model)),
            *("--served-model-name", "model", "--host", launch.host, "--port", str(port)),
            *("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", str(launch.max_running)),
            "--enforce-eager",
            *("--kv-cache-memory-bytes", str(launch.kv_bytes), "--tensor-parallel-size", str(launch.tp)),
            *("--rl-memory", json.dumps(launch.options)),
        ]
        if launch.dummy_weights:
            arguments += ["--load-format", "dummy"]
        if launch.dp > 1:
            arguments += ["--data-parallel-size", str(launch.dp)]
        if launch.api_key:
            arguments += ["--api-key", launch.api_key]
        return arguments

    def environment(self, launch: Launch) -> dict[str, str]:
        cores = range(os.cpu_count() or 1)
        ranks = launch.tp * launch.dp
        bind = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks)) if ranks > 1 else "auto"
        return {
            "VLLM_CPU_OMP_THREADS_BIND": bind,
            "VLLM_SERVER_DEV_MODE": "1",  # so that the native routes are there, and lead to the same machine
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "VLLM_HOST_IP": "127.0.0.1",
        }

    def request(
        self, prompt: list[int], tokens: int, stream: bool = False, temperature: float = 0.0, seed: int = 0
    ) -> dict[str, Any]:
        return {
            "model": "model",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": temperature,
            "seed": seed,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": stream,
        }

    def tokens(self, answer: dict[str, Any]) -> list[int]:
        return list(answer["choices"][0]["token_ids"])

    def was_aborted(self, answer: dict[str, Any]) -> bool:
        return answer["choices"][0]["finish_reason"] == "abort"
