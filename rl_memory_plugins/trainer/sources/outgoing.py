"""The name and the dtype under which a trainer sends a tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rl_memory_plugins.trainer.gpu import own_device
from rl_memory_plugins.weights.manifest import TensorSpec
from rl_memory_plugins.weights.source import name_of, without_wrappers

Rename = Callable[[str], str | None]
"""Maps the trainer's name to the checkpoint's name, or to `None` to skip the tensor."""

PIECE = 16 << 20
"""The number of elements in host memory that a GPU casts at a time."""


@dataclass(frozen=True)
class Outgoing:
    """The common options of all sources.

    Args:
        dtype: The dtype in which floating-point tensors are sent; `None` keeps theirs. An engine whose memory has a
            narrower dtype rounds tensors of a dtype that is given here, and refuses others.
        rename: See `Rename`. It gets names without the parts that wrappers have added.
    """

    dtype: torch.dtype | None = None
    rename: Rename | None = None

    def name(self, name: str) -> str | None:
        """The name of the checkpoint for a name of the trainer, or `None` to skip the tensor."""
        name = without_wrappers(name)
        return name if self.rename is None else self.rename(name)

    def sent_as(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a tensor of the trainer's dtype is sent."""
        return self.dtype if self.dtype is not None and dtype.is_floating_point else dtype

    def spec(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> TensorSpec:
        """The spec of a tensor with the checkpoint's name and the trainer's dtype."""
        chosen = self.dtype is not None and dtype.is_floating_point
        return TensorSpec(name, name_of(self.sent_as(dtype)), tuple(shape), chosen)

    def cast(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in the dtype in which it is sent: itself, or a copy.

        The current GPU casts tensors in host memory, if this process uses a GPU: it reads host memory faster than the
        few threads of a trainer cast it.
        """
        tensor = tensor.detach()
        dtype = self.sent_as(tensor.dtype)
        if tensor.dtype != dtype and tensor.device.type == "cpu" and (device := own_device()).type == "cuda":
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
