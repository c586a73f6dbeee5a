"""Which communicators are suspended and resumed, and when. Stand-ins for torch's process groups of NCCL."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch

from rl_memory_plugins.engines.communicators import count_as_nccl
from rl_memory_plugins.errors import DeviceMemoryError
from rl_memory_plugins.memory import nccl

MiB = 1 << 20


class Communicator:
    """A communicator that fails once, on request."""

    def __init__(self, nbytes: int = 0) -> None:
        self.calls: list[str] = []
        self.failure: Exception | None = None
        self.nbytes = nbytes

    def suspendable_bytes(self):
        return self.nbytes

    def suspend(self) -> None:
        self._call("suspend")

    def resume(self) -> None:
        self._call("resume")

    def _call(self, name):
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        self.calls.append(name)


class Backend(Communicator):
    """As torch's `ProcessGroupNCCL`."""

    def __init__(self, pointer=1, total=0):
        super().__init__()
        self.pointer, self.total = pointer, total

    def _comm_ptr(self):
        return self.pointer

    def memory_stats(self):
        return {"suspend": self.total - 1, "persist": 1, "total": self.total}


def group_of(backend, config="cuda:nccl"):
    return SimpleNamespace(_get_backend=lambda device: backend, config=config)


@pytest.fixture
def able(monkeypatch):
    """A torch with NCCL that can suspend."""
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed.distributed_c10d.Backend, "suspend", None, raising=False)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: group.config)


def test_an_interrupt_of_nccl_leaves_no_communicator_suspended_for_ever():
    """The interrupt comes when NCCL has done its work: a group that nobody resumes would wait without end."""

    class Interrupted(Communicator):
        def _call(self, name):
            self.calls.append(name)
            if len(self.calls) <= 2:
                raise KeyboardInterrupt

    first, second = Interrupted(), Communicator()
    suspension = nccl.Suspension()
    with pytest.raises(KeyboardInterrupt):
        suspension.suspend([first, second])
    assert suspension.is_suspended(first) and not suspension.is_suspended(second)
    suspension.suspend([first, second])
    with pytest.raises(KeyboardInterrupt):
        suspension.resume()
    assert not suspension.is_suspended(first) and suspension.is_suspended(second)
    suspension.resume()
    assert (first.calls, second.calls) == (["suspend", "resume"],) * 2


def test_a_failure_keeps_the_order_that_all_ranks_have():
    communicators = [Communicator() for _ in range(3)]
    suspension = nccl.Suspension()
    suspension.suspend(communicators)
    communicators[0].failure = RuntimeError("NCCL")
    with pytest.raises(RuntimeError):
        suspension.resume()
    assert [one for one, _ in suspension._suspended] == communicators


def test_each_communicator_is_suspended_once_and_resumed_once():
    first, second = Communicator(), Communicator()
    suspension = nccl.Suspension()
    for _ in range(2):
        suspension.suspend([first, second, first])
        suspension.suspend([first, second])
        assert suspension.count() == 2
        suspension.resume()
        suspension.resume()
        assert suspension.count() == 0
    assert first.calls == second.calls == ["suspend", "resume"] * 2


def test_only_suspended_communicators_are_resumed_and_only_those_asked_for():
    first, second, later = Communicator(), Communicator(), Communicator()
    suspension = nccl.Suspension()
    suspension.suspend([first, second])
    suspension.resume([second, later])
    assert (first.calls, second.calls, later.calls) == (["suspend"], ["suspend", "resume"], [])
    assert suspension.is_suspended(first) and not suspension.is_suspended(second)


def test_a_communicator_without_suspendable_memory_is_warned_of_once(caplog):
    suspension = nccl.Suspension()
    suspension.suspend([Communicator(1)])
    assert caplog.text == ""
    suspension.suspend([Communicator(0), Communicator(0)])
    assert caplog.text.count("NCCL_CUMEM_ENABLE") == 1


def test_a_call_that_failed_is_continued():
    first, second = Communicator(), Communicator()
    suspension = nccl.Suspension()
    second.failure = RuntimeError("NCCL error")
    with pytest.raises(RuntimeError, match="NCCL error"):
        suspension.suspend([first, second])
    assert suspension.count() == 1
    suspension.suspend([first, second])
    assert first.calls == second.calls == ["suspend"]
    second.failure = RuntimeError("NCCL error")
    with pytest.raises(RuntimeError, match="NCCL error"):
        suspension.resume()
    suspension.resume()
    assert first.calls == second.calls == ["suspend", "resume"]


