import os
from importlib.util import find_spec

import pytest
from fake_control import FakeControl

if find_spec("torch"):  # `make test-python` runs the rest of the tests on Pythons that have none
    import torch

    if not torch.cuda.is_available():  # Triton runs kernels step by step then; it reads this when it is imported
        os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def control() -> FakeControl:
    return FakeControl()
