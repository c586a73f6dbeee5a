"""SGLang on the CPU, with the stand-in kernels of tests/aids/sglang_cpu, or on GPUs."""

from __future__ import annotations

import importlib.util
import json
import os
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from integration.engines.base import REPOSITORY, EngineKind, Launch, python

if TYPE_CHECKING:
    import httpx

STAND_IN_KERNELS = REPOSITORY / "tests" / "aids" / "sglang_cpu"
FORKING = REPOSITORY / "tests" / "aids" / "sglang_fork"
BYTES_PER_ELEMENT = {"float32": 4, "float16": 2}

_DEVICE_ARGUMENTS = {
    # An idle scheduler otherwise takes a core, of few.
    "cpu": ["--attention-backend", "torch_native", "--disable-overlap-schedule", "--sleep-on-idle"],
    "cuda": ["--attention-backend", "triton", "--disable-prefill-cuda-graph", "--cuda-graph-max-bs-decode", "4"],
}


class Sglang(EngineKind):
    name = "sglang"
    generation_route = "/generate"

    def command(self, launch: Launch, port: int) -> list[str]:
        arguments = [
            *(python(), "-m", "rl_memory_plugins.cli", "serve", "sglang", str(launch.model)),
            *("--served-model-name", "model", "--host", launch.host, "--port", str(port)),
            *("--dtype", launch.dtype, "--device", launch.device, *_DEVICE_ARGUMENTS[launch.device]),
            *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
            *("--skip-tokenizer-init", "--log-level", "warning", "--random-seed", "0"),
            *("--max-running-requests", str(launch.max_running), "--max-total-tokens", str(_kv_tokens(launch))),
            *("--tensor-parallel-size", str(launch.tp), "--data-parallel-size", str(launch.dp)),
            *("--rl-memory", json.dumps(launch.options)),
        ]
        if launch.dummy_weights:
            arguments += ["--load-format", "dummy"]
        if launch.api_key:
            arguments += ["--api-key", launch.api_key]
        return arguments

    def environment(self, launch: Launch) -> dict[str, str]:
        variables = {
            "SGLANG_DISABLED_MODEL_ARCHS": ",".join(_models_but("qwen2")),  # importing all takes most of a start
            "HF_HUB_OFFLINE": "1",
        }
        if launch.device == "cuda":
            return variables
        variables |= {
            "PYTHONPATH": os.pathsep.join(map(str, [STAND_IN_KERNELS, *([FORKING] if launch.forked else [])])),
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_NCCL_SO_PATH": "none",  # else the NCCL that is installed wants a GPU with more than one rank
            "OMP_NUM_THREADS": "2" if launch.ranks == 1 else "1",
            "OMP_WAIT_POLICY": "passive",
        }
        if launch.ranks > 1:  # SGLang insists on one entry a rank; without its kernels it binds nothing
            variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(["0"] * launch.ranks)
        return variables

    def request(
        self,
        prompt: list[int],
        tokens: int,
        stream: bool = False,
        temperature: float = 0.0,
        seed: int = 0,
        logprobs: bool = False,
    ) -> dict[str, Any]:
        sampling = {"temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True}
        return {"input_ids": prompt, "sampling_params": sampling, "stream": stream, "return_logprob": logprobs}

    def tokens(self, answer: dict[str, Any]) -> list[int]:
        return list(answer["output_ids"])

    def logprobs(self, answer: dict[str, Any]) -> list[float]:
        return [logprob for logprob, *_ in answer["meta_info"]["output_token_logprobs"]]

    def was_aborted(self, answer: dict[str, Any]) -> bool:
        return bool(answer["meta_info"]["finish_reason"]["type"] == "abort")

    def requests_held(self, http: httpx.Client) -> int:
        loads = http.get("/v1/loads", params={"include": "core"}).json()["loads"]
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


def _kv_tokens(launch: Launch) -> int:
    """As many as `kv_bytes` of each rank hold."""
    config = json.loads((launch.model / "config.json").read_text())
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    heads = max(config["num_key_value_heads"] // launch.tp, 1)  # of one rank
    per_token = 2 * BYTES_PER_ELEMENT[launch.dtype] * config["num_hidden_layers"] * heads * head  # keys and values
    tokens = launch.kv_bytes // per_token
    return max(int(tokens), 4096)


def _models_but(kept: str) -> list[str]:
    """The names of all model files of the installed SGLang but one."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.submodule_search_locations is None:
        raise RuntimeError("SGLang is not installed")
    folder = Path(next(iter(spec.submodule_search_locations)), "srt", "models")
    modules = [module.name for module in pkgutil.iter_modules([str(folder)]) if not module.ispkg]
    return sorted(name for name in modules if name != kept)
