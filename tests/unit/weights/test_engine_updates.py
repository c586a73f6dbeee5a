"""What weights are worth while an engine or a trainer updates them by calls that announce nothing."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from rl_memory_plugins.engines.vllm.update_session import WatchedLoads, prepare_reload
from rl_memory_plugins.errors import StateConflictError
from rl_memory_plugins.memory.allocator import Block
from rl_memory_plugins.memory.arena import PagedArena
from rl_memory_plugins.memory.host import HostAllocator
from rl_memory_plugins.memory.manager import MemoryManager
from rl_memory_plugins.memory.weights_content import KeptWeights
from rl_memory_plugins.tags import Content, Level, Tag
from rl_memory_plugins.weights.engine_updates import EngineUpdates
from rl_memory_plugins.weights.write_detector import leaving_early


class Rank:
    """Two parameters of one rank."""

    def __init__(self) -> None:
        self.parameters = {"a": torch.zeros(8), "b": torch.zeros(8)}
        self.other = torch.zeros(8)
        self.manager = MemoryManager(0, HostAllocator(), PagedArena(), lambda tag: [])
        self.undone = 0
        self.updates = EngineUpdates(self.manager, lambda: self.parameters.items(), self.undo)

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


@pytest.mark.parametrize("before", [Content.STALE, Content.FAILED])
def test_kept_weights_are_neither_marked_nor_waited_for(rank: Rank, before: Content) -> None:
    rank.manager.content = before
    rank.manager._kept = KeptWeights(frozenset({"a"}))
    rank.call("b")
    assert rank.content is Content.VALID
    assert torch.equal(rank.parameters["a"], torch.zeros(8))
    assert rank.manager.kept == frozenset()


@pytest.mark.parametrize("before", [Content.STALE, Content.FAILED])
def test_what_no_load_fills_is_neither_marked_nor_waited_for(rank: Rank, before: Content) -> None:
    rank.manager.find_unfilled = lambda: ["a"]
    rank.manager.memory_of = lambda names: {name: Block(rank.parameters[name].data_ptr(), 32) for name in names}
    rank.call("b")  # the first call finds it
    rank.manager.content = before
    rank.call("b")
    assert rank.content is Content.VALID
    assert torch.equal(rank.parameters["a"], torch.zeros(8))
    rank.call("b", success=False)
    rank.call("b")
    assert rank.content is Content.VALID
    assert torch.equal(rank.parameters["a"], torch.zeros(8))


def test_vllm_s_reload_marks_nothing_before_it_knows_what_no_load_fills() -> None:
    """The reload moves layer after layer to the meta device, where a trace of the loader would find nothing."""
    model: Any = torch.nn.Linear(2, 2)
    model.load_weights = lambda weights: None
    manager = MemoryManager(0, HostAllocator(), PagedArena(), lambda tag: [])
    loads = WatchedLoads(manager, model, lambda: None)
    learnt: list[bool] = []
    manager.find_unfilled = lambda: learnt.append(model.weight.is_meta) or []  # type: ignore[func-returns-value]
    prepare_reload(torch.nn.Linear(1, 1))
    assert learnt == []
    prepare_reload(model)
    prepare_reload(model)
    assert learnt == [False]
    assert loads.manager.content is Content.VALID


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
    rank.manager.mark_failed()
    rank.updates.end()
    assert rank.content is Content.FAILED
    rank.updates.begin()
    rank.manager.mark_failed()
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
    assert (rank.content, rank.undone) == (Content.STALE, 1)  # layers that were changed for the refused load
    assert not rank.parameters["a"].any()


# -- a rank that decides alone --------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [Content.VALID, Content.STALE])
@pytest.mark.parametrize(("names", "after"), [("", None), ("a", Content.FAILED), ("ab", Content.VALID)])
def test_a_load_that_raises_has_changed_nothing_or_failed_or_is_complete(
    rank: Rank, before: Content, names: str, after: Content | None
) -> None:
    if before is Content.VALID and names:
        after = Content.FAILED  # valid weights hold no marks, so nobody knows what is still the old
    rank.manager.content = before
    epoch = rank.manager.epoch
    with pytest.raises(ConnectionError), rank.updates.watch():
        rank.write(names)
        raise ConnectionError("the trainer is gone")
    assert rank.content is (after or before)
    assert rank.undone == 1
    assert rank.manager.epoch > epoch  # not every write is seen


OLD = {
    "scaled": lambda p, new: p.mul_(2),
    "accumulated": lambda p, new: p.index_put_((torch.arange(8),), new, accumulate=True),
    "put": lambda p, new: p.index_put_((torch.tensor([0, 3]),), new[:2]),
    "copied by index": lambda p, new: p.index_copy_(0, torch.arange(7), new[:7]),
    "filled by index": lambda p, new: p.index_fill_(0, torch.tensor([1]), 0.0),
    "masked": lambda p, new: p.masked_fill_(new > 1, 0.0),
    "put into columns": lambda p, new: p.view(2, 4).__setitem__((slice(None), torch.arange(3)), 1.0),
    "scattered": lambda p, new: p.scatter_(0, torch.tensor([1]), new[:1]),
    "selected": lambda p, new: torch.where(new > 1, new, p, out=p),
    "added": lambda p, new: torch.add(p, new, out=p),
}
NEW = {
    "copied": lambda p, new: p.copy_(new),
    "filled": lambda p, new: p.fill_(1),
    "put": lambda p, new: p.index_put_((torch.arange(8),), new),
    "put into columns": lambda p, new: p.view(2, 4).__setitem__((slice(None), torch.arange(4)), 1.0),
    "put into columns of a part": lambda p, new: [
        p.view(2, 4)[row : row + 1].__setitem__((slice(None), torch.arange(4)), new[:4]) for row in (0, 1)
    ],
    "put by a mask": lambda p, new: p.index_put_((new > -1,), new),
    "copied by index": lambda p, new: p.index_copy_(0, torch.arange(8), new),
    "computed": lambda p, new: torch.add(new, new, out=p),
    "all at once": lambda p, new: torch._foreach_copy_([p[:4], p[4:]], [new[:4], new[4:]]),
}


@pytest.mark.parametrize(
    ("write", "content"),
    [
        *(pytest.param(write, Content.STALE, id=f"{name}-stale") for name, write in OLD.items()),
        *(pytest.param(write, Content.VALID, id=f"{name}-valid") for name, write in NEW.items()),
    ],
)
def test_only_what_no_longer_depends_on_the_old_bytes_counts(rank: Rank, write: Any, content: Content) -> None:
    rank.manager.content = Content.STALE
    with rank.updates.watch():
        for parameter in rank.parameters.values():
            write(parameter, torch.ones(8))
    assert rank.content is content


def test_a_write_that_does_not_count_still_tears_what_breaks_off(rank: Rank) -> None:
    with pytest.raises(ConnectionError), rank.updates.watch():
        rank.parameters["a"].mul_(2)
        raise ConnectionError("the trainer is gone")
    assert rank.content is Content.FAILED


@pytest.mark.parametrize("before", [Content.VALID, Content.STALE])
def test_the_detector_is_gone_once_it_has_seen_a_write(rank: Rank, before: Content) -> None:
    """Loads of many tensors in one call must not pay for it."""
    rank.manager.content = before
    modes = []

    def load(weights: Any) -> None:
        for name, tensor in weights:
            modes.append(_get_current_dispatch_mode() is not None)
            rank.parameters[name].copy_(tensor)

    for form in (iter, list, tuple):
        with rank.updates.watch():
            load(leaving_early(form([(name, torch.ones(8)) for name in "abab"])))
    assert modes == [True, False, False, False] * 3
    assert _get_current_dispatch_mode() is None
    assert rank.content is Content.VALID


def test_a_mode_of_the_loader_s_own_stays(rank: Rank) -> None:
    class Own(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with rank.updates.watch():
        weights = iter(leaving_early([("a", torch.ones(8)), ("b", torch.ones(8))]))
        next(weights)
        rank.write("a")
        own = Own()
        with own:
            next(weights)
            assert _get_current_dispatch_mode() is own
            rank.write("b")
    assert _get_current_dispatch_mode() is None


def test_writes_in_other_threads_and_by_numpy_count(rank: Rank) -> None:
    """A dispatch mode sees neither."""
    rank.manager.content = Content.STALE
    with rank.updates.watch():
        thread = threading.Thread(target=rank.write, args=("a",))
        thread.start()
        thread.join()
        rank.parameters["b"].numpy()[:] = 1
    assert rank.content is Content.VALID


# -- writes that nothing can record -----------------------------------------------------------------------------


@pytest.mark.parametrize("before", [Content.VALID, Content.STALE])
def test_an_update_that_breaks_off_after_unrecorded_writes_has_failed(rank: Rank, before: Content) -> None:
    rank.manager.content = before
    rank.updates.begin()
    rank.updates.assume_written()
    rank.updates.break_off()
    assert rank.content is Content.FAILED


@pytest.mark.parametrize("names", ["a", "ab"])
def test_writes_of_an_update_that_no_operator_makes_count(rank: Rank, names: str) -> None:
    """As those of NCCL and RDMA."""
    rank.manager.content = Content.STALE
    rank.updates.begin()
    rank.updates.assume_written()
    for name in names:
        rank.parameters[name].numpy()[:] = 1
    rank.updates.end()
    assert rank.content is (Content.VALID if names == "ab" else Content.STALE)


def test_a_call_that_is_refused_has_written_nothing(rank: Rank) -> None:
    """Also after a call that has written."""
    with rank.updates.record():
        rank.write("ab")
    assert rank.updates.wrote
    rank.updates.settle()
    rank.manager.prepare_sleep(Level.DISCARD, [Tag.WEIGHTS])
    rank.manager.commit_sleep()
    with pytest.raises(StateConflictError), rank.updates.record():
        pass
    assert not rank.updates.wrote
