"""The name and the dtype under which a trainer sends a tensor."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import torch

from rl_memory_plugins.trainer.gpu import own_device
from rl_memory_plugins.trainer.sources.engine_dtypes import EngineDtypes
from rl_memory_plugins.weights.casts import is_floating
from rl_memory_plugins.weights.manifest import Mismatch, TensorSpec
from rl_memory_plugins.weights.source import name_of, without_wrappers

Rename = Callable[[str], str | None]
"""Maps the trainer's name to the checkpoint's name, or to `None` to skip the tensor."""

Dtypes: TypeAlias = torch.dtype | Mapping[str, torch.dtype] | EngineDtypes | Literal["engine"] | None
"""The dtypes in which tensors are sent, see `Outgoing`."""

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
"""Types whose tensors have memory of their own, of their dtype."""

PIECE = 16 << 20
"""The number of elements in host memory that a GPU casts at a time."""


class Outgoing:
    """The common options of all sources.

    Args:
        dtype: The dtype in which floating-point tensors are sent. `None` keeps the trainer's. A mapping from globs of
            the checkpoint's names to dtypes: the first glob that matches decides; without one, the trainer's dtype is
            kept. `"engine"` or an `EngineDtypes`: the trainer's dtype where the engine's memory holds each value, else
            the engine's. Tensors of eight bits keep theirs: their values mean nothing without a scale. An engine whose
            memory has a narrower dtype rounds tensors of a dtype that is given here, and refuses others.
        rename: See `Rename`. It gets names without the parts that wrappers have added.
    """

    def __init__(self, dtype: Dtypes = None, rename: Rename | None = None) -> None:
        self._dtype = EngineDtypes() if isinstance(dtype, str) else dtype
        self.rename = rename

    @property
    def is_plain(self) -> bool:
        """Whether tensors are sent in the trainer's dtypes, under its names."""
        return self._dtype is None and self.rename is None

    @property
    def negotiable(self) -> bool:
        """Whether the engine's answer may change the dtypes."""
        return isinstance(self._dtype, EngineDtypes)

    def revise(self, mismatches: Sequence[Mismatch]) -> bool:
        """Change the dtypes to those that the engine wants. Returns whether any has changed."""
        return isinstance(self._dtype, EngineDtypes) and self._dtype.learn(mismatches)

    def name(self, name: str) -> str | None:
        """The name of the checkpoint for a name of the trainer, or `None` to skip the tensor."""
        name = without_wrappers(name)
        return name if self.rename is None else self.rename(name)

    def sent_as(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a tensor with the checkpoint's name and the trainer's dtype is sent."""
        if self._dtype is None or not is_floating(name_of(dtype)):
            return dtype
        if isinstance(self._dtype, torch.dtype):
            return self._dtype
        if isinstance(self._dtype, EngineDtypes):
            return self._dtype.of(name) or dtype
        chosen = (wanted for glob, wanted in self._dtype.items() if fnmatch.fnmatchcase(name, glob))
        return next(chosen, dtype)

    def spec(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> TensorSpec:
        """The spec of a tensor with the checkpoint's name and the trainer's dtype."""
        if self._dtype is None:  # the common case with thousands of tensors
            return TensorSpec(name, name_of(dtype), tuple(shape))
        return TensorSpec(name, name_of(self.sent_as(name, dtype)), tuple(shape), self._is_chosen(name, dtype))

    def _is_chosen(self, name: str, dtype: torch.dtype) -> bool:
        if self._dtype is None or isinstance(self._dtype, EngineDtypes) or not is_floating(name_of(dtype)):
            return False
        return isinstance(self._dtype, torch.dtype) or any(fnmatch.fnmatchcase(name, glob) for glob in self._dtype)

    def cast(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in the dtype in which it is sent: itself, or a copy.

        The current GPU casts tensors in host memory, if this process uses a GPU: it reads host memory faster than the
        few threads of a trainer cast it.
        """
        tensor = tensor.detach() if tensor.requires_grad else tensor
        dtype = self.sent_as(name, tensor.dtype)
        if tensor.dtype == dtype:
            return tensor
        if tensor.device.type == "cpu" and (device := own_device()).type == "cuda":
            with contextlib.suppress(torch.OutOfMemoryError):
                made = torch.empty(tensor.shape, dtype=dtype, device=device)
                copy_into(made, tensor)
                return made
        return tensor.to(dtype)


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy to a contiguous tensor of the same shape. The target's device casts, in pieces.

    Returns after all host memory has been read.
    """
    if source.dtype == target.dtype or source.device == target.device:
        target.copy_(source)
        return
    flat, given = target.view(-1), source.reshape(-1)
    for start in range(0, given.numel(), PIECE):
        flat[start : start + PIECE].copy_(given[start : start + PIECE].to(target.device))
