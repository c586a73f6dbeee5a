"""A scheduler's communicators: SGLang's own, which have no such calls, and those of torch."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.device_communicators.pynccl_wrapper import NCCLLibrary, ncclComm_t
from sglang.srt.entrypoints import engine

from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.engines.nccl_suspend import SuspendingRanks
from rl_memory_plugins.engines.sglang import install, nccl_suspend, scheduler
from rl_memory_plugins.engines.sglang.nccl_suspend import OwnCommunicator
from rl_memory_plugins.engines.sglang.options import EXPLICIT
from rl_memory_plugins.engines.sglang.worker import Memory, RegionAdapter, SglangWorker
from rl_memory_plugins.errors import EngineFaultError, UnsupportedError
from rl_memory_plugins.rank import encode_call
from tests.sglang.test_worker import Model

ON = RLMemoryConfig(nccl_suspend=True)


class Library:
    """As SGLang's `NCCLLibrary`, over a library that notes its calls."""

    NCCL_CHECK = NCCLLibrary.NCCL_CHECK

    def __init__(self, log: list[tuple[Any, ...]]) -> None:
        self.result = 0
        self.lib = SimpleNamespace(
            ncclCommSuspend=lambda comm, flags: log.append(("suspend", comm, flags.value)) or self.result,
            ncclCommResume=lambda comm: log.append(("resume", comm)) or self.result,
        )

    def ncclGetErrorString(self, result: int) -> str:
        return f"error {result}"


class Coordinator:
    """As SGLang's `GroupCoordinator`."""

    def __init__(self, own: Any, backend: Any = None) -> None:
        self.pynccl_comm = own
        self.device_group = SimpleNamespace(
            _get_backend=lambda device: backend, config="cuda:nccl" if backend else "cpu:gloo"
        )


@pytest.fixture
def log() -> list[tuple[Any, ...]]:
    return []


@pytest.fixture
def library(log: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library(log)
    backend = SimpleNamespace(
        suspend=lambda: log.append(("suspend", "torch")),
        resume=lambda: log.append(("resume", "torch")),
        memory_stats=dict,
    )
    groups = [
        Coordinator(SimpleNamespace(available=False)),  # of one rank
        Coordinator(SimpleNamespace(available=True, nccl=library, comm="tp"), backend),
        Coordinator(None),
        Coordinator(SimpleNamespace(available=True, nccl=library, comm="dp")),
    ]
    monkeypatch.setattr(parallel_state, "_groups", {str(n): lambda one=one: one for n, one in enumerate(groups)})
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: group.config)
    monkeypatch.setattr(nccl_suspend.nccl, "why_not", lambda: "")
    return library


def test_all_communicators_are_suspended_and_resumed_in_one_order(library: Library, log: list[tuple[Any, ...]]) -> None:
    calls = nccl_suspend.calls(ON)
    for _ in range(2):
        calls["suspend_communicators"]()
        assert log == [("suspend", "tp", 1), ("suspend", "dp", 1), ("suspend", "torch")]
        log.clear()
        for _ in range(2):
            calls["resume_communicators"]()
        assert log == [("resume", "tp"), ("resume", "dp"), ("resume", "torch")]
        log.clear()


def test_an_error_of_nccl_is_told(library: Library) -> None:
    library.result = 3
    with pytest.raises(EngineFaultError, match="NCCL error: error 3"):
        nccl_suspend.calls(ON)["suspend_communicators"]()


def test_an_older_library_is_refused_at_the_start(library: Library) -> None:
    del library.lib.ncclCommSuspend
    library.ncclGetVersion = lambda: "2.28.9"  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError, match=r"2\.28\.9"):
        nccl_suspend.calls(ON)
    nccl_suspend.calls(RLMemoryConfig())


def test_the_installed_library_has_the_calls() -> None:
    """NCCL itself answers, without a GPU: a communicator that does not exist is an invalid argument."""
    library = NCCLLibrary()
    if not hasattr(library.lib, "ncclCommSuspend"):
        pytest.skip(f"the installed NCCL {library.ncclGetVersion()} is older than 2.29.7")
    nobody = OwnCommunicator(SimpleNamespace(nccl=library, comm=ncclComm_t()))
    for call in (nobody.suspend, nobody.resume):
        with pytest.raises(RuntimeError, match="NCCL error: invalid argument"):
            call()


