"""SGLang on the CPU, with the stand-in kernels of tests/aids/sglang_cpu, or on GPUs."""

from __future__ import annotations

import importlib.util
import json
import os
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from integration.engines.base import REPOSITORY, EngineKind, Launch, Sampling

if TYPE_CHECKING:
    import httpx

STAND_IN_KERNELS = REPOSITORY / "tests" / "aids" / "sglang_cpu"
#: SGLang's layers with LoRA ask for page-locked memory, which needs a GPU.
UNPINNED = REPOSITORY / "tests" / "aids" / "sglang_unpinned"
FORKING = REPOSITORY / "tests" / "aids" / "sglang_fork"
PIPELINE = REPOSITORY / "tests" / "aids" / "sglang_pipeline"
BYTES_PER_ELEMENT = {"float32": 4, "float16": 2}
#: The files of models that an engine imports. On the CPU all that tests run, so that one process imports for all.
MODELS = {"cpu": ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "deepseek_v2", "glm4_moe"), "cuda": ("qwen2",)}

_DEVICE_ARGUMENTS = {
    # Without `--sleep-on-idle` an idle scheduler takes a whole core.
    "cpu": ["--attention-backend", "torch_native", "--disable-overlap-schedule", "--sleep-on-idle"],
    "cuda": ["--attention-backend", "triton", "--disable-prefill-cuda-graph"],
}


class Sglang(EngineKind):
    name = "sglang"
    generation_route = "/generate"
    health_routes = ("/health", "/health_generate")
    imports = (
        "rl_memory_plugins.cli",
        "sglang.launch_server",
        "sglang.srt.entrypoints.http_server",
        "sglang.srt.managers.detokenizer_manager",
        "sglang.srt.managers.scheduler",
    )
    import_variables = ("SGLANG_DISABLED_MODEL_ARCHS",)
    import_folders = (STAND_IN_KERNELS,)

    def arguments(self, launch: Launch) -> list[str]:
        return [
            *("--device", launch.device, *_DEVICE_ARGUMENTS[launch.device]),
            *(_graphs(launch) if launch.device == "cuda" else ()),
            *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
            *("--skip-tokenizer-init", "--log-level", "warning", "--random-seed", "0"),
            *("--max-running-requests", str(launch.max_running), *_cache(launch)),
            "--enable-metrics",  # vLLM has them always
            *("--tensor-parallel-size", str(launch.tp), "--data-parallel-size", str(launch.dp)),
            *("--pipeline-parallel-size", str(launch.pp)),
            *(_adapter_arguments(launch) if launch.adapter_rank else ()),
        ]

    def environment(self, launch: Launch) -> dict[str, str]:
        variables = {
            # To import all models takes most of a start.
            "SGLANG_DISABLED_MODEL_ARCHS": ",".join(_models_but(*MODELS[launch.device])),
            "HF_HUB_OFFLINE": "1",
        }
        of_pipelines = [PIPELINE] if launch.pp > 1 else []
        if launch.device == "cuda":
            return variables | ({"PYTHONPATH": str(PIPELINE)} if of_pipelines else {})
        own = {FORKING: launch.forked, UNPINNED: launch.adapter_rank}
        aids = [STAND_IN_KERNELS, *of_pipelines, *(aid for aid, needed in own.items() if needed)]
        variables |= {
            "PYTHONPATH": os.pathsep.join(map(str, aids)),
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_NCCL_SO_PATH": "none",  # with more than one rank, NCCL would look for a GPU
            "OMP_NUM_THREADS": "2" if launch.ranks == 1 else "1",
            "OMP_WAIT_POLICY": "passive",
        }
        if launch.ranks > 1:  # SGLang demands one entry for each rank; without its kernels it binds no thread
            variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(["0"] * launch.ranks)
        return variables

    def body(self, prompt: list[int], tokens: int, sampling: Sampling) -> dict[str, Any]:
        return {
            "input_ids": prompt,
            "sampling_params": {"temperature": sampling.temperature, "max_new_tokens": tokens, "ignore_eos": True},
            "stream": sampling.stream,
            "return_logprob": sampling.logprobs,
            "lora_path": sampling.adapter or None,
        }

    def tokens(self, answer: dict[str, Any]) -> list[int]:
        return list(answer["output_ids"])

    def streamed_tokens(self, events: list[dict[str, Any]]) -> list[int]:
        return list(events[-1]["output_ids"])  # each event has all tokens

    def logprobs(self, answer: dict[str, Any]) -> list[float]:
        return [logprob for logprob, *_ in answer["meta_info"]["output_token_logprobs"]]

    def cached_tokens(self, answer: dict[str, Any]) -> int:
        return int(answer["meta_info"]["cached_tokens"])

    def recomputations(self, http: httpx.Client, answer: dict[str, Any]) -> int:
        return int(answer["meta_info"]["num_retractions"])

    def was_aborted(self, answer: dict[str, Any]) -> bool:
        return bool(answer["meta_info"]["finish_reason"]["type"] == "abort")

    def requests_held(self, http: httpx.Client) -> int:
        loads = http.get("/v1/loads", params={"include": "core"}).json()["loads"]
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


def _adapter_arguments(launch: Launch) -> list[str]:
    layers = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    backend = ["--lora-backend", "torch_native"] if launch.device == "cpu" else []  # the others need a GPU
    rank = ["--max-lora-rank", str(launch.adapter_rank)]
    return ["--enable-lora", *backend, *rank, "--max-loras-per-batch", "3", "--lora-target-modules", *layers]


def _graphs(launch: Launch) -> list[str]:
    return ["--cuda-graph-max-bs-decode", str(launch.max_running)] if launch.graphs else ["--disable-cuda-graph"]


def _cache(launch: Launch) -> list[str]:
    if launch.memory:
        return ["--mem-fraction-static", str(launch.memory)]
    return ["--max-total-tokens", str(_kv_tokens(launch))]


def _kv_tokens(launch: Launch) -> int:
    """The tokens that `kv_bytes` hold on each rank; at least 4096."""
    config = json.loads((launch.model / "config.json").read_text())
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    heads = max(config["num_key_value_heads"] // launch.tp, 1)  # on one rank
    per_token = 2 * BYTES_PER_ELEMENT[launch.dtype] * config["num_hidden_layers"] * heads * head  # keys and values
    return max(int(launch.kv_bytes // per_token), 4096)


def _models_but(*kept: str) -> list[str]:
    """The names of all model files of the installed SGLang but these."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.submodule_search_locations is None:
        raise RuntimeError("SGLang is not installed")
    folder = Path(next(iter(spec.submodule_search_locations)), "srt", "models")
    modules = [module.name for module in pkgutil.iter_modules([str(folder)]) if not module.ispkg]
    return sorted(name for name in modules if name not in kept)
