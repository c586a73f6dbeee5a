"""Loads that others make, by the model's own loader."""

from __future__ import annotations

import pytest
import torch

from rl_memory_plugins.memory.backup import PagedArena
from rl_memory_plugins.memory.host import HostAllocator
from rl_memory_plugins.memory.manager import MemoryManager
from rl_memory_plugins.tags import Content
from rl_memory_plugins.weights.foreign import ForeignLoads


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(8))
        self.b = torch.nn.Parameter(torch.zeros(8))

    def load_weights(self, weights):
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


def breaking_off_after(count):
    yield from [(name, torch.ones(8)) for name in "ab"[:count]]
    raise ConnectionError("the trainer is gone")


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def manager(model):
    manager = MemoryManager(0, HostAllocator(), PagedArena(), lambda tag: [])
    ForeignLoads(manager, model)
    return manager


@pytest.mark.parametrize(("written", "content"), [(0, Content.VALID), (1, Content.FAILED), (2, Content.VALID)])
def test_a_load_that_breaks_off_half_way_leaves_no_valid_weights(model, manager, written, content):
    with pytest.raises(ConnectionError):
        model.load_weights(breaking_off_after(written))
    assert manager.content is content
    model.load_weights([("a", torch.ones(8)), ("b", torch.ones(8))])
    assert manager.content is Content.VALID


def test_after_a_load_that_broke_off_everything_must_come_again(model, manager):
    manager.content = Content.STALE
    model.load_weights([("a", torch.ones(8))])
    with pytest.raises(ConnectionError):
        model.load_weights(breaking_off_after(1))
    model.load_weights([("b", torch.ones(8))])
    assert manager.content is Content.STALE
    model.load_weights([("a", torch.ones(8))])
    assert manager.content is Content.VALID


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
def test_only_what_no_longer_depends_on_the_old_bytes_counts(model, manager, write, content):
    manager.content = Content.STALE
    loader = model.load_weights.__self__
    loader.original = lambda weights: [write(model.get_parameter(name).data, tensor) for name, tensor in weights]
    model.load_weights([("a", torch.ones(8)), ("b", torch.ones(8))])
    assert manager.content is content


def test_a_write_that_does_not_count_still_tears_what_breaks_off(model, manager):
    def scale(weights):
        model.a.data.mul_(2)
        raise ConnectionError("the trainer is gone")

    model.load_weights.__self__.original = scale
    with pytest.raises(ConnectionError):
        model.load_weights([])
    assert manager.content is Content.FAILED


def test_loads_of_one_tensor_again_and_again_are_not_kept(model, manager):
    for _ in range(100):
        model.load_weights([("a", torch.ones(8))])
    written = model.load_weights.__self__._written
    assert len(written._small) + sum(len(starts) for starts, _ in written._large) == 1


# -- updates of several loads ---------------------------------------------------------------------------------


@pytest.fixture
def loads(model, manager):
    return model.load_weights.__self__


@pytest.mark.parametrize("before", [Content.VALID, Content.STALE, Content.FAILED])
@pytest.mark.parametrize("names", ["", "a", "ab"])
def test_from_the_begin_to_the_end_of_an_update_nothing_is_valid(model, manager, loads, before, names):
    manager.content = before
    loads.begin()
    assert manager.content is Content.UPDATING
    for name in names:
        model.load_weights([(name, torch.ones(8))])
        assert manager.content is Content.UPDATING
    epoch = manager.epoch
    loads.end()
    assert manager.content is (Content.VALID if names == "ab" else before)
    assert manager.epoch > epoch


@pytest.mark.parametrize("before", [Content.VALID, Content.STALE])
@pytest.mark.parametrize("names", ["", "a"])
def test_an_update_that_is_broken_off_has_changed_nothing_or_failed(model, manager, loads, before, names):
    manager.content = before
    undone = []
    loads._undo = lambda: undone.append(True)
    loads.begin()
    for name in names:
        model.load_weights([(name, torch.ones(8))])
    loads.break_off()
    assert manager.content is (Content.FAILED if names else before)
    assert undone
    loads.begin()
    model.load_weights([(name, torch.ones(8)) for name in "ab"])
    loads.end()
    assert manager.content is Content.VALID


def test_what_came_before_an_update_counts_while_nothing_else_has_happened(model, manager, loads):
    manager.content = Content.STALE
    model.load_weights([("a", torch.ones(8))])
    loads.begin()
    model.load_weights([("b", torch.ones(8))])
    loads.end()
    assert manager.content is Content.VALID


def test_weights_that_are_torn_within_an_update_stay_so_at_its_end(model, manager, loads):
    loads.begin()
    manager.tear()
    loads.end()
    assert manager.content is Content.FAILED


def test_a_load_that_breaks_off_is_undone(model, manager, loads):
    undone = []
    loads._undo = lambda: undone.append(True)
    with pytest.raises(ConnectionError):
        model.load_weights(breaking_off_after(0))
    assert undone
