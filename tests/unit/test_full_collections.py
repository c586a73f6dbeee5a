"""No full pass of the garbage collector begins in an update; young garbage is collected all the same."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

from rl_memory_plugins import full_collections
from rl_memory_plugins.errors import InvalidRequestError, WeightUpdateError
from rl_memory_plugins.full_collections import postponed
from rl_memory_plugins.memory.arena import PagedArena
from rl_memory_plugins.memory.fake import FakeAllocator, FakeDevice
from rl_memory_plugins.memory.manager import MemoryManager
from rl_memory_plugins.trainer import push_from_all, push_weights
from rl_memory_plugins.trainer.turns import Turns
from rl_memory_plugins.weights.manifest import TensorSpec
from rl_memory_plugins.weights.model_loader import ModelLoader
from rl_memory_plugins.weights.receiver import WeightReceiver
from rl_memory_plugins.weights.sender import WeightSender

EAGER = (50, 2, 1)


@pytest.fixture(autouse=True)
def _eager():
    """Thresholds that a few hundred objects reach."""
    former = gc.get_threshold()
    gc.set_threshold(*EAGER)
    yield
    gc.set_threshold(*former)


class Node:
    """In a reference cycle with itself."""

    def __init__(self) -> None:
        self.own = self


def collected_beside(count):
    """The generations that are collected while so many objects are made and kept."""
    found: set[int] = set()

    def noted(phase, info):
        if phase == "start":
            found.add(info["generation"])

    kept = []
    gc.callbacks.append(noted)
    try:
        kept.extend([None] for _ in range(count))
    finally:
        gc.callbacks.remove(noted)
    return found


def test_young_generations_alone_are_collected():
    gc.collect()  # the next full pass begins once a quarter of what this one has looked at is new
    count = len(gc.get_objects()) + 10_000
    assert collected_beside(count) == {0, 1, 2}
    with postponed():
        assert collected_beside(count) == {0, 1}
    assert collected_beside(count) == {0, 1, 2}


def test_a_young_cycle_is_freed():
    with postponed():
        cycle = weakref.ref(Node())
        collected_beside(1000)
        assert cycle() is None


def test_thresholds_are_as_before_after_the_last_body():
    inner_is_over = threading.Event()

    def inner():
        with pytest.raises(RuntimeError), postponed():
            raise RuntimeError
        inner_is_over.set()

    with postponed():
        thread = threading.Thread(target=inner)
        thread.start()
        assert inner_is_over.wait(60)
        assert gc.get_threshold() == (*EAGER[:2], full_collections._NEVER)
        thread.join()
    assert gc.get_threshold() == EAGER


def test_thresholds_that_somebody_sets_meanwhile_stay():
    with postponed():
        gc.set_threshold(60, 3, 2)
    assert gc.get_threshold() == (60, 3, 2)
    with postponed():
        gc.set_threshold(70, 4)
    assert gc.get_threshold() == (70, 4, 2)


def test_a_child_process_has_full_passes_and_may_postpone_its_own():
    with postponed(), full_collections._lock:  # another thread may hold the lock while this one forks
        child = os.fork()
        if not child:
            as_before = gc.get_threshold() == EAGER
            with postponed():
                postpones = gc.get_threshold()[2] == full_collections._NEVER
            os._exit(0 if as_before and postpones and gc.get_threshold() == EAGER else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert gc.get_threshold() == EAGER


def test_a_collector_that_is_off_stays_off():
    gc.set_threshold(0)
    off = gc.get_threshold()
    with postponed():
        assert gc.get_threshold()[0] == 0
    assert gc.get_threshold() == off


class Noting:
    """A source that notes the threshold of full passes when it lists its tensors, of which there are none."""

    def __init__(self) -> None:
        self.thresholds: list[int] = []

    def specs(self) -> list[TensorSpec]:
        self.thresholds.append(gc.get_threshold()[2])
        return []

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())


def test_no_full_pass_begins_while_a_trainer_sends():
    source = Noting()
    with WeightSender(timeout_s=0.1) as sender, pytest.raises(WeightUpdateError):
        sender.send(source)
    assert source.thresholds == [full_collections._NEVER] and gc.get_threshold() == EAGER


def test_no_full_pass_begins_until_the_engine_has_answered():
    found = []

    def post(body):
        raise WeightUpdateError(f"{found.append(gc.get_threshold()[2])}")

    with pytest.raises(WeightUpdateError):
        push_weights(post, {"t": torch.zeros(1)}, timeout_s=5)
    assert found == [full_collections._NEVER] and gc.get_threshold() == EAGER


def test_no_full_pass_begins_in_a_step_of_a_handoff():
    with Turns().turn():
        assert gc.get_threshold()[2] == full_collections._NEVER
    assert gc.get_threshold() == EAGER


@pytest.mark.parametrize("on_failure", ["abort", "continue"])
def test_no_full_pass_begins_in_a_process_that_only_takes_part_in_gathers(on_failure):
    source = Noting()
    push_from_all([], source, on_failure=on_failure)
    assert set(source.thresholds) == {full_collections._NEVER} and gc.get_threshold() == EAGER


def test_no_full_pass_begins_while_a_rank_receives():
    found: list[int] = []
    device = FakeDevice("fake:0")
    manager = MemoryManager(0, FakeAllocator(device), PagedArena(), list)
    receiver = WeightReceiver(manager, ModelLoader(lambda weights: None, dict))
    receiver.before_writing = lambda: found.append(gc.get_threshold()[2])
    with pytest.raises(InvalidRequestError):
        receiver.receive({}, "token", 1.0)
    assert found == [full_collections._NEVER] and gc.get_threshold() == EAGER
