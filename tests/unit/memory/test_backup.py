from __future__ import annotations

import pytest

from rl_memory_plugins.memory import backup
from rl_memory_plugins.memory.allocator import Block
from rl_memory_plugins.memory.arena import PagedArena
from rl_memory_plugins.memory.backup import Backup
from rl_memory_plugins.memory.ranges import subtract


@pytest.fixture
def ten_blocks():
    """A backup of ten blocks of 100 bytes, from 1000 on in steps of 200."""
    made = Backup(PagedArena(), [Block(1000 + 200 * number, 100) for number in range(10)])
    yield made
    made.free()


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (Block(1000, 100), [(Block(1000, 100), 0)]),
        (Block(1250, 400), [(Block(1250, 50), 150), (Block(1400, 100), 200), (Block(1600, 50), 300)]),
        (Block(2850, 1000), [(Block(2850, 50), 950)]),
        (Block(0, 1000), []),
        (Block(1100, 100), []),
        (Block(2900, 10), []),
    ],
)
def test_the_copies_of_a_part(ten_blocks, part, expected):
    start = ten_blocks.copies(Block(1000, 1))[0][1]
    assert [(found, address - start) for found, address in ten_blocks.copies(part)] == expected


def test_few_blocks_are_looked_at_for_a_part(ten_blocks, monkeypatch):
    """A trainer asks for every tensor that it sends."""
    looked_at = []

    def note(blocks, holes):
        looked_at.append(len(blocks))
        return subtract(blocks, holes)

    monkeypatch.setattr(backup, "subtract", note)
    assert ten_blocks.copies(Block(5000, 100)) == [] and looked_at == []
    assert ten_blocks.copies(Block(1010, 10)) and set(looked_at) == {1}
