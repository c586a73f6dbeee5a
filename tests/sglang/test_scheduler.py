"""What is added to SGLang's scheduler, without an engine."""

from __future__ import annotations

import types

import pytest

from rl_memory_plugins.engines.sglang import scheduler
from rl_memory_plugins.errors import StateConflictError
from rl_memory_plugins.tags import PauseMode


@pytest.mark.parametrize(("draining", "naps"), [(True, 0), (False, 1)])
def test_a_drain_ends_when_the_last_request_does(draining: bool, naps: int) -> None:
    """Stock: with --sleep-on-idle the scheduler naps for a second once nothing runs, and looks at nothing meanwhile."""
    napped: list[object] = []
    maybe_sleep_on_idle = scheduler._stay_awake_while_draining(napped.append)
    added = types.SimpleNamespace(engine=types.SimpleNamespace(draining=draining))
    maybe_sleep_on_idle(types.SimpleNamespace(rl_memory=added))
    assert len(napped) == naps


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
    engine = scheduler.SglangEngine(paused, Ranks(other))  # type: ignore[arg-type]
    if other:
        assert not engine.drain(PauseMode.WAIT).done()
    else:
        with pytest.raises(StateConflictError):
            engine.drain(PauseMode.WAIT)
        assert not engine.draining
