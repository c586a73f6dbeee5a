"""What is said when tensor-parallel ranks differ in free memory, and when it ends the start.

Stock: `RuntimeError: The memory capacity is unbalanced`, whoever holds the memory. The ranks here are fakes:
a machine without GPUs has one memory for all of them.
"""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
from torch import distributed

from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.engines.sglang import tp_memory_balance as balance
from rl_memory_plugins.engines.sglang import worker
from rl_memory_plugins.engines.sglang.worker import Memory

ARGUMENTS = types.SimpleNamespace(model_path="target", revision=None)
PLAIN, STRICT = RLMemoryConfig(), RLMemoryConfig(strict_tp_balance=True)
UNEVEN = [
    {"rank": 0, "device": "GPU-aa", "free": 70.0, "total": 80.0, "processes": [(101, 8.5), (102, 1.5)]},
    {"rank": 1, "device": "GPU-bb", "free": 30.0, "total": 80.0, "processes": None},
]


@pytest.fixture(autouse=True)
def no_legacy_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(balance.LEGACY_VARIABLE, raising=False)


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The replaced check on one of two ranks; `frees` are the GiB that the ranks see."""

    def run(config: RLMemoryConfig | None, frees: list[float], rank: int = 0) -> None:
        group = types.SimpleNamespace(world_size=len(frees), rank_in_group=rank, cpu_group=None)
        module = types.ModuleType("sglang.srt.distributed")
        module.get_tp_group = lambda: group  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "sglang.srt.distributed", module)
        monkeypatch.setattr(worker, "_memory", config and Memory(config, lambda: ("cpu", rank), ARGUMENTS))

        def gather(ranks: list[Any], mine: dict[str, Any], group: Any) -> None:
            assert mine["free"] == frees[rank]
            ranks[:] = [{**mine, "rank": number, "free": free} for number, free in enumerate(frees)]

        monkeypatch.setattr(distributed, "all_gather_object", gather)
        balance._check(_stock)(pre_model_load_memory=min(frees), local_gpu_memory=frees[rank])

    return run


def _stock(*, pre_model_load_memory: float, local_gpu_memory: float) -> None:
    if pre_model_load_memory < 0.9 * local_gpu_memory:
        raise RuntimeError("The memory capacity is unbalanced.")


def test_the_text_says_who_holds_what_and_what_to_do() -> None:
    text = balance.diagnosis(UNEVEN, PLAIN)
    assert "more than 10%" in text
    assert "rank 0 on GPU-aa: 70.00 GiB free, 10.00 GiB used, held by process 101 (8.50 GiB), process 102" in text
    assert "rank 1 on GPU-bb: 30.00 GiB free, 50.00 GiB used (NVML does not name the processes)" in text
    assert "offload the trainer" in text  # the usual cause, and the cure
    assert "strict_tp_balance=true" in text
    assert "The start goes on" in text


def test_the_strict_text_says_how_to_go_on() -> None:
    text = balance.diagnosis(UNEVEN, STRICT)
    assert "strict_tp_balance=true stops the start here" in text
    assert f"{balance.LEGACY_VARIABLE}=1" in text


def test_an_imbalance_is_one_warning_on_one_rank(check: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger=balance.__name__):
        check(PLAIN, [20.0, 10.0], rank=1)
        assert caplog.messages == []
        check(PLAIN, [20.0, 10.0], rank=0)
    assert len(caplog.messages) == 1
    assert "rank 0" in caplog.messages[0] and "rank 1" in caplog.messages[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_strict_ends_the_start_on_every_rank(check: Callable[..., None], rank: int) -> None:
    """Stock: only the rank with more memory raises, and the others wait for it in a collective."""
    with pytest.raises(RuntimeError, match="strict_tp_balance"):
        check(STRICT, [20.0, 10.0], rank=rank)


@pytest.mark.parametrize("config", [PLAIN, STRICT])
@pytest.mark.parametrize("frees", [[20.0, 20.0], [20.0, 18.5], [0.0, 0.0]])
def test_balanced_ranks_say_nothing(
    check: Callable[..., None], caplog: pytest.LogCaptureFixture, config: RLMemoryConfig, frees: list[float]
) -> None:
    check(config, frees)
    assert caplog.messages == []


def test_the_legacy_variable_is_honoured(
    check: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Stock: no longer read since its replacement has another name."""
    monkeypatch.setenv(balance.LEGACY_VARIABLE, "1")
    assert not balance.is_strict(STRICT)
    check(STRICT, [20.0, 10.0])
    assert "The start goes on" in caplog.text
    monkeypatch.setenv(balance.LEGACY_VARIABLE, "0")
    assert balance.is_strict(STRICT)


