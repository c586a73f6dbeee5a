from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.tags import (
    PUBLIC_TAGS,
    Level,
    PauseMode,
    Tag,
    parse_level,
    parse_mode,
    parse_tags,
    preserves,
)

PRESERVED = {
    (Level.PRESERVE, Tag.WEIGHTS),
    (Level.PRESERVE, Tag.CUDA_GRAPH),
    (Level.DISCARD, Tag.CUDA_GRAPH),
}


@pytest.mark.parametrize("tag", PUBLIC_TAGS)
@pytest.mark.parametrize("level", [Level.PRESERVE, Level.DISCARD])
def test_the_table(level, tag):
    assert preserves(level, tag) == ((level, tag) in PRESERVED)


@pytest.mark.parametrize(("given", "level"), [(0, 0), (1, 1), ("2", 2), (Level.DISCARD, 2)])
def test_levels(given, level):
    assert parse_level(given) is Level(level)


@pytest.mark.parametrize("bad", [3, -1, "x", "", None, 1.0, True, [1], "9" * 5000, " 1", "+1", "0_1", "\u0661"])
def test_bad_levels_list_what_is_allowed(bad):
    with pytest.raises(InvalidRequestError) as caught:
        parse_level(bad)
    assert caught.value.details["field"] == "level"
    assert caught.value.details["allowed"] == [0, 1, 2]


def test_modes():
    assert [parse_mode(mode.value) for mode in PauseMode] == list(PauseMode)
    for bad in ("ABORT", "", None, 1):
        with pytest.raises(InvalidRequestError) as caught:
            parse_mode(bad)
        assert caught.value.details["allowed"] == ["abort", "wait", "keep", "freeze"]


@given(st.lists(st.sampled_from([tag.value for tag in PUBLIC_TAGS]), min_size=1))
def test_tags_come_once_and_in_canonical_order(names):
    expected = tuple(tag for tag in PUBLIC_TAGS if tag in names)
    assert parse_tags(names) == expected
    assert parse_tags(", ".join(names)) == expected


def test_no_tags_are_all_tags():
    assert parse_tags(None) == PUBLIC_TAGS


@pytest.mark.parametrize("bad", [[], "", "runtime", ["weights", "kvcache"], [None], 5, {"weights": True}])
def test_bad_tags_list_what_is_allowed(bad):
    with pytest.raises(InvalidRequestError) as caught:
        parse_tags(bad)
    assert caught.value.details["field"] == "tags"
    assert caught.value.details["allowed"] == ["kv_cache", "weights", "cuda_graph"]
