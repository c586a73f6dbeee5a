"""The interface between the controller and the scheduler of an engine."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from rl_memory_plugins.tags import PauseMode


class EngineHooks(Protocol):
    """The controller's calls to an engine. An adapter implements them and decides no rule of the contract."""

    def drain(self, mode: PauseMode, *, for_update: bool = False) -> Future[None]:
        """Stop scheduling, and treat running requests by `mode`. The future is done once no work touches the device.

        Args:
            mode: The treatment of running requests.
            for_update: For an update of weights. The last step of frozen requests may then run on while the ranks
                connect to the trainer, if the adapter awaits the step before the first write.

        Raises:
            UnsupportedError: this engine cannot do this mode; nothing was changed.
            StateConflictError: the engine cannot do this mode now; nothing was changed.
        """

    def resume(self, *, lift_pause: bool) -> None:
        """Schedule again; kept requests go on. The controller calls it only while the admission rule holds.

        Args:
            lift_pause: Also lift a pause by the engine's own API, as the engine's own wake does.
        """

    def is_idle(self, seconds: float) -> bool:
        """Whether no request is here, none came for `seconds`, the engine has not resumed since, and nothing pauses it.

        Ranks that run the controller in step get the same answer.
        """

    def has_requests(self) -> bool:
        """Whether requests are here that a freeze leaves their KV cache. Ranks that run the controller in step get the
        same answer."""

    def reset_caches(self, *, frozen: bool = False, released: bool = False) -> None:
        """Drop everything that was computed from the old weights or that lies in the KV cache.

        Args:
            frozen: Running requests keep their KV cache. Requests that begin later must not find it: neither its
                present content nor the content that running requests still add to it.
            released: A sleep is about to release the memory of the KV cache, and may still fail.
        """

    def adapters_in_use(self) -> set[int]:
        """The numbers of the adapter versions that requests in the scheduler use, and perhaps others."""

    def call_after_reply(self, act: Callable[[], None]) -> None:
        """Call `act` after the engine has sent the current reply. `act` must not raise, and nobody waits for it."""

    def show(self, asleep_tags: list[str], weight_version: str) -> None:
        """Copy the state into the engine's own fields, which the engine's own code reads."""
