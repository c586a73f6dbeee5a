"""A child process of the benchmarks and the demo: its answers, its errors, and its end."""

from __future__ import annotations

import os

import pytest

from integration.json_process import Child
from rl_memory_plugins.errors import StateConflictError

PROGRAM = """
from integration.json_process import serve
from rl_memory_plugins.errors import StateConflictError

def refuse(): raise StateConflictError("not now", tag="weights")
def crash(): raise ValueError("a bug")

def start():
    print("output that is no answer")
    return {"twice": lambda value: [value, value], "refuse": refuse, "crash": crash}

serve(start)
"""


@pytest.fixture
def child(tmp_path):
    (tmp_path / "served.py").write_text(PROGRAM)
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    child = Child("served", environment={**os.environ, "PYTHONPATH": paths})
    yield child
    child.close()


def test_answers_and_typed_errors_come_back(child: Child) -> None:
    assert child.call("twice", value="a") == ["a", "a"]
    with pytest.raises(StateConflictError) as caught:
        child.call("refuse")
    assert caught.value.details["tag"] == "weights"
    assert child.call("twice", value=1) == [1, 1]


def test_the_end_of_the_process_is_an_error(child: Child) -> None:
    with pytest.raises(RuntimeError, match="has ended: 1"):
        child.call("crash")


def test_a_process_that_may_end_by_itself_is_not_killed(child: Child) -> None:
    child.close(wait_s=20)
    assert child.process.returncode == 0
