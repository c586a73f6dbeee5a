"""The state of one engine as its controller knows it, and as the status board and the engine's metrics show it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rl_memory_plugins import admission
from rl_memory_plugins.board import StatusBoard
from rl_memory_plugins.coordination import RankGroup, raise_failures
from rl_memory_plugins.engine_hooks import EngineHooks
from rl_memory_plugins.errors import RLMemoryError
from rl_memory_plugins.records import UNKNOWN, EngineStatus, RankStatus, WeightsStatus

logger = logging.getLogger(__name__)


class PublishedState:
    """Keeps the state of one engine, and publishes each change.

    Args:
        ranks: The ranks of the engine, which report their states.
        engine: Shows the state in the engine's own metrics.
        board: The status board; `None` on ranks that publish nothing.
        status: The first state. It is not published.
        under_way: The name of a transition that has begun and not ended; empty if there is none.

    Attributes:
        status: The state. `note` and `publish` replace it.
    """

    def __init__(
        self,
        ranks: RankGroup,
        engine: EngineHooks,
        board: StatusBoard | None,
        status: EngineStatus,
        under_way: Callable[[], str],
    ) -> None:
        self._ranks = ranks
        self._engine = engine
        self._board = board
        self._under_way = under_way
        self.status = status

    @property
    def board_path(self) -> str | None:
        """The file of the status board, if there is one."""
        return self._board.path if self._board else None

    def refusal(self) -> RLMemoryError | None:
        """The reason why the engine admits no requests now; `None` if it admits them."""
        return admission.refusal(self.status)

    def refresh(self) -> None:
        """Ask all ranks for their state, and publish it."""
        ranks = self._ask_ranks("status")
        busy = self._under_way() if self.status.busy == UNKNOWN else self.status.busy
        self.publish(ranks=ranks, busy=busy)
        if self.status.idle and not busy and not self.status.asleep_tags():
            self.publish(idle=False)

    def refresh_content(self, contents: Sequence[WeightsStatus] | None) -> None:
        """Publish content and epoch alone: trainers load tensor by tensor, and the whole status takes longer."""
        if self.status.busy == UNKNOWN:
            self.refresh()
            return
        if contents is None:
            contents = [WeightsStatus(*reply.result) for reply in raise_failures(self._ranks.call("content"))]
        self.publish(ranks=[now.changed(rank) for rank, now in zip(self.status.ranks, contents, strict=True)])

    def refresh_or_close(self) -> None:
        """Refresh at the end of a transition, so that the board does not keep the state of its middle."""
        self.note(busy=self._under_way())
        try:
            self.refresh()
            return
        except RLMemoryError:
            logger.exception("the ranks did not report their state; the controller asks them once more")
        try:
            self.refresh()
        except RLMemoryError:
            self.publish(busy=UNKNOWN)
            raise

    def publish_residual_memory(self) -> None:
        """Publish the memory that is left on the devices. Measuring it takes too long for a sleep."""
        try:
            self.publish(ranks=self._ask_ranks("account"))
        except Exception:
            logger.exception("the memory that is left on the devices could not be measured")

    def _ask_ranks(self, method: str) -> list[RankStatus]:
        return [msgspec.convert(reply.result, RankStatus) for reply in raise_failures(self._ranks.call(method))]

    def note(self, **fields: Any) -> None:
        """Change fields of the status. The next `publish` publishes them."""
        self.status = msgspec.structs.replace(self.status, **fields)

    def publish(self, **fields: Any) -> None:
        """Change fields of the status, and publish it."""
        self.note(**fields)
        if self._board is not None:
            self._board.publish(self.status)  # first: servers refuse requests by it
        self._engine.show(self.status.asleep_tags(), self.status.weight_version)
