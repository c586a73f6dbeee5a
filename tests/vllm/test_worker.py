"""What the worker's adapter does that no engine of this version needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.engines.vllm.worker import VllmWorker
from rl_memory_plugins.tags import Tag


class SecondRunner:
    """vLLM 0.26's `v1.worker.gpu.model_runner`: its block tables hold pointers into the KV cache."""

    def __init__(self) -> None:
        self.refreshed = 0

    def post_kv_cache_wake_up(self) -> None:
        self.refreshed += 1


class FirstRunner(SecondRunner):
    """vLLM 0.26's `v1.worker.gpu_model_runner`: it sets the FP8 scales, calibrated or not, to 1.0."""

    def init_fp8_kv_scales(self) -> None: ...


@pytest.mark.parametrize(
    ("runner", "tags", "refreshed"),
    [
        (SecondRunner(), [Tag.KV_CACHE, Tag.WEIGHTS], 1),
        (SecondRunner(), [Tag.WEIGHTS], 0),
        (FirstRunner(), [Tag.KV_CACHE], 0),
    ],
)
def test_a_wake_refreshes_pointers_and_loses_no_scales(runner: Any, tags: list[Tag], refreshed: int) -> None:
    VllmWorker(SimpleNamespace(model_runner=runner), RLMemoryConfig())._after_wake(tags)
    assert runner.refreshed == refreshed
