"""Makes an optimiser wait for its state, where the copies of a wake are still under way."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.optim.optimizer as torch_optimizer  # torch.optim has no such attribute

from rl_memory_plugins.trainer.gpu import is_capturing
from rl_memory_plugins.trainer.targets import is_of_torch


class StateHooks:
    """Hooks before `step`, `state_dict` and `load_state_dict` of optimisers.

    Args:
        before_use: A weak reference to the function that waits. It gets the optimiser, and whether the state will be
            read. The reference is weak because optimisers must not keep the function's owner.

    Attributes:
        captured: A CUDA graph has a step of such an optimiser. Replays of the graph run no hook.
    """

    def __init__(self, before_use: weakref.ReferenceType[Callable[[torch.optim.Optimizer, bool], object]]) -> None:
        self._before_use = before_use
        self._handles: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[Any]] = weakref.WeakKeyDictionary()
        self._kept = _Kept()
        self.captured = False

    def watch(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Add the optimisers that support hooks. A known optimiser is added once."""
        for optimizer in optimizers:
            steps = getattr(optimizer, "_optimizer_step_pre_hooks", None)
            if steps is None or optimizer in self._handles:  # None: a wrapper
                continue
            reading, loading = (partial(_before_use, weakref.ref(self), self._kept, reads) for reads in (True, False))
            step = optimizer.register_step_pre_hook(reading)
            steps.move_to_end(step.id, last=False)  # earlier hooks may read the state
            self._handles[optimizer] = [
                step,
                optimizer.register_state_dict_pre_hook(reading, prepend=True),
                optimizer.register_load_state_dict_pre_hook(loading, prepend=True),
            ]

    def keep(self, owner: object) -> None:
        """Let the optimisers keep this object alive; `None` ends that."""
        self._kept.owner = owner if self._handles else None  # without an optimiser the owner would keep itself

    def remove(self) -> None:
        """Remove all hooks."""
        while self._handles:
            for handle in self._handles.popitem()[1]:
                handle.remove()

    def cover(self, targets: Iterable[Any]) -> bool:
        """Whether all uses of these targets' tensors wait.

        It holds for the optimisers of `torch.optim`. Others may read their state elsewhere, as schedule-free ones do in
        `train` and `eval`. It does not hold if a step is in a CUDA graph, or if hooks for all optimisers, which run
        before those of one, may read the state.
        """
        hooks_of_all = getattr(torch_optimizer, "_global_optimizer_pre_hooks", True)
        return not self.captured and not hooks_of_all and all(map(self._covers, targets))

    def _covers(self, target: Any) -> bool:
        return isinstance(target, torch.optim.Optimizer) and target in self._handles and is_of_torch(target)

    def before_use(self, reads: bool, optimizer: torch.optim.Optimizer) -> None:
        if is_capturing():
            self.captured = True
        before_use = self._before_use()
        if before_use is not None:
            before_use(optimizer, reads)


class _Kept:
    """A reference that optimisers hold."""

    owner: object = None


def _before_use(
    hooks: weakref.ReferenceType[StateHooks], kept: _Kept, reads: bool, optimizer: torch.optim.Optimizer, *_: Any
) -> None:
    found = hooks()
    if found is not None:
        found.before_use(reads, optimizer)
