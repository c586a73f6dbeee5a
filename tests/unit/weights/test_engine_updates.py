"""What weights are worth while an engine or a trainer updates them by calls that announce nothing."""

from __future__ import annotations

import pytest
import torch

from rl_memory_plugins.errors import StateConflictError
from rl_memory_plugins.memory.backup import PagedArena
from rl_memory_plugins.memory.host import HostAllocator
from rl_memory_plugins.memory.manager import MemoryManager
from rl_memory_plugins.tags import Content, Level, Tag
from rl_memory_plugins.weights.engine_updates import EngineUpdates


class Rank:
    """Two parameters of one rank."""

    def __init__(self) -> None:
        self.parameters = {"a": torch.zeros(8), "b": torch.zeros(8)}
        self.other = torch.zeros(8)
        self.manager = MemoryManager(0, HostAllocator(), PagedArena(), lambda tag: [])
        self.undone = 0
        self.updates = EngineUpdates(self.manager, lambda: self.parameters.values(), self.undo)

    def undo(self) -> None:
        self.undone += 1

    def write(self, names: str) -> None:
        for name in names:
            self.parameters[name].copy_(torch.ones(8))

    def call(self, names: str, *, success: bool = True) -> None:
        """A call that ranks agree on after it has run."""
        with self.updates.record():
            self.write(names)
        if success:
            self.updates.settle()
        else:
            self.updates.fail()

    @property
    def content(self) -> Content:
        return self.manager.content


@pytest.fixture
def rank():
    return Rank()


@pytest.mark.parametrize("before", [Content.VALID, Content.STALE, Content.FAILED])
def test_calls_add_up_to_a_complete_update(rank: Rank, before: Content) -> None:
    rank.manager.content = before
    rank.call("a")
    assert rank.content is before
    rank.call("b")
    assert rank.content is Content.VALID


def test_a_change_by_other_means_starts_the_count_anew(rank: Rank) -> None:
    rank.manager.content = Content.STALE
    rank.call("a")
    rank.manager.begin_writing()
    rank.manager.finish_writing(complete=False)
    rank.call("b")
    assert rank.content is Content.FAILED
    rank.call("a")
    assert rank.content is Content.VALID


@pytest.mark.parametrize("before", [Content.VALID, Content.STALE])
def test_a_call_that_failed_on_another_rank_counts_for_nothing(rank: Rank, before: Content) -> None:
    rank.manager.content = before
    rank.call("ab", success=False)
    assert rank.content is Content.FAILED
    rank.call("a")
    rank.call("b")
    assert rank.content is Content.VALID


def test_only_parameters_count_as_written(rank: Rank) -> None:
    with rank.updates.record():
        rank.other.copy_(torch.ones(8))
    assert not rank.updates.wrote
    with rank.updates.record():
        rank.write("b")
    assert rank.updates.wrote


@pytest.mark.parametrize("before", [Content.VALID, Content.STALE, Content.FAILED])
@pytest.mark.parametrize("names", ["", "a", "ab"])
def test_an_update_of_several_calls_is_valid_at_its_end(rank: Rank, before: Content, names: str) -> None:
    rank.manager.content = before
    rank.updates.begin()
    for name in names:
        assert rank.content is Content.UPDATING
        rank.call(name)
    assert rank.content is Content.UPDATING
    assert rank.updates.end()
    assert rank.content is (Content.VALID if names == "ab" else before)
    assert not rank.updates.end()


def test_the_calls_of_several_updates_add_up(rank: Rank) -> None:
    """As trainers send buckets that each have a begin and an end."""
    rank.manager.content = Content.STALE
    for name in "ab":
        rank.updates.begin()
        rank.call(name)
        rank.updates.end()
    assert rank.content is Content.VALID


def test_a_call_that_fails_within_an_update_is_not_valid_at_its_end(rank: Rank) -> None:
    """An update of valid weights: the calls after the failure must cover everything."""
    rank.updates.begin()
    rank.call("a", success=False)
    assert rank.content is Content.FAILED
    rank.call("a")
    assert rank.content is Content.UPDATING
    rank.updates.end()
    assert rank.content is Content.FAILED


def test_an_update_may_still_complete_after_a_call_that_failed(rank: Rank) -> None:
    rank.updates.begin()
    rank.call("a", success=False)
    rank.call("ab")
    rank.updates.end()
    assert rank.content is Content.VALID


def test_weights_that_others_tear_within_an_update_stay_so(rank: Rank) -> None:
    rank.updates.begin()
    rank.manager.tear()
    rank.updates.end()
    assert rank.content is Content.FAILED
    rank.updates.begin()
    rank.manager.tear()
    rank.call("a")
    rank.updates.end()
    assert rank.content is Content.FAILED


@pytest.mark.parametrize("before", [Content.VALID, Content.STALE])
@pytest.mark.parametrize("names", ["", "a"])
def test_an_update_that_breaks_off_has_changed_nothing_or_failed(rank: Rank, before: Content, names: str) -> None:
    rank.manager.content = before
    rank.updates.begin()
    rank.call(names)
    rank.updates.break_off()
    assert rank.content is (Content.FAILED if names else before)
    assert rank.undone == 1
    assert not rank.updates.is_open


def test_nothing_is_written_while_the_weights_sleep(rank: Rank) -> None:
    rank.manager.prepare_sleep(Level.DISCARD, [Tag.WEIGHTS])
    rank.manager.commit_sleep()
    for call in (rank.updates.watch, rank.updates.record):
        with pytest.raises(StateConflictError), call():
            rank.write("ab")
    with pytest.raises(StateConflictError):
        rank.updates.begin()
    assert (rank.content, rank.undone) == (Content.STALE, 0)
    assert not rank.parameters["a"].any()


# -- a rank that decides alone --------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [Content.VALID, Content.STALE])
@pytest.mark.parametrize(("names", "after"), [("", None), ("a", Content.FAILED), ("ab", Content.VALID)])
def test_a_load_that_raises_has_changed_nothing_or_failed_or_is_complete(
    rank: Rank, before: Content, names: str, after: Content | None
) -> None:
    rank.manager.content = before
    epoch = rank.manager.epoch
    with pytest.raises(ConnectionError), rank.updates.watch():
        rank.write(names)
        raise ConnectionError("the trainer is gone")
    assert rank.content is (after or before)
    assert rank.undone == 1
    assert rank.manager.epoch > epoch  # not every write is seen
