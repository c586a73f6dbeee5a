import os

import pytest
import torch
from fake_control import FakeControl

if not torch.cuda.is_available():  # Triton runs kernels step by step then; it reads this when it is imported
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def control() -> FakeControl:
    return FakeControl()
