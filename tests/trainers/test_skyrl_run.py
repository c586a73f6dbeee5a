"""SkyRL's own entry point with the adapter: three steps of GRPO with FSDP2, from the command line to the last sync."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from integration.engines.vllm import FORKING
from integration.trainers import skyrl_on_cpu, skyrl_task
from tests.vllm.conftest import environment

RANKS = 2  # of the trainer, and tensor-parallel ranks of the engine
STEPS = 3
GAP = 1e-3  # nat; everything is in float32
ENGINE = "generator.inference_engine"


def overrides(folder: Path) -> dict[str, object]:
    model, prompts = skyrl_task.write_task(folder, prompts=4 * STEPS, seed=11)
    placement = {f"trainer.placement.{role}_num_gpus_per_node": RANKS for role in ("policy", "critic", "ref")}
    kwargs = f"{{max_model_len: 256, kv_cache_memory_bytes: {64 << 20}, enable_scale_out: true}}"
    return {
        **placement,
        "trainer.override_entrypoint": "rl_memory_plugins.integrations.skyrl",
        "trainer.policy.model.path": model,
        "data.train_data": f"['{prompts}']",
        "trainer.algorithm.advantage_estimator": "grpo",
        "trainer.algorithm.use_kl_loss": False,
        "trainer.policy.fsdp_config.mixed_precision": "{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}",
        "trainer.policy.optimizer_config.lr": 1e-3,
        "trainer.max_training_steps": STEPS,
        "trainer.train_batch_size": 4,
        "trainer.policy_mini_batch_size": 4,
        "trainer.micro_train_batch_size_per_gpu": 4,
        "trainer.micro_forward_batch_size_per_gpu": 4,
        "trainer.max_prompt_length": 32,
        "trainer.eval_interval": -1,
        "trainer.eval_before_train": False,
        "trainer.ckpt_interval": -1,
        "trainer.resume_mode": "none",
        "trainer.flash_attn": False,
        "trainer.remove_microbatch_padding": False,
        "trainer.enable_ray_gpu_monitor": False,
        "trainer.logger": "console",
        "trainer.log_path": folder / "logs",
        "trainer.ckpt_path": folder / "checkpoints",
        "trainer.export_path": folder / "exports",
        "generator.n_samples_per_prompt": 4,
        "generator.sampling_params.max_generate_length": 8,
        "generator.sampling_params.logprobs": 1,
        "generator.use_cache_salt": False,  # vLLM 0.32 refuses SkyRL's
        f"{ENGINE}.tensor_parallel_size": RANKS,
        f"{ENGINE}.distributed_executor_backend": "mp",
        f"{ENGINE}.enable_ray_prometheus_stats": False,
        f"{ENGINE}.model_dtype": "float32",
        f"{ENGINE}.enforce_eager": True,
        f"{ENGINE}.max_num_seqs": 16,
        f"{ENGINE}.max_num_batched_tokens": 512,
        f"{ENGINE}.engine_init_kwargs": kwargs,
    }


def test_the_command_line_trains(tmp_path: Path) -> None:
    variables = environment(tmp_path, RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")
    variables["PYTHONPATH"] = os.pathsep.join([str(FORKING), variables["PYTHONPATH"]])
    variables |= {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(RANKS))),
        "HF_DATASETS_CACHE": str(tmp_path / "datasets"),
        "SKYRL_DUMP_INFRA_LOG_TO_STDOUT": "1",
        "SKYRL_ON_CPU_GPUS": str(RANKS),
    }
    command = [sys.executable, "-m", skyrl_on_cpu.HERE, *(f"{k}={v}" for k, v in overrides(tmp_path).items())]
    done = subprocess.run(
        command,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout[-20000:]

    def metric(name: str) -> list[float]:
        return [float(value) for value in re.findall(rf"'{name}': '?([\d.]+)", done.stdout)]

    def calls(path: str) -> int:
        return len(re.findall(rf'"POST {path} HTTP/1.1" 200', done.stdout))

    assert metric("trainer/global_step") == [1, 2, 3]
    gaps = metric("policy/rollout_train_logprobs_abs_diff_max")
    assert len(gaps) == STEPS and max(gaps) < GAP
    assert min(metric("policy/grad_norm")) > 0  # the weights change
    assert calls("/v1/rl_memory/update_weights_from_ipc") == STEPS + 1  # and before the first step
    assert calls(r"/sleep\?level=2") == STEPS + 2  # and at the start and the end
    assert calls("/collective_rpc") == 0
