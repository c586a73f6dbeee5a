"""An engine's offline class on GPUs, by itself or with the plugin: the subjects of the benchmarks of sleeps."""

from __future__ import annotations

import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from integration.offline import (
    Token,
    sglang_answers,
    sglang_scored,
    start_sglang,
    start_vllm,
    vllm_answers,
    vllm_scored,
)

SETTLE_S = 240.0  # the longest wait for host memory; 145 GB on two ranks take more than a minute
GROWTH_MIB = 64.0  # of resident memory in two seconds, while host memory is made

Options = dict[str, Any]


class Subject(ABC):
    """An engine's offline class, by itself or with the plugin.

    The subclasses take a model's folder, the options of the plugin (`None` is the engine alone), the share of the GPU's
    memory that the engine takes, and the number of tensor-parallel ranks.
    """

    engine: Any
    plugin: bool
    can_discard: bool
    steps: Mapping[str, Any] = MappingProxyType({})  # of the latest sleep or wake, for its record

    @abstractmethod
    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """Greedy answers of exactly `tokens` tokens."""

    @abstractmethod
    def scored(self, prompts: list[list[int]], tokens: int) -> list[list[Token]]:
        """See `offline.vllm_scored`."""

    @abstractmethod
    def sleep(self, level: int) -> None: ...

    @abstractmethod
    def wake(self, tags: list[str] | None = None) -> None: ...

    @abstractmethod
    def touch(self) -> None:
        """Change the weights a little, which outdates a backup; a second call restores them."""

    @abstractmethod
    def close(self) -> None: ...

    def wake_rest(self) -> None:
        """Wake what sleeps beside the weights; an engine alone needs the tag, or fails (vLLM 0.26)."""
        self.wake(None if self.plugin else ["kv_cache"])

    def settle(self) -> None:
        """Wait for the host memory that the plugin makes in the background: until no more becomes resident."""
        deadline = time.monotonic() + SETTLE_S
        before, held = -GROWTH_MIB, host_held_mib()
        while self.plugin and held - before >= GROWTH_MIB and time.monotonic() < deadline:
            time.sleep(2)
            before, held = held, host_held_mib()

    def left(self) -> dict[str, Any]:
        """MiB that stay on the GPU during a sleep, by the plugin's own account."""
        if not self.plugin:
            return {}
        left = self.engine.memory_status()[0].ranks[0].left
        return {"causes": {cause: round(nbytes / 2**20) for cause, nbytes in left.items()}}

    def note_steps(self, operation: str, report: Any) -> None:
        """Print the plugin's report of a sleep or a wake, and keep its steps for the record."""
        if report is not None:
            milliseconds = {step: round(1000 * seconds, 1) for step, seconds in report.seconds.items()}
            print(f"{operation}: {milliseconds} ms", flush=True)
            self.steps = {"steps_ms": milliseconds}


class VllmSubject(Subject):
    can_discard = True

    def __init__(self, model: Path, options: Options | None, memory: float, tp: int) -> None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # `touch` sends a function to the worker
        self.plugin = options is not None
        switch: dict[str, Any] = {"enable_sleep_mode": True}
        if options is not None:
            switch = {"additional_config": {"rl_memory": options}}
        if tp > 1:  # FlashInfer would build its fused all-reduce at the start
            switch["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
        self.engine = start_vllm(
            model,
            tensor_parallel_size=tp,
            gpu_memory_utilization=memory,
            max_model_len=4096,
            max_num_seqs=64,
            enable_prefix_caching=False,
            **switch,
        )

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        return vllm_answers(self.engine, prompts, tokens)

    def scored(self, prompts: list[list[int]], tokens: int) -> list[list[Token]]:
        return vllm_scored(self.engine, prompts, tokens)

    def sleep(self, level: int) -> None:
        self.note_steps(f"sleep {level}", self.engine.sleep(level=level))

    def wake(self, tags: list[str] | None = None) -> None:
        if self.plugin:
            self.note_steps(f"wake {tags}", self.engine.wake_up_with_report(tags))
        else:
            self.engine.wake_up(tags=tags)

    def touch(self) -> None:
        self.engine.apply_model(_negate_one_element)

    def close(self) -> None:
        """vLLM alone ends its process only if `multiprocessing` was imported before the first temporary directory."""
        self.engine.llm_engine.engine_core.shutdown()


class SglangSubject(Subject):
    PROBE = "model.norm.weight"

    def __init__(self, model: Path, options: Options | None, memory: float, tp: int) -> None:
        self.plugin = options is not None
        self.can_discard = self.plugin  # SGLang itself chooses at its start whether a release keeps the weights
        self._hidden = json.loads((model / "config.json").read_text())["hidden_size"]
        self._touched = 0
        switch: dict[str, Any] = {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
        if options is not None:
            switch = {"rl_memory": options}
        self.engine = start_sglang(
            model,
            tp_size=tp,
            dtype="bfloat16",
            attention_backend="triton",
            disable_prefill_cuda_graph=True,
            disable_radix_cache=True,
            mem_fraction_static=memory,
            context_length=4096,
            max_running_requests=64,
            **switch,
        )
        self.touch()

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        return sglang_answers(self.engine, prompts, tokens)

    def scored(self, prompts: list[list[int]], tokens: int) -> list[list[Token]]:
        return sglang_scored(self.engine, prompts, tokens)

    def sleep(self, level: int) -> None:
        if self.plugin:
            self.note_steps(f"sleep {level}", self.engine.sleep(level=level))
        else:
            self.engine.release_memory_occupation(tags=["kv_cache", "weights"])

    def wake(self, tags: list[str] | None = None) -> None:
        if self.plugin:
            self.note_steps(f"wake {tags}", self.engine.wake_up(tags=tags))
        else:
            self.engine.resume_memory_occupation(tags=tags or ["weights", "kv_cache"])

    def touch(self) -> None:
        import torch

        weight = torch.full((self._hidden,), 1.0 + 0.125 * (self._touched % 2), dtype=torch.bfloat16)
        self._touched += 1
        session = hasattr(self.engine, "begin_weight_update")  # new in 0.5.21, and needed since
        if session:
            _require(self.engine.begin_weight_update())
        _require(self.engine.update_weights_from_tensor([(self.PROBE, weight)]))
        if session:
            _require(self.engine.end_weight_update())

    def close(self) -> None:
        self.engine.shutdown()


def _require(answer: tuple[bool, str]) -> None:
    """
    Raises:
        RuntimeError: SGLang's answer says that the call has failed.
    """
    if not answer[0]:
        raise RuntimeError(answer[1])


def _negate_one_element(model: Any) -> None:
    parameter = next(model.parameters())
    parameter.data.view(-1)[0].neg_()


ENGINES: dict[str, Any] = {"vllm": VllmSubject, "sglang": SglangSubject}


def host_held_mib() -> float:
    """Resident memory of this process and its children."""
    import psutil

    root = psutil.Process()
    return sum(process.memory_info().rss for process in [root, *root.children(recursive=True)]) / 2**20
