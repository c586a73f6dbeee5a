"""Makes an optimiser wait for its state, where the copies of a wake are still under way."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch


class StateHooks:
    """Hooks before `step`, `state_dict` and `load_state_dict` of optimisers.

    Args:
        wait: A weak reference to the function that waits. It is weak because optimisers must not keep its owner.

    Attributes:
        captured: A CUDA graph has a step of such an optimiser. Replays of the graph run no hook.
    """

    def __init__(self, wait: weakref.ReferenceType[Callable[[], object]]) -> None:
        self._wait = wait
        self._watched: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.captured = False

    def watch(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Add the optimisers that support hooks. A known optimiser is added once."""
        for optimizer in optimizers:
            steps = getattr(optimizer, "_optimizer_step_pre_hooks", None)
            if steps is None or optimizer in self._watched:  # None: a wrapper
                continue
            hook = partial(_before_use, weakref.ref(self))
            first = optimizer.register_step_pre_hook(hook)
            steps.move_to_end(first.id, last=False)  # earlier hooks may read the state
            optimizer.register_state_dict_pre_hook(hook, prepend=True)
            optimizer.register_load_state_dict_pre_hook(hook, prepend=True)
            self._watched.add(optimizer)

    def cover(self, targets: Iterable[Any]) -> bool:
        """Whether all uses of these targets' tensors wait. It holds for optimisers whose steps are in no CUDA graph."""
        return not self.captured and all(
            isinstance(target, torch.optim.Optimizer) and target in self._watched for target in targets
        )

    def before_use(self) -> None:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self.captured = True
        wait = self._wait()
        if wait is not None:
            wait()


def _before_use(hooks: weakref.ReferenceType[StateHooks], *_: Any) -> None:
    found = hooks()
    if found is not None:
        found.before_use()
