import os
import time
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from fake_control import FakeControl

from rl_memory_plugins import full_collections

if find_spec("torch"):  # `make test-python` runs the rest of the tests on Pythons that have none
    import torch

    if not torch.cuda.is_available():  # Triton runs kernels step by step then; it reads this when it is imported
        os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def control() -> FakeControl:
    return FakeControl()


@pytest.fixture(autouse=True)
def _no_update_outlives_its_test() -> Iterator[None]:
    """A thread that still sends keeps the process without full passes of the garbage collector in later tests."""
    yield
    deadline = time.monotonic() + 10
    while full_collections._entered and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not full_collections._entered, "a thread of this test still sends or takes weights"
