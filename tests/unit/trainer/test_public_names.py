"""What `rl_memory_plugins.trainer` exports, and that importing it is cheap."""

import subprocess
import sys

import pytest

from rl_memory_plugins import trainer
from rl_memory_plugins.client import EngineClient
from rl_memory_plugins.trainer import EngineHandle


def test_importing_it_imports_no_torch_and_no_engine():
    script = "import rl_memory_plugins.trainer, sys; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"torch", "vllm", "sglang"} & set(done.stdout.split())


@pytest.mark.parametrize("name", trainer.__all__)
def test_every_public_name_exists(name):
    assert getattr(trainer, name).__name__ == name


def test_all_is_sorted_and_complete():
    assert trainer.__all__ == sorted(trainer.__all__) == sorted(trainer._HOMES)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = trainer.nothing


def test_the_client_is_an_engine():
    with EngineClient("http://127.0.0.1:1") as client:
        assert isinstance(client, EngineHandle)
