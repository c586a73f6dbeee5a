"""Counts what a trainer's processes move among themselves."""

import contextlib
import functools
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

NAMES = ("all_gather", "all_gather_into_tensor", "all_gather_single", "broadcast", "all_reduce", "all_to_all_single")


class _Functional(TorchDispatchMode):
    """Those of DTensors are operators."""

    def __init__(self, note):
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "_c10d_functional" and not func.__name__.startswith(("wait", "_wrap")):
            self._note(func.__name__)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counted(peers):
    """The names of the collectives in the body, but those of the agreements of `peers`."""
    found = []

    def wrap(call, name):
        @functools.wraps(call)
        def counting(*args, **kwargs):
            group = kwargs.get("group", args[2] if len(args) > 2 else None)
            if group is not peers._group:
                found.append(name)
            return call(*args, **kwargs)

        return counting

    with contextlib.ExitStack() as patches:
        for name in NAMES:
            if hasattr(dist, name):
                patches.enter_context(patch.object(dist, name, wrap(getattr(dist, name), name)))
                assert getattr(torch.distributed, name) is getattr(dist, name)
        patches.enter_context(_Functional(found.append))
        yield found
