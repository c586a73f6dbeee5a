"""What importing the package costs, and what users import from it."""

import ast
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import rl_memory_plugins
from rl_memory_plugins import errors

REPOSITORY = Path(__file__).parents[2]
PUBLIC = [
    "rl_memory_plugins",
    "rl_memory_plugins.doctor",
    "rl_memory_plugins.integrations.openrlhf",
    "rl_memory_plugins.integrations.skyrl",
    "rl_memory_plugins.integrations.slime",
    "rl_memory_plugins.integrations.trl",
    "rl_memory_plugins.integrations.vllm_transfer",
    "rl_memory_plugins.plan",
    "rl_memory_plugins.ray",
    "rl_memory_plugins.sglang",
    "rl_memory_plugins.timeline",
    "rl_memory_plugins.trainer",
    "rl_memory_plugins.vllm",
]

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
    tree = {name for name in vars(errors) if name.endswith("Error")}
    assert tree <= set(rl_memory_plugins.__all__)
    assert set(rl_memory_plugins.__all__) <= set(dir(rl_memory_plugins))


NEED_TORCH = {"Checksums", "ModelSource", "push_weights", "release_mapped", "tensor_checksum"}


@pytest.mark.parametrize("name", sorted(set(rl_memory_plugins.__all__) - (set() if find_spec("torch") else NEED_TORCH)))
def test_every_public_name_exists(name):
    value = getattr(rl_memory_plugins, name)
    assert name == "__version__" or value.__name__ == name


def names_of(module):
    """`__all__` of a public module, which may need an engine to be imported."""
    path = REPOSITORY / module.replace(".", "/")
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    [value] = [
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    ]
    return ast.literal_eval(value)


def imports_in(page):
    """The public names and modules that a page's examples and prose import: (module, names)."""
    text = page.read_text()
    for module, names in re.findall(r"^\s*from (rl_memory_plugins[\w.]*) import ([^\n#]+)", text, re.MULTILINE):
        yield module, {name.strip(" ()").split(" as ")[0] for name in names.split(",")} - {""}
    for module, name in re.findall(r"`(rl_memory_plugins(?:\.\w+)*)\.(\w+)(?:\([^`]*)?`", text):
        if f"{module}.{name}" not in PUBLIC:
            yield module, {name}


PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_pages_import_public_names_only(page):
    for module, names in imports_in(page):
        assert module in PUBLIC and names <= set(names_of(module)), (module, names)


def test_the_pages_use_every_public_module():
    assert {module for page in PAGES for module, _ in imports_in(page)} == set(PUBLIC)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = rl_memory_plugins.nothing
    assert not hasattr(rl_memory_plugins, "torch")


def test_the_version_is_the_distributions(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"{name} 9.9")
    assert rl_memory_plugins._version() == "rl_memory_plugins 9.9"
    assert isinstance(rl_memory_plugins.__version__, str)
