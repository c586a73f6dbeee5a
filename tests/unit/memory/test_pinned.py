"""How the pinned arena makes pages; page-locking itself needs a GPU (`tests/gpu/test_pinned.py`)."""

from __future__ import annotations

import mmap
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rl_memory_plugins.memory import pinned
from rl_memory_plugins.memory.backup import address_of

MiB = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.fixture
def mapping():
    mapping = mmap.mmap(-1, 65 * MiB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    yield mapping
    mapping.close()


def test_touching_makes_every_page_resident(mapping):
    before = resident_bytes()
    pinned.touch(address_of(mapping), len(mapping), threads=3)
    assert abs(resident_bytes() - before - len(mapping)) < 4 * MiB


def test_pages_can_still_be_made_while_python_ends():
    """A copy in the background may need them then; an executor would refuse, with a traceback in the engine's log."""
    code = """
        import mmap, threading, time
        from rl_memory_plugins.memory import pinned
        from rl_memory_plugins.memory.backup import address_of

        def make():
            threading.main_thread().join()
            mapping = mmap.mmap(-1, 8 << 20)
            pinned.touch(address_of(mapping), len(mapping), threads=2)
            print("made")

        threading.Thread(target=make).start()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "made", "")


def test_what_fails_in_a_thread_fails_here():
    def fail():
        raise LookupError("no such page")

    with pytest.raises(LookupError, match="no such page"):
        pinned._in_threads([lambda: None, fail])


def test_a_preferred_node_is_only_a_hint(mapping):
    for node in (None, 0, 1000):
        pinned.prefer_node(address_of(mapping), len(mapping), node)
    mapping[-1:] = b"x"
    assert mapping[-1:] == b"x"
