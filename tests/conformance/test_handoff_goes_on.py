"""A handoff over several engines that leaves a running engine out, and takes it back."""

from __future__ import annotations

from typing import Any

import pytest

from integration.engines.base import Server
from rl_memory_plugins.client import EngineClient
from rl_memory_plugins.errors import StateConflictError
from rl_memory_plugins.trainer import ModelSource, RolloutHandoff
from tests.conformance.conftest import PROMPT, Weights, greedy
from tests.conformance.trainers import BUCKET_BYTES


class NoRanks:
    """An engine without ranks, for which every step succeeds: the other engine of the handoffs here."""

    def sleep(self, *args: Any, **options: Any) -> None: ...

    def wake_up(self, tags: Any = None) -> None: ...

    def devices(self) -> list[str]:
        return []

    def post_update(self, body: dict[str, Any]) -> dict[str, Any]:
        return {}


class Failing:
    """The server's engine, which fails in a step once."""

    def __init__(self, control: EngineClient, call: str) -> None:
        self._control = control
        self._call = call

    def sleep(self, **options: Any) -> Any:
        self._fail("sleep")
        return self._control.sleep(**options)

    def wake_up(self, tags: Any = None) -> Any:
        self._fail("wake_up")
        return self._control.wake_up(tags)

    def devices(self) -> list[str]:
        return self._control.devices()

    def post_update(self, body: dict[str, Any]) -> Any:
        self._fail("post_update")
        return self._control.post_update(body)

    def weights_state(self) -> dict[str, Any]:
        return self._control.weights_state()

    def _fail(self, call: str) -> None:
        if call == self._call:
            self._call = ""
            raise StateConflictError("not now")


@pytest.mark.parametrize("calls", [["wake_up"], ["post_update"], ["sleep", "post_update"]], ids="-".join)
def test_an_engine_that_was_left_out_is_closed_and_comes_back_with_the_new_weights(
    server: Server, weights: Weights, calls: list[str]
) -> None:
    engine = Failing(server.control, calls[0])
    source = ModelSource(weights.other)
    options: dict[str, Any] = {"on_failure": "continue", "bucket_bytes": BUCKET_BYTES}
    handoff = RolloutHandoff([NoRanks(), engine], source, **options)
    handoff.release()
    if len(calls) > 1:
        assert server.generate(PROMPT) == greedy(weights.first, PROMPT)  # it has not slept
        engine._call = calls[1]
    report = handoff.sync("1")
    [failure] = report.failed
    assert failure.engine == 1 and failure.state is not None and not failure.state["admitting"]
    assert server.post(PROMPT).status_code == 503
    assert server.control.weight_version() != "1"
    assert handoff.sync("2").failed == []
    assert server.generate(PROMPT) == greedy(weights.other, PROMPT)
    assert server.control.weight_version() == "2"
