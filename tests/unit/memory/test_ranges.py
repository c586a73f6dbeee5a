from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rl_memory_plugins.memory.allocator import Block
from rl_memory_plugins.memory.ranges import intersect, merge, subtract

blocks = st.lists(st.builds(Block, st.integers(0, 40), st.integers(0, 12)), max_size=6)


def addresses(ranges):
    return {address for block in ranges for address in range(block.address, block.end)}


@given(blocks)
def test_merge(ranges):
    merged = merge(ranges)
    assert addresses(merged) == addresses(ranges)
    assert all(left.end < right.address for left, right in pairwise(merged))


@given(blocks, blocks)
def test_subtract_and_intersect(ranges, others):
    disjoint = merge(ranges)
    assert addresses(subtract(disjoint, others)) == addresses(ranges) - addresses(others)
    assert addresses(intersect(disjoint, others)) == addresses(ranges) & addresses(others)
    assert all(block.nbytes > 0 for block in subtract(disjoint, others))


def test_pieces_do_not_span_blocks():
    touching = [Block(0, 4), Block(4, 4)]
    assert subtract(touching, []) == touching
    assert intersect(touching, [Block(2, 4)]) == [Block(2, 2), Block(4, 2)]
