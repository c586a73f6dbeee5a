"""What is missing in an engine is named, all of it at once, with the engine's version."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from rl_memory_plugins.errors import UnsupportedError
from rl_memory_plugins.hooking import Hooks


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Hooks:
    engine = types.ModuleType("fake_engine")
    engine.Core = type("Core", (), {"sleep": lambda self: "stock"})
    monkeypatch.setitem(sys.modules, "fake_engine", engine)
    return Hooks("no-such-engine", "msgspec")  # the first one that is installed counts


def polite(original: Any) -> Any:
    return lambda self: f"not {original(self)}"


def core(hooks: Hooks) -> None:
    hooks.wrap("fake_engine:Core.sleep", polite)
    hooks.wrap("fake_engine:Core.wake_up", polite)
    hooks.wrap("fake_engine:Core.discard", polite)


def scheduler(hooks: Hooks) -> None:
    for name in ("pause", "resume"):
        hooks.wrap(f"fake_engine:Scheduler.{name}", polite)
    hooks.require("fake_engine:Scheduler").added = "what a role adds to a class that it needs"
    hooks.require("fake_engine.absent:anything")


def test_one_error_names_everything_that_any_role_lacks(hooks: Hooks) -> None:
    with pytest.raises(UnsupportedError) as caught:
        hooks.install(core, scheduler)
    assert caught.value.details["symbols"] == [
        "fake_engine:Core.wake_up",
        "fake_engine:Core.discard",
        "fake_engine:Scheduler",  # once, not for each of its methods
        "fake_engine.absent",
    ]
    assert caught.value.details["engine"].startswith("msgspec ")
    for part in (*caught.value.details["symbols"], caught.value.details["engine"]):
        assert part in caught.value.message


def test_a_second_attempt_names_them_again(hooks: Hooks) -> None:
    messages = []
    for _ in range(2):
        with pytest.raises(UnsupportedError) as caught:
            hooks.install(core)
        messages.append(caught.value.message)
    assert messages[0] == messages[1]


def test_roles_that_lack_nothing_are_put_in_once(hooks: Hooks) -> None:
    def role(hooks: Hooks) -> None:
        hooks.wrap("fake_engine:Core.sleep", polite)

    hooks.install(role)
    hooks.install(role, role)
    assert sys.modules["fake_engine"].Core().sleep() == "not stock"


def test_outside_of_an_installation_a_missing_symbol_is_an_error_at_once(hooks: Hooks) -> None:
    with pytest.raises(UnsupportedError, match=r"fake_engine:Core\.wake_up"):
        hooks.wrap("fake_engine:Core.wake_up", polite)
    with pytest.raises(UnsupportedError, match=r"fake_engine:nothing\.at\.all"):
        hooks.require("fake_engine:nothing.at.all")


def test_an_error_in_a_role_is_its_own(hooks: Hooks) -> None:
    def broken(hooks: Hooks) -> None:
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        hooks.install(core, broken)
    with pytest.raises(UnsupportedError, match="wake_up"):  # and leaves nothing switched on
        hooks.require("fake_engine:Core.wake_up")


def test_a_module_that_is_there_and_cannot_be_imported_says_why(hooks: Hooks, tmp_path, monkeypatch) -> None:
    (tmp_path / "needy_engine.py").write_text("import a_dependency_that_is_absent\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UnsupportedError, match="No module named 'a_dependency_that_is_absent'"):
        hooks.require("needy_engine:Core")
