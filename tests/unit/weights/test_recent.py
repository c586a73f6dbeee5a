"""The last few values are kept, by their last use."""

from __future__ import annotations

from rl_memory_plugins.weights.recent import KEPT, Recent


def test_what_was_used_last_is_kept():
    recent = Recent[int]()
    for value in range(KEPT):
        recent.add(value)
    assert recent.find(lambda value: value == 0) == 0
    recent.add(KEPT)
    assert len(recent) == KEPT
    assert [recent.find(lambda value, wanted=wanted: value == wanted) for wanted in range(3)] == [0, None, 2]


def test_of_two_that_fit_the_one_used_last_is_found():
    recent = Recent[str]()
    recent.add("old")
    recent.add("new")
    assert recent.find(lambda value: True) == "new"
    assert recent.find(lambda value: value == "old") == recent.find(lambda value: True) == "old"
