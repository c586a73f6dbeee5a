"""Process groups of a trainer that sleep with its memory: two processes, and stand-ins for torch's groups of NCCL."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rl_memory_plugins.errors import EngineFaultError, InvalidRequestError, RLMemoryError, UnsupportedError
from rl_memory_plugins.memory import nccl
from rl_memory_plugins.trainer import HandoffReport, PausableMemory, RolloutHandoff

LOG: list[str] = []  # the collective calls of this process


class Communicator:
    """As that of a process group of NCCL. Notes how many tags of the memory sleep at each call."""

    memory: PausableMemory
    failure: Exception | None = None

    def suspend(self):
        self._call("suspend")

    def resume(self):
        self._call("resume")

    def _call(self, name):
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        asleep = [tag for tag, status in self.memory.status().items() if str(status.state) != "resident"]
        LOG.append(f"{name} {len(asleep)}")


def memory_with_groups():
    """A memory over two ranks, its model and its communicator."""
    LOG.clear()
    communicator = Communicator()
    torch.manual_seed(0)
    model = nn.Linear(512, 512)
    memory = PausableMemory(model, process_groups=[dist.group.WORLD])
    memory._groups._suspension = nccl.Suspension(lambda: [communicator])
    communicator.memory = memory
    return memory, model, communicator


def of_all_tags(rank):
    memory, model, _ = memory_with_groups()
    before = model.weight.detach().clone()
    memory.sleep(["optimizer"])
    awake = list(LOG)
    report = memory.sleep()
    asleep = list(LOG)
    again = memory.sleep()
    woken = memory.wake(["parameters"])
    memory.wake()
    log = list(LOG)
    timed = report.seconds["suspend"] >= 0, woken.seconds["resume"] >= 0, "suspend" in again.seconds
    memory.close()
    return awake, asleep, log, timed, bool(torch.equal(model.weight, before))


def test_groups_sleep_once_all_tags_do_and_resume_before_the_first_wakes(pair):
    expected = ([], ["suspend 3"], ["suspend 3", "resume 3"], (True, True, True), True)
    assert pair.run(of_all_tags) == [expected] * 2


def where_memory_is_short(rank, step):
    memory, model, communicator = memory_with_groups()
    before = model.weight.detach().clone()
    if step == "wake":
        memory.sleep()
    states = {tag: str(status.state) for tag, status in memory.status().items()}
    allocator, arena = memory._allocator, memory._manager.arena
    if rank == 1:
        allocator._margin_bytes, arena._margin_bytes = 1 << 60, 1 << 60
    found = None
    try:
        (memory.sleep if step == "sleep" else memory.wake)()
    except RLMemoryError as error:
        found = error.code, error.details.get("trainer_rank")
    unchanged = states == {tag: str(status.state) for tag, status in memory.status().items()}
    log = list(LOG)
    allocator._margin_bytes, arena._margin_bytes = 0, 0
    if step == "sleep":
        memory.sleep()
    memory.wake()
    memory.close()
    return found, unchanged, log, LOG[-2:], bool(torch.equal(model.weight, before))


@pytest.mark.parametrize(
    ("step", "error", "log"), [("sleep", "HostMemoryError", []), ("wake", "DeviceMemoryError", ["suspend 3"])]
)
def test_all_ranks_sleep_or_wake_or_none_does(pair, step, error, log):
    first, second = pair.run(where_memory_is_short, step)
    assert first == ((error, 1), True, log, ["suspend 3", "resume 3"], True)
    assert second == ((error, None), True, log, ["suspend 3", "resume 3"], True)


def where_a_commit_fails(rank):
    """Rank 1 cannot commit what it has prepared."""
    memory, _, _ = memory_with_groups()
    memory.prepare_sleep()

    def fail(later):
        raise EngineFaultError("no")

    commit = memory._manager.commit_sleep
    if rank == 1:
        memory._pending = memory._pending.__class__(fail, memory._manager.abort_sleep, ["parameters"], {}, True)
    found = ""
    try:
        memory.commit()
    except RLMemoryError as error:
        found = error.message
    log = list(LOG)
    if rank == 1:
        commit()
    memory.wake()
    memory.close()
    return found, log


def test_a_rank_that_fails_leaves_no_rank_waiting(pair):
    assert pair.run(where_a_commit_fails) == [("no", [])] * 2


def handoff_where_a_commit_fails(rank):
    """Rank 1 cannot commit the sleep of a memory without groups. Another memory with groups comes after."""
    memory, model, _ = memory_with_groups()
    before = model.weight.detach().clone()
    alone = PausableMemory(nn.Linear(512, 512))
    handoff = RolloutHandoff([], {}, weights=[alone.part("parameters"), memory.part(*memory.status())])
    commit = alone._manager.commit_sleep

    def fail():
        alone._manager.commit_sleep = commit
        commit()
        raise EngineFaultError("no")

    if rank == 1:
        alone._manager.commit_sleep = fail
    found = ""
    try:
        handoff._move(HandoffReport(), "offload", handoff._weights)
    except RLMemoryError as error:
        found = error.message
    handoff._move(HandoffReport(), "load", handoff._weights)
    memory.close()
    alone.close()
    return found, list(LOG), bool(torch.equal(model.weight, before))


def test_in_a_handoff_a_memory_that_fails_leaves_no_rank_waiting_for_the_groups_of_another(pair):
    assert pair.run(handoff_where_a_commit_fails) == [("no", ["suspend 3", "resume 3"], True)] * 2


def where_nccl_fails(rank, step):
    memory, model, communicator = memory_with_groups()
    before = model.weight.detach().clone()
    if step == "resume":
        memory.sleep()
    communicator.failure = RuntimeError("NCCL error: unhandled system error")
    found = ""
    try:
        (memory.sleep if step == "suspend" else memory.wake)()
    except EngineFaultError as error:
        found = error.message
    asleep = all(str(memory.status()[tag].state) != "resident" for tag in memory.status())
    memory.wake()
    memory.close()
    return found, asleep, bool(torch.equal(model.weight, before))


@pytest.mark.parametrize("step", ["suspend", "resume"])
def test_a_failure_of_nccl_leaves_the_memory_asleep_and_the_next_wake_works(pair, step):
    message = f"{step} of the process groups: NCCL error: unhandled system error"
    assert pair.run(where_nccl_fails, step) == [(message, True, True)] * 2


def one_sleeps_one_wakes(rank):
    memory, _, _ = memory_with_groups()
    found = ""
    try:
        (memory.sleep if rank else memory.wake)()
    except RLMemoryError as error:
        found = error.code
    states = {str(status.state) for status in memory.status().values()}
    memory.close()
    return found, states


def test_ranks_at_different_steps_do_neither(pair):
    assert pair.run(one_sleeps_one_wakes) == [("StateConflictError", {"resident"})] * 2


def with_gloo(rank):
    """Groups of Gloo, whose members differ, and a group that this rank is not in."""
    one, other = dist.new_group([0]), dist.new_group([1])
    model = nn.Linear(512, 512)
    memory = PausableMemory(model, process_groups=[dist.group.WORLD, one, other])
    memory.sleep()
    memory.wake()
    memory.close()
    beyond = ""
    try:
        PausableMemory(nn.Linear(2, 2), process_groups=[(one, other)[rank], dist.group.WORLD])
    except InvalidRequestError as error:
        beyond = error.details["missing"]
    return beyond


def test_groups_without_nccl_change_nothing(pair):
    assert pair.run(with_gloo) == [[1], [0]]


def test_groups_need_torch_distributed():
    with pytest.raises(InvalidRequestError, match="init_process_group"):
        PausableMemory(process_groups=[SimpleNamespace()])


def test_an_older_nccl_is_refused(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0])
    monkeypatch.setattr(nccl, "has_nccl", lambda group: True)
    monkeypatch.setattr(nccl, "why_not", lambda: "NCCL 2.28.9 is older than 2.29.7")
    with pytest.raises(UnsupportedError, match=r"NCCL 2\.28\.9 is older .* leave process_groups out"):
        PausableMemory(process_groups=[SimpleNamespace()])
