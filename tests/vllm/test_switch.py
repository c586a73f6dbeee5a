"""What switches the plugin on and off, without an engine."""

from __future__ import annotations

import types
from typing import Any

import pytest

from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.engines.vllm import switch
from rl_memory_plugins.errors import UnsupportedError


@pytest.mark.parametrize(
    ("variable", "additional", "asked_for"),
    [
        ("", None, None),
        ("0", None, None),
        ("no", {"other": 1}, None),
        ("Off", None, None),
        ("yes", None, RLMemoryConfig()),
        ("poison=true", None, RLMemoryConfig(poison=True)),
        ("1", {"rl_memory": False}, None),  # what is asked for in Python wins
        ("0", {"rl_memory": {"poison": True}}, {"poison": True}),
    ],
)
def test_what_is_asked_for(monkeypatch: pytest.MonkeyPatch, variable: str, additional: Any, asked_for: Any) -> None:
    monkeypatch.setenv(switch.FLAG_VARIABLE, variable)
    assert switch._requested(types.SimpleNamespace(additional_config=additional)) == asked_for


def test_experts_that_change_places_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock loaders write experts where they were at the start: after a rearrangement an update is garbage."""
    from vllm import EngineArgs

    monkeypatch.setattr(switch, "install", lambda: None)
    started = []
    create = switch._create_engine_config(started.append)
    asked = EngineArgs(model="none", enable_eplb=True, additional_config={"rl_memory": {}})
    with pytest.raises(UnsupportedError, match="--enable-eplb"):
        create(asked)
    assert started == []
    plain = EngineArgs(model="none", enable_eplb=True)
    create(plain)
    assert started == [plain]
