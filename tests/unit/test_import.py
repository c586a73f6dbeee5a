import subprocess
import sys

import pytest

import rl_memory_plugins
from rl_memory_plugins import errors

HEAVY = ["torch", "vllm", "sglang", "fastapi", "starlette", "pydantic", "pydantic_settings", "httpx", "numpy"]


def modules_after(statement):
    """The top-level modules that a fresh interpreter holds after `statement`."""
    script = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("statement", ["import rl_memory_plugins", "from rl_memory_plugins import Tag, RLMemoryError"])
def test_the_package_imports_nothing_heavy(statement):
    assert modules_after(statement).isdisjoint([*HEAVY, "msgspec"])


@pytest.mark.parametrize("module", ["errors", "tags", "records", "commands", "admission", "board", "operations"])
def test_the_core_imports_nothing_heavy(module):
    assert modules_after(f"import rl_memory_plugins.{module}").isdisjoint(HEAVY)


@pytest.mark.parametrize("module", ["config", "cli", "server.router", "server.gate", "server.auth"])
def test_server_and_options_import_no_torch_and_no_engine(module):
    assert modules_after(f"import rl_memory_plugins.{module}").isdisjoint(["torch", "vllm", "sglang", "numpy"])


def test_the_check_above_can_fail():
    assert {"pydantic", "pydantic_settings"} <= modules_after("import rl_memory_plugins as r; r.RLMemoryConfig")


def test_all_is_sorted_and_complete():
    assert rl_memory_plugins.__all__ == sorted(rl_memory_plugins.__all__)
    assert set(rl_memory_plugins._LAZY) <= set(rl_memory_plugins.__all__)
    tree = {name for name in errors.__all__ if name != "from_record"}
    assert tree <= set(rl_memory_plugins.__all__)
    assert set(rl_memory_plugins.__all__) <= set(dir(rl_memory_plugins))


@pytest.mark.parametrize("name", rl_memory_plugins.__all__)
def test_every_public_name_exists(name):
    value = getattr(rl_memory_plugins, name)
    assert name == "__version__" or value.__name__ == name


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = rl_memory_plugins.nothing
    assert not hasattr(rl_memory_plugins, "torch")


def test_the_version_is_the_distributions(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"{name} 9.9")
    assert rl_memory_plugins._version() == "rl_memory_plugins 9.9"
    assert isinstance(rl_memory_plugins.__version__, str)
