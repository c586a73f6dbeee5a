import sys
from pathlib import Path

import pytest
from process_pair import ProcessPair

sys.path.insert(0, str(Path(__file__).parents[1] / "weights"))  # toys


@pytest.fixture(scope="session")
def pair():
    """Two processes in one Gloo group."""
    with ProcessPair() as pair:
        yield pair
