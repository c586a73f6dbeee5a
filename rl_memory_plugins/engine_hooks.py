"""What the controller asks of an engine."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from rl_memory_plugins.tags import PauseMode


class EngineHooks(Protocol):
    """What the controller asks of an engine. An adapter implements it and decides nothing."""

    def drain(self, mode: PauseMode) -> Future[None]:
        """Stop scheduling, deal with running requests by `mode`; done once no work touches the device.

        Raises:
            UnsupportedError: this version of the engine cannot do this mode; nothing happened.
            StateConflictError: it cannot now; nothing happened.
        """

    def resume(self, *, lift_pause: bool) -> None:
        """Schedule again; kept requests go on. Called only when the admission rule holds.

        Args:
            lift_pause: Also lift a pause that was made through the engine's own API, as its own wake does.
        """

    def reset_caches(self) -> None:
        """Forget everything that was computed with the old weights or lies in the KV cache."""

    def afterwards(self, act: Callable[[], None]) -> None:
        """Call `act`, which does not raise, once the reply that is being made has been sent. Nobody waits for it."""

    def show(self, asleep_tags: list[str], weight_version: str) -> None:
        """Mirror the state into the engine's own fields, for its own code that looks at them."""
