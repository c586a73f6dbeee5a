"""The scheduler as the controller sees it, without an engine."""

from __future__ import annotations

import types

import pytest

from rl_memory_plugins.engines.sglang.engine import SglangEngine
from rl_memory_plugins.errors import StateConflictError
from rl_memory_plugins.tags import PauseMode


class Ranks:
    """A group whose other rank always says the same."""

    def __init__(self, other: bool) -> None:
        self._other = other

    def all(self, mine: bool) -> bool:
        return mine and self._other


@pytest.mark.parametrize("other", [True, False])
def test_ranks_with_their_own_requests_refuse_together(other: bool) -> None:
    """One that raised alone would leave the others in a collective that it never joins."""
    paused = types.SimpleNamespace(_engine_paused=True, is_fully_idle=lambda: True)
    engine = SglangEngine(paused, Ranks(other))  # type: ignore[arg-type]
    if other:
        assert not engine.drain(PauseMode.WAIT).done()
    else:
        with pytest.raises(StateConflictError):
            engine.drain(PauseMode.WAIT)
        assert not engine.draining
