"""Which memory a piece of code writes: for loaders that do not say what they loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_memory_plugins.weights.regions import Coverage


class WriteRecorder(TorchDispatchMode):  # type: ignore[misc]
    """Adds all memory that operators write to a `Coverage`. The operators run as they are."""

    def __init__(self, written: Coverage) -> None:
        super().__init__()
        self.written = written

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            for position, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[position] if position < len(args) else kwargs.get(argument.name)
                    for tensor in tree_leaves(value):
                        if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                            self.written.add(tensor)
        return result


@contextmanager
def recording(written: Coverage) -> Iterator[None]:
    """Record what this thread writes, and what it has thread pools write: loaders of experts use them."""
    submit = ThreadPoolExecutor.submit

    def recorded_submit(
        pool: ThreadPoolExecutor, call: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        def recorded() -> Any:
            with WriteRecorder(written):
                return call(*args, **kwargs)

        return submit(pool, recorded)

    ThreadPoolExecutor.submit = recorded_submit  # type: ignore[method-assign, assignment]
    try:
        with WriteRecorder(written):
            yield
    finally:
        ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]
