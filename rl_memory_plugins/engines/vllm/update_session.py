"""vLLM's own weight updates in several calls: `start_weight_update`, `update_weights`, `finish_weight_update`.

At the start vLLM moves the parameters to the meta device, or leaves them to be written in place, call by call. Either
way nothing may be generated until the finish, and a trainer that dies in between must not leave the model like that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rl_memory_plugins.weights.foreign import ForeignLoads

UPDATE_METHODS = ("start_weight_update", "update_weights", "finish_weight_update")


class UpdateSession:
    """Put in front of one worker's methods. Updates of a draft model are not looked at.

    Args:
        worker: vLLM's.
        loads: Of the worker's model.
    """

    def __init__(self, worker: Any, loads: Callable[[], ForeignLoads]) -> None:
        self._worker = worker
        self._loads = loads
        for name, wrap in zip(UPDATE_METHODS, (self._start, self._update, self._finish), strict=True):
            setattr(worker, name, wrap(getattr(worker, name)))

    def abandon(self) -> None:
        """Somebody else updates the weights: what is still open ends here."""
        if self._loads().is_under_way:
            self._worker._weight_update_active = False
            self._worker.weight_transfer_engine.reset_weight_update_target()
        self._loads().break_off()

    def _start(self, original: Callable[[], None]) -> Callable[[], None]:
        def start_weight_update() -> None:
            self._loads().manager.require_writable()
            if self._worker._weight_update_active:
                return original()  # which refuses
            self.abandon()  # what vLLM took for over has left the model in pieces
            try:
                original()
            except BaseException:
                self.abandon()
                raise
            self._loads().begin()
            return None

        return start_weight_update

    def _update(self, original: Callable[..., None]) -> Callable[..., None]:
        def update_weights(*args: Any, **kwargs: Any) -> None:
            try:
                original(*args, **kwargs)
            except BaseException:
                if self._loads().is_under_way and not self._worker._weight_update_active:  # over, says vLLM
                    self._loads().break_off()
                raise

        return update_weights

    def _finish(self, original: Callable[[], None]) -> Callable[[], None]:
        def finish_weight_update() -> None:
            try:
                original()
            except BaseException:
                if self._loads().is_under_way:  # half of it is done, which another try would take for all
                    self._loads().manager.tear()
                    self.abandon()
                raise
            self._loads().end()

        return finish_weight_update
