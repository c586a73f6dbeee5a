"""Calls a function at the end of the first step of an optimiser, when the optimiser has made its state."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from rl_memory_plugins.errors import RLMemoryError
from rl_memory_plugins.trainer.gpu import is_capturing

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class FirstSteps:
    """The optimisers that have no state yet.

    A hook stays registered until `forget_done`: torch iterates over the hooks while a hook runs.

    Args:
        adopt: A weak reference to the function, because a copy of an optimiser must not copy the function's owner. The
            function gets the optimiser, and no other: another thread may be in a step of that one. It returns `False`
            if it must be called again at the next step. Its `RLMemoryError`s are logged: the
            step has been applied, and the next sleep adopts the state.
    """

    def __init__(self, adopt: weakref.ReferenceType[Callable[[torch.optim.Optimizer], bool]]) -> None:
        self._adopt = adopt
        self._hooks: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()

    def watch(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Add the optimisers that have no state and support hooks. A known optimiser is added once."""
        self.forget_done()
        for optimizer in optimizers:
            if optimizer.state or optimizer in self._hooks:
                continue
            if getattr(optimizer, "_optimizer_step_post_hooks", None) is None:  # a wrapper, whose state a sleep adopts
                continue
            self._hooks[optimizer] = optimizer.register_step_post_hook(_hook(self._adopt))

    def forget_done(self) -> None:
        """Remove the hooks of optimisers that have state. Call this outside a step."""
        for optimizer in [optimizer for optimizer in self._hooks if optimizer.state]:
            self._hooks.pop(optimizer).remove()


def _hook(adopt: weakref.ReferenceType[Callable[[torch.optim.Optimizer], bool]]) -> Callable[..., None]:
    done = False

    def adopt_state(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal done
        if done or is_capturing():
            return
        found = adopt()
        try:
            done = found is None or found(optimizer)
        except RLMemoryError as error:
            done = True
            if error.details.get("in_host_memory_bytes"):  # state that is not there: the next step must not use it
                raise
            logger.warning("the state of an optimiser is not adopted yet; the next sleep tries again: %s", error)

    return adopt_state
