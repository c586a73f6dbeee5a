"""Updates over frozen requests on a rank whose KV cache has scales."""

from __future__ import annotations

from typing import Any

import pytest

from rl_memory_plugins.errors import WeightUpdateError
from rl_memory_plugins.rank import RankAgent
from rl_memory_plugins.tags import Content
from tests.unit.helpers import FakeRank

CALL: dict[str, Any] = {"endpoints": {}, "token": "", "timeout_s": 1.0}


class Scaled:
    """A rank whose updates bring the scale `sent`, after they have written the weights."""

    def __init__(self) -> None:
        self.rank = FakeRank()
        self.scale = self.sent = 0.5
        receive = self.rank.receiver.receive

        def received(*arguments: Any) -> Any:
            report = receive(*arguments)
            self.scale = self.sent
            return report

        self.rank.receiver.receive = received  # type: ignore[method-assign]
        self.agent = RankAgent(
            self.rank.manager,
            self.rank.receiver,  # type: ignore[arg-type]
            self.rank.names,  # type: ignore[arg-type]
            cache_scales=lambda: {"layer._k_scale_float": self.scale},
        )

    def update(self, sent: float, *, frozen: bool) -> None:
        """As the controller does."""
        self.sent = sent
        try:
            self.agent.receive_weights(**CALL, frozen=frozen)
        except WeightUpdateError:
            self.agent.finish_update(complete=False)
            raise
        self.agent.finish_update(complete=True)

    def sleep(self, level: int) -> None:
        self.agent.prepare_sleep(level, ["weights"])
        self.agent.commit_sleep()
        self.agent.prepare_wake(["weights"])
        self.agent.commit_wake()


def test_frozen_requests_and_the_former_scale() -> None:
    engine = Scaled()
    engine.update(0.5, frozen=True)
    engine.update(0.25, frozen=False)
    engine.update(0.25, frozen=True)
    assert engine.rank.manager.content is Content.VALID


def test_frozen_requests_and_another_scale() -> None:
    engine = Scaled()
    with pytest.raises(WeightUpdateError, match=r"_k_scale_float, a scale .* from 0.5 to 0.25.*mode='keep'"):
        engine.update(0.25, frozen=True)
    assert engine.rank.manager.content is Content.FAILED
    with pytest.raises(WeightUpdateError, match="from 0.5 to 0.25"):
        engine.update(0.25, frozen=True)  # the requests are frozen still, and so are their blocks
    engine.update(0.25, frozen=False)
    engine.update(0.25, frozen=True)


@pytest.mark.parametrize("failed", [False, True])
def test_another_scale_after_a_sleep_that_discards_the_weights(failed: bool) -> None:
    engine = Scaled()
    if failed:
        with pytest.raises(WeightUpdateError):
            engine.update(0.25, frozen=True)
    engine.sleep(2)
    with pytest.raises(WeightUpdateError, match="from 0.5 to 0.25"):
        engine.update(0.25, frozen=True)
    engine.update(0.5, frozen=True)