def test_memory_for_suspended_communicators_is_required(monkeypatch):
    """torch's cache is emptied before the rank gives up."""
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    free, cached = [0], [0]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 1 << 40))

    def empty_cache():
        free[0] += cached[0]

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    first, second = Communicator(300 * MiB), Communicator(100 * MiB)
    suspension = nccl.Suspension()
    suspension.require_memory(gpu)  # nothing is suspended
    suspension.suspend([first, second])
    free[0] = 410 * MiB
    with pytest.raises(DeviceMemoryError) as caught:
        suspension.require_memory(gpu)
    assert caught.value.details["needed_bytes"] == 400 * MiB
    suspension.require_memory(gpu, [second])
    suspension.require_memory(cpu)
    cached[0] = 6 * MiB
    suspension.require_memory(gpu)
    suspension.resume([first])
    free[0] = 116 * MiB
    suspension.require_memory(gpu)


def test_groups_of_nccl_that_have_a_communicator_are_found(able):
    made, mixed = Backend(), Backend()
    gloo, not_made = group_of(Backend(), "cpu:gloo,cuda:gloo"), group_of(Backend(pointer=0))
    first = group_of(made)
    groups = [first, gloo, not_made, group_of(mixed, "cpu:gloo,cuda:nccl"), first]
    found = nccl.of_groups(groups)
    assert [one.backend for one in found] == [made, mixed, made]
    suspension = nccl.Suspension()
    suspension.suspend(nccl.of_groups(groups))
    suspension.resume()
    assert made.calls == mixed.calls == ["suspend", "resume"]


def test_an_older_nccl_is_never_called(able, monkeypatch):
    """The library has no such function, and a call would end the process."""
    assert nccl.why_not() == ""
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    assert "2.28.9 is older than 2.29.7" in nccl.why_not()
    assert nccl.of_groups([group_of(Backend())]) == []


def test_an_older_torch_cannot(able, monkeypatch):
    monkeypatch.setattr(torch.distributed, "distributed_c10d", SimpleNamespace(Backend=object, ProcessGroupNCCL=object))
    assert "2.13 and later" in nccl.why_not()


def test_a_torch_without_nccl_cannot(able, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert "without NCCL" in nccl.why_not()


def test_the_memory_of_torchs_communicators_is_counted(able, monkeypatch):
    assert nccl.bytes_of_groups(0) == 0  # torch.distributed has not started
    groups = [group_of(Backend(total=300)), group_of(Backend(total=40)), group_of(Backend(total=5), "cpu:gloo")]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_world", SimpleNamespace(pg_map=groups))
    assert nccl.bytes_of_groups(0) == 340
    assert nccl.bytes_of_groups(1) == 0


class Own:
    """As `PyNcclCommunicator` of both engines."""

    def __init__(self, nbytes, index=0):
        self.nbytes, self.comm, self.device = nbytes, object(), torch.device("cuda", index)
        self.nccl = SimpleNamespace(lib=SimpleNamespace(ncclCommMemStats=self.count))

    def count(self, comm, stat, value):
        if comm is not self.comm or stat.value not in (0, 3) or self.nbytes is None:
            return 4  # an invalid argument
        value._obj.value = self.nbytes if stat.value == 3 else self.nbytes // 2
        return 0


def test_own_communicators_grow_after_they_were_made(monkeypatch):
    monkeypatch.setattr(nccl, "_own", weakref.WeakKeyDictionary())
    first, elsewhere, unknown = Own(100), Own(7, index=1), Own(None)
    for one in (first, elsewhere, unknown):
        count_as_nccl(lambda self: None)(one)  # the hook of its constructor
    count_as_nccl(lambda self: None)(SimpleNamespace(available=False))  # the only rank of its group
    assert nccl.growth_of_own(0) == nccl.growth_of_own(1) == 0
    first.nbytes, elsewhere.nbytes = 130, 8
    assert (nccl.growth_of_own(0), nccl.growth_of_own(1)) == (30, 1)
    first.nbytes = None  # destroyed
    assert nccl.growth_of_own(0) == 0


def test_nccl_tells_what_a_suspension_releases():
    group = nccl.GroupCommunicator(group_of(Backend(total=300)))
    assert group.suspendable_bytes() == 299
    assert nccl.counted_bytes(Own(100), nccl.SUSPENDABLE) == 50
    assert nccl.counted_bytes(Own(None), nccl.SUSPENDABLE) is None
    assert nccl.counted_bytes(SimpleNamespace(available=False), nccl.TOTAL) is None