def test_a_rank_has_the_calls(library: Library, log: list[tuple[Any, ...]]) -> None:
    memory = Memory(ON, lambda: ("cpu", 0), SimpleNamespace(model_path="target", revision=None))
    with RegionAdapter(memory, True).region("weights"):
        model = Model(1.0)
    agent = SglangWorker(model, memory, ON, rank=0).agent
    for name in ("suspend", "resume"):
        assert agent.reply(encode_call(f"{name}_communicators", {})).error is None
    assert [call[0] for call in log] == ["suspend"] * 3 + ["resume"] * 3


@pytest.mark.parametrize("option", [True, False])
def test_the_controller_makes_the_calls_if_the_option_is_set(option: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    class Started(Exception):
        pass

    def controller(ranks: Any, *args: Any, **kwargs: Any) -> None:
        given.append(ranks)
        raise Started

    group = SimpleNamespace(rank=1)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: group.rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    monkeypatch.setattr(scheduler, "SglangWorker", lambda *args: MagicMock())
    for name in ("SglangAdapters", "runners_of", "SglangEngine", "EngineUpdates", "_engine_rank", "capabilities_of"):
        monkeypatch.setattr(scheduler, name, MagicMock())
    monkeypatch.setattr(scheduler, "Controller", controller)
    runner = SimpleNamespace(model=SimpleNamespace(named_parameters=dict))
    stand_in = SimpleNamespace(
        weight_updater=SimpleNamespace(tp_cpu_group=group),
        tp_worker=SimpleNamespace(model_runner=runner),
        server_args=SimpleNamespace(tp_size=2, pp_size=1),
    )
    with pytest.raises(Started):
        scheduler.SglangScheduler(stand_in, None, RLMemoryConfig(nccl_suspend=option))  # type: ignore[arg-type]
    assert isinstance(given[0], SuspendingRanks) == option


class Arguments:
    """SGLang's arguments for one node, with every option off."""

    nnodes = 1

    def __getattr__(self, name: str) -> int:
        return 0


def launched(option: bool, given: str | None, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """NCCL_CUMEM_ENABLE of the schedulers, after the first step of SGLang's own launch."""
    variables = {**os.environ, "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1"}
    variables.pop("NCCL_CUMEM_ENABLE", None)
    if given is not None:
        variables["NCCL_CUMEM_ENABLE"] = given
    monkeypatch.setattr(os, "environ", variables)
    monkeypatch.setattr(install, "config_of", lambda args: RLMemoryConfig(nccl_suspend=option))
    monkeypatch.setattr(install, "refuse_modes", lambda args: None)
    arguments = Arguments()
    setattr(arguments, EXPLICIT, True)
    launch = install._launch_subprocesses(lambda cls, args, **kwargs: engine._set_envs_and_config(args))
    launch(engine.Engine, arguments, run_scheduler_process_func=print)
    return variables.get("NCCL_CUMEM_ENABLE")


@pytest.mark.parametrize(
    ("option", "given", "found"),
    [(False, None, "0"), (True, None, "1"), (True, "1", "1"), (False, "0", "0"), (False, "1", "1")],
)
def test_nccl_uses_memory_that_it_can_release(
    option: bool, given: str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang turns this memory off, and NCCL would then suspend nothing."""
    assert launched(option, given, monkeypatch) == found


def test_an_environment_that_turns_this_memory_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="NCCL_CUMEM_ENABLE=0"):
        launched(True, "0", monkeypatch)


def test_a_scheduler_of_another_launcher_refuses_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    monkeypatch.setattr(scheduler, "config_of", lambda args: ON)
    monkeypatch.setattr(scheduler, "refuse_modes", lambda args: None)
    init = scheduler._init(lambda *args, **kwargs: pytest.fail("it started"))
    with pytest.raises(UnsupportedError, match="NCCL_CUMEM_ENABLE=0"):
        init(SimpleNamespace(), Arguments())