def test_without_the_plugin_the_check_is_the_engines_own(check: Callable[..., None]) -> None:
    check(None, [20.0, 20.0])
    with pytest.raises(RuntimeError, match="The memory capacity is unbalanced"):
        check(None, [20.0, 10.0])


class Runner:
    """A `ModelRunner` of SGLang 0.5.15.post1, in which the check stands in the middle of a method."""

    is_draft_worker, device, gpu_id = False, "cpu", 0

    def __init__(self, frees: list[float], rank: int) -> None:
        self.frees, self.rank, self.tp_size = frees, rank, len(frees)

    def init_torch_distributed(self) -> float:
        from sglang.srt.environ import envs

        if envs.SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK.get():
            _stock(pre_model_load_memory=min(self.frees), local_gpu_memory=self.frees[self.rank])
        return min(self.frees)


@pytest.mark.parametrize(
    ("config", "draft", "raised"),
    [(None, False, "unbalanced"), (PLAIN, False, None), (STRICT, False, "strict_tp_balance"), (STRICT, True, None)],
)
def test_the_check_inside_a_method_is_replaced_too(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    config: RLMemoryConfig | None,
    draft: bool,
    raised: str | None,
) -> None:
    from sglang.srt import utils
    from sglang.srt.environ import envs

    frees = [20.0, 10.0]
    monkeypatch.setattr(utils, "get_available_gpu_memory", lambda device, gpu_id: frees[0])
    monkeypatch.setattr(balance, "_tp_rank", lambda: 0)
    ranks = [
        {"rank": rank, "device": "x", "free": free, "total": 80.0, "processes": []} for rank, free in enumerate(frees)
    ]
    monkeypatch.setattr(balance, "_all_ranks", lambda free: ranks)
    monkeypatch.setattr(worker, "_memory", config and Memory(config, lambda: ("cpu", 0), ARGUMENTS))
    runner = Runner(frees, 0)
    runner.is_draft_worker = draft
    start = balance._init_torch_distributed(Runner.init_torch_distributed)
    if raised is None:
        assert start(runner) == 10.0
    else:
        with pytest.raises(RuntimeError, match=raised):
            start(runner)
    assert ("Free memory differs" in caplog.text) is (config is not None and not draft)
    assert envs.SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK.get()  # for engines of this process that are not enabled


def test_the_processes_come_from_nvml_largest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = types.ModuleType("pynvml")
    sizes = {7: 1 << 30, 8: 3 << 30, 9: None}  # NVML does not know every process's size
    nvml.nvmlInit = lambda: None  # type: ignore[attr-defined]
    nvml.nvmlDeviceGetHandleByUUID = lambda uuid: uuid  # type: ignore[attr-defined]
    nvml.nvmlDeviceGetComputeRunningProcesses = lambda handle: [  # type: ignore[attr-defined]
        types.SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in sizes.items()
    ]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert balance._processes("GPU-aa") == [(8, 3.0), (7, 1.0), (9, 0.0)]
    nvml.nvmlInit = lambda: 1 / 0  # type: ignore[attr-defined]
    assert balance._processes("GPU-aa") is None
