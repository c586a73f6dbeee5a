"""Nesting of regions over an allocator that knows one at a time."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest

from rl_memory_plugins.memory.regions import RegionStack


class Pools:
    """Pools that, like torch's, cannot be entered twice, and of which the first one entered wins."""

    def __init__(self) -> None:
        self.active: list[str] = []

    def use(self, name: str):
        @contextmanager
        def context():
            assert name not in self.active
            self.active.append(name)
            try:
                yield
            finally:
                self.active.remove(name)

        return context


def test_the_inner_region_is_the_only_active_one():
    pools, stack = Pools(), RegionStack()
    with stack.enter(pools.use("a")):
        with stack.enter(pools.use("b")):
            assert pools.active == ["b"]
            with stack.enter(pools.use("a")):
                assert pools.active == ["a"]
            assert pools.active == ["b"]
        assert pools.active == ["a"]
    assert pools.active == []


def test_an_exception_restores_the_outer_region():
    pools, stack = Pools(), RegionStack()
    with stack.enter(pools.use("a")):
        with pytest.raises(ValueError), stack.enter(pools.use("b")):
            raise ValueError
        assert pools.active == ["a"]
    assert pools.active == []


def test_a_region_that_cannot_be_entered_leaves_the_outer_one_active():
    pools, stack = Pools(), RegionStack()

    def broken():
        raise RuntimeError

    with stack.enter(pools.use("a")):
        with pytest.raises(RuntimeError), stack.enter(broken):
            pass
        assert pools.active == ["a"]
        with stack.enter(pools.use("b")):
            assert pools.active == ["b"]


def test_threads_do_not_see_each_others_regions():
    pools, stack = Pools(), RegionStack()
    seen = []

    def other():
        with stack.enter(pools.use("b")):
            seen.extend(pools.active)

    with stack.enter(pools.use("a")):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen == ["a", "b"]


def test_an_interrupt_while_a_region_opens_leaves_the_outer_one_active():
    class Interrupted(list):
        def append(self, item):
            super().append(item)
            raise KeyboardInterrupt

    pools, stack = Pools(), RegionStack()
    with stack.enter(pools.use("a")):
        stack._open = Interrupted(stack._open)
        with pytest.raises(KeyboardInterrupt), stack.enter(pools.use("b")):
            pass
        stack._open = list(stack._open)
        assert pools.active == ["a"]
        with stack.enter(pools.use("c")):
            assert pools.active == ["c"]
        assert pools.active == ["a"]
    assert pools.active == []
