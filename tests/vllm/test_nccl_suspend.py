"""The option `nccl_suspend`, which means what vLLM's own flag means; `test_sleep_options.py` has an engine with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed import parallel_state

from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.engines.nccl_suspend import SuspendingRanks
from rl_memory_plugins.engines.vllm import core, modes, nccl_suspend
from rl_memory_plugins.errors import EngineFaultError, UnsupportedError

ON = RLMemoryConfig(nccl_suspend=True)


def configuration(*, flag: bool = False, option: bool = False, engines: int = 1) -> Any:
    """As vLLM's configuration of a model with experts."""
    return SimpleNamespace(
        additional_config={"rl_memory": {"nccl_suspend": option}},
        model_config=SimpleNamespace(enable_nccl_comm_suspend=flag, is_moe=True),
        parallel_config=SimpleNamespace(data_parallel_size=engines, distributed_executor_backend="mp", world_size=2),
    )


@pytest.mark.parametrize(("flag", "option"), [(True, False), (False, True), (False, False)])
def test_the_option_means_what_the_flag_means(flag: bool, option: bool) -> None:
    executor = SimpleNamespace(collective_rpc=lambda method, args: [])
    engine = SimpleNamespace(vllm_config=configuration(flag=flag, option=option), model_executor=executor)
    assert isinstance(core._ranks(engine), SuspendingRanks) == (flag or option)


def test_engines_that_step_together_are_refused() -> None:
    modes.refuse_configuration(configuration(option=True))
    with pytest.raises(UnsupportedError, match="connect the engines"):
        modes.refuse_configuration(configuration(option=True, engines=2))


def test_a_vllm_without_the_calls_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(parallel_state, "suspend_device_comms", raising=False)
    modes.refuse_configuration(configuration())
    with pytest.raises(UnsupportedError, match="this version of vLLM"):
        modes.refuse_configuration(configuration(option=True))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls, of vLLM's functions and of torch's communicator of one group."""
    log: list[str] = []
    backend = SimpleNamespace(
        suspend=lambda: log.append("suspend torch"), resume=lambda: log.append("resume torch"), memory_stats=dict
    )
    group = SimpleNamespace(_get_backend=lambda device: backend, config="cuda:nccl")
    library = SimpleNamespace(lib=SimpleNamespace(), ncclGetVersion=lambda: "2.28.9")
    own = SimpleNamespace(
        pynccl_comm=SimpleNamespace(available=True, nccl=library),
        suspend=lambda: log.append("suspend"),
        resume=lambda: log.append("resume"),
    )
    coordinator = SimpleNamespace(device_group=group, device_communicator=own)
    alone = SimpleNamespace(device_group=SimpleNamespace(config="cpu:gloo"), device_communicator=None)
    monkeypatch.setattr(parallel_state, "_groups", {"world": lambda: alone, "tp": lambda: coordinator})
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: group.config)
    monkeypatch.setattr(nccl_suspend.nccl, "why_not", lambda: "")
    return log


def test_vllm_s_communicators_and_torch_s_are_suspended(log: list[str]) -> None:
    calls = nccl_suspend.calls(RLMemoryConfig())
    assert calls["suspend_communicators"]() == 2
    calls["check_communicators"]()
    assert calls["resume_communicators"]() == 0
    assert log == ["suspend", "suspend torch", "resume", "resume torch"]


def test_an_error_of_nccl_is_told(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("NCCL error: unhandled system error")

    calls = nccl_suspend.calls(RLMemoryConfig())
    calls["suspend_communicators"]()
    monkeypatch.setattr(parallel_state._groups["tp"]().device_communicator, "resume", fail)
    with pytest.raises(EngineFaultError, match="nothing was mapped: NCCL error") as caught:
        calls["resume_communicators"]()
    assert caught.value.details["suspended"] == 2


def test_an_older_library_is_refused_if_the_option_is_set(log: list[str]) -> None:
    with pytest.raises(UnsupportedError, match="loaded NCCL 2.28.9"):
        nccl_suspend.calls(ON)
