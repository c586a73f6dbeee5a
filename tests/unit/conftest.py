import pytest
from fake_control import FakeControl


@pytest.fixture
def control() -> FakeControl:
    return FakeControl()
