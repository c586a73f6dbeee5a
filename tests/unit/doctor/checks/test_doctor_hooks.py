"""Whether an engine has what the hooks replace and use."""

from __future__ import annotations

import sys
import types

import pytest

from rl_memory_plugins.doctor.checks import hooks
from rl_memory_plugins.doctor.finding import Status
from rl_memory_plugins.hooking import Hooks

OK, FAILURE = Status.OK, Status.FAILURE


ENGINE = "class Scheduler:\n    def {name}(self): ...\n    def used(self): ...\n"


@pytest.fixture
def adapter(engines, monkeypatch, tmp_path):
    """An adapter of an engine whose source the test writes; it replaces `Scheduler.step`."""
    monkeypatch.syspath_prepend(tmp_path)
    module = f"fake_engine_{tmp_path.name.replace('-', '_')}"
    ours = Hooks("fake-engine")

    def role(hooks):
        hooks.wrap(f"{module}:Scheduler.step", lambda original: original)
        hooks.require(f"{module}:Scheduler.used")

    package = f"fake_adapter_{module}"
    parts = {"": {}, ".hooks": {"hooks": ours}, ".switch": {"register": lambda: None}}
    parts[".install"] = {"install": lambda: ours.install(role)}
    for name, content in parts.items():
        found = types.ModuleType(package + name)
        vars(found).update(content)
        monkeypatch.setitem(sys.modules, package + name, found)
    monkeypatch.setitem(hooks.ADAPTERS, "vllm", package)
    return tmp_path / f"{module}.py"


def test_all_targets_of_the_hooks_are_named(adapter):
    adapter.write_text(ENGINE.format(name="step"))
    found = hooks.targets()
    assert found.status is OK, found
    assert found.details["vllm"]["replaced"] == [f"{adapter.stem}:Scheduler.step"]
    assert found.details["vllm"]["used"] == [f"{adapter.stem}:Scheduler.used"]


def test_a_target_that_has_another_name_is_named(adapter):
    adapter.write_text(ENGINE.format(name="step_once"))
    found = hooks.targets()
    assert found.status is FAILURE
    assert found.details["vllm"]["missing"] == [f"{adapter.stem}:Scheduler.step"]


def test_an_engine_that_cannot_be_imported(adapter):
    adapter.write_text("import a_library_that_is_not_there")
    found = hooks.targets()
    assert found.status is FAILURE
    assert "a_library_that_is_not_there" in found.seen
