"""Process groups of a trainer that sleep with its memory: two processes, and stand-ins for torch's groups of NCCL."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rl_memory_plugins.errors import (
    DeviceMemoryError,
    EngineFaultError,
    InvalidRequestError,
    RLMemoryError,
    StateConflictError,
    UnsupportedError,
)
from rl_memory_plugins.memory import nccl
from rl_memory_plugins.trainer import HandoffReport, PausableMemory, RolloutHandoff, process_groups

LOG: list[str] = []  # the collective calls of this process
FAILURES: set[str] = set()  # the calls that fail in this process
BARRIER: list[Any] = []  # a group of Gloo for the stand-ins


class Communicator:
    """As that of WORLD if it used NCCL: a rank that is alone in a call raises after some seconds."""

    def __init__(self, group):
        self.group = group

    def __eq__(self, other):
        return other == nccl.GroupCommunicator(self.group)

    __hash__ = None

    def suspendable_bytes(self):
        return 1

    def suspend(self):
        self._call("suspend")

    def resume(self):
        self._call("resume")

    def _call(self, name):
        dist.monitored_barrier(BARRIER[0], timeout=timedelta(seconds=10))
        if name in FAILURES:
            raise RuntimeError("NCCL error: unhandled system error")
        LOG.append(name)


def memory_of(model, *groups, **options):
    """A memory whose groups take part as if they used NCCL."""
    LOG.clear()
    FAILURES.clear()
    if not BARRIER:
        BARRIER.append(dist.new_group(backend="gloo"))
    nccl.of_groups = lambda groups: [Communicator(group) for group in groups]
    process_groups._suspension = nccl.Suspension()
    return PausableMemory(model, process_groups=groups or [dist.group.WORLD], **options)


def memory_with_groups():
    """A memory over two ranks, and its model."""
    torch.manual_seed(0)
    model = nn.Linear(512, 512)
    return memory_of(model), model


def of_all_tags(rank):
    memory, model = memory_with_groups()
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
    expected = ([], ["suspend"], ["suspend", "resume"], (True, True, True), True)
    assert pair.run(of_all_tags) == [expected] * 2


def where_memory_is_short(rank, step):
    memory, model = memory_with_groups()
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
    ("step", "error", "log"), [("sleep", "HostMemoryError", []), ("wake", "DeviceMemoryError", ["suspend"])]
)
def test_all_ranks_sleep_or_wake_or_none_does(pair, step, error, log):
    first, second = pair.run(where_memory_is_short, step)
    assert first == ((error, 1), True, log, ["suspend", "resume"], True)
    assert second == ((error, None), True, log, ["suspend", "resume"], True)


def where_a_commit_fails(rank):
    """Rank 1 cannot commit what it has prepared."""
    memory, _ = memory_with_groups()
    memory.prepare_sleep()

    def fail(tags):
        raise EngineFaultError("no")

    commit = memory._manager.commit_sleep
    if rank == 1:
        memory._pending = replace(memory._pending, commit=fail)
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
    memory, model = memory_with_groups()
    before = model.weight.detach().clone()
    alone = PausableMemory(nn.Linear(512, 512))
    handoff = RolloutHandoff([], {}, weights=[alone.part("parameters"), memory.part(*memory.status())])
    commit = alone._manager.commit_sleep

    def fail(tags):
        alone._manager.commit_sleep = commit
        commit()
        raise EngineFaultError("no")

    if rank == 1:
        alone._manager.commit_sleep = fail
    found = ""
    try:
        handoff._parts.move(HandoffReport(), "offload", handoff._parts.weights)
    except RLMemoryError as error:
        found = error.message
    handoff._parts.move(HandoffReport(), "load", handoff._parts.weights)
    memory.close()
    alone.close()
    return found, list(LOG), bool(torch.equal(model.weight, before))


def test_in_a_handoff_a_memory_that_fails_leaves_no_rank_waiting_for_the_groups_of_another(pair):
    assert pair.run(handoff_where_a_commit_fails) == [("no", ["suspend", "resume"], True)] * 2


def where_nccl_fails(rank, step, ranks):
    """The call fails on these ranks. Returns the errors of it and of the next wake, and the states after each."""
    memory, model = memory_with_groups()
    before = model.weight.detach().clone()
    if step == "resume":
        memory.sleep()
    if rank in ranks:
        FAILURES.add(step)
    found = []
    for call in ((memory.sleep if step == "suspend" else memory.wake), memory.wake):
        error = ""
        try:
            call()
        except EngineFaultError as raised:
            error = raised.message
        FAILURES.clear()
        found.append((error, str(memory.status()["parameters"].state)))
    if found[-1][1] == "resident":
        memory.close()
        assert torch.equal(model.weight, before)
    return found


@pytest.mark.parametrize("step", ["suspend", "resume"])
def test_a_failure_of_nccl_leaves_the_memory_asleep_and_the_next_wake_works(pair, step):
    message = f"{step} of the process groups: NCCL error: unhandled system error"
    assert pair.run(where_nccl_fails, step, [0, 1]) == [[(message, "preserved"), ("", "resident")]] * 2


@pytest.mark.parametrize("step", ["suspend", "resume"])
def test_after_a_failure_of_one_rank_no_rank_waits_for_the_others(pair, step):
    message = (
        f"{step} of the process groups: NCCL error: unhandled system error. Only some ranks have failed: start the "
        "trainer's processes again"
    )
    assert pair.run(where_nccl_fails, step, [1]) == [[(message, "preserved")] * 2] * 2


def where_a_wake_cannot_be_committed(rank):
    memory, model = memory_with_groups()
    before = model.weight.detach().clone()
    memory.sleep()
    commit = memory._manager.commit_wake

    def fail(later):
        memory._manager.commit_wake = commit
        memory._manager.abort_wake()
        raise EngineFaultError("no")

    if rank == 1:
        memory._manager.commit_wake = fail
    found = ""
    try:
        memory.wake()
    except RLMemoryError as error:
        found = error.message
    state = str(memory.status()["parameters"].state)
    memory.wake()
    memory.close()
    return found, state, list(LOG), bool(torch.equal(model.weight, before))


def test_a_wake_that_fails_on_one_rank_is_an_error_on_all(pair):
    first, second = pair.run(where_a_wake_cannot_be_committed)
    assert first == ("no", "resident", ["suspend", "resume"], True)
    assert second == ("no", "preserved", ["suspend", "resume"], True)


def where_communicators_find_no_memory(rank):
    memory, _ = memory_with_groups()
    memory.sleep()
    require = process_groups._suspension.require_memory

    def none(device, among):
        raise DeviceMemoryError("full")

    if rank == 1:
        process_groups._suspension.require_memory = none
    found = ""
    try:
        memory.wake()
    except RLMemoryError as error:
        found = error.code
    state = str(memory.status()["parameters"].state)
    process_groups._suspension.require_memory = require
    memory.wake()
    memory.close()
    return found, state, list(LOG)


def test_no_rank_resumes_if_one_has_no_memory_for_its_communicators(pair):
    expected = ("DeviceMemoryError", "preserved", ["suspend", "resume"])
    assert pair.run(where_communicators_find_no_memory) == [expected] * 2


def two_memories(rank):
    """A group that two memories have is suspended while both sleep."""
    policy = memory_of(nn.Linear(512, 512))
    critic = PausableMemory(nn.Linear(512, 512), process_groups=[dist.group.WORLD])
    log = []
    for call in (critic.sleep, policy.sleep, policy.wake, policy.sleep, critic.wake, policy.wake, critic.sleep):
        LOG.clear()
        call()
        log.append("".join(LOG))
    critic.close()
    LOG.clear()
    policy.sleep()
    log.append("".join(LOG))
    policy.close()
    return log


def test_a_group_of_two_memories_sleeps_while_both_do(pair):
    expected = ["", "suspend", "resume", "suspend", "resume", "", "", "suspend"]
    assert pair.run(two_memories) == [expected] * 2


def closed_by_itself(rank):
    memory, _ = memory_with_groups()
    if rank == 1:
        memory.close()  # the other rank is not there
    dist.barrier()
    if rank == 0:
        memory.close()
    return list(LOG)


def test_a_rank_closes_by_itself_while_everything_is_awake(pair):
    assert pair.run(closed_by_itself) == [[], []]


def closed_in_a_transition(rank):
    memory, _ = memory_with_groups()
    memory.prepare_sleep()
    try:
        memory.close()
    except StateConflictError:
        memory.abort()
    memory.sleep(["optimizer"])  # the parameters stay awake
    log = list(LOG)
    memory.close()
    return log


def test_a_memory_that_could_not_be_closed_keeps_its_groups(pair):
    assert pair.run(closed_in_a_transition) == [[], []]


def handoffs(rank):
    """The handoffs that are refused because a group would sleep while the weights are sent."""
    weights, others = nn.Linear(512, 512), nn.Linear(512, 512)
    alone = PausableMemory(others, process_groups=[dist.group.WORLD])
    both = PausableMemory(weights, process_groups=[dist.group.WORLD])
    tried = {
        "others alone": {"weights": [weights], "others": [alone.part("parameters")]},
        "both": {"weights": [both.part("parameters")], "others": [alone.part("parameters")]},
        "from_host": {"weights": [both.part("parameters")], "from_host": True},
    }
    refused = []
    for name, arguments in tried.items():
        try:
            RolloutHandoff([], {}, **arguments)
        except InvalidRequestError:
            refused.append(name)
    alone.close()
    both.close()
    return refused


def test_a_handoff_refuses_groups_that_sleep_while_it_sends(pair):
    assert pair.run(handoffs) == [["others alone", "from_host"]] * 2


def one_sleeps_one_wakes(rank):
    memory, _ = memory_with_groups()
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
    process_groups._suspension = nccl.Suspension()
    nccl.of_groups = lambda groups: []
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
