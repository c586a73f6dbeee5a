"""What `rl_memory_plugins.trainer` exports, that importing it is cheap, and what it needs."""

import subprocess
import sys
from pathlib import Path

import pytest

from rl_memory_plugins import trainer
from rl_memory_plugins.client import EngineClient
from rl_memory_plugins.trainer import EngineHandle


def test_importing_it_imports_no_torch_and_no_engine():
    script = "import rl_memory_plugins.trainer, sys; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"torch", "vllm", "sglang"} & set(done.stdout.split())


SCRIPT = """
import importlib, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
for module in {modules!r}:
    importlib.import_module(module)

from rl_memory_plugins import trainer
import torch

for name in trainer.__all__:
    getattr(trainer, name)
model = torch.nn.Linear(2, 2)
offloader = trainer.Offloader(model, moves=lambda tensor: True)
assert offloader.offload().bytes and offloader.load().bytes
memory = trainer.PausableMemory(torch.nn.Linear(200, 200), device="cpu")
assert memory.sleep().changes and memory.wake().changes
assert [spec.name for spec in trainer.ModelSource(model).specs()] == ["weight", "bias"]
trainer.tensor_checksum(model.weight)
"""
OTHERS = ["fastapi", "starlette", "pydantic", "pydantic_settings", "rich", "typer", "psutil", "safetensors", "triton"]
#: `formats.py` imports it for tensors on CUDA, and does without it where the import fails.
KERNEL = "rl_memory_plugins.trainer.sources.fp8_kernel"


def test_it_needs_nothing_but_torch_httpx_and_msgspec():
    package = Path(trainer.__file__).parent
    paths = [path.relative_to(package.parents[1]).with_suffix("") for path in package.rglob("*.py")]
    modules = sorted(".".join(path.parts).removesuffix(".__init__") for path in paths)
    assert "rl_memory_plugins.trainer.sources.checkpoint" in modules
    modules.remove(KERNEL)
    script = SCRIPT.format(missing=[*OTHERS, "vllm", "sglang"], modules=modules)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
