"""What is added to SGLang's scheduler, without an engine."""

from __future__ import annotations

import types

import pytest

from rl_memory_plugins.engines.sglang import scheduler


@pytest.mark.parametrize(("draining", "naps"), [(True, 0), (False, 1)])
def test_a_drain_ends_when_the_last_request_does(draining: bool, naps: int) -> None:
    """Stock: with --sleep-on-idle the scheduler naps for a second once nothing runs, and looks at nothing meanwhile."""
    napped: list[object] = []
    maybe_sleep_on_idle = scheduler._stay_awake_while_draining(napped.append)
    added = types.SimpleNamespace(engine=types.SimpleNamespace(draining=draining))
    maybe_sleep_on_idle(types.SimpleNamespace(rl_memory=added))
    assert len(napped) == naps
