"""Under which name and in which dtype a tensor leaves the trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rl_memory_plugins.trainer.gpu import own_device
from rl_memory_plugins.weights.manifest import TensorSpec
from rl_memory_plugins.weights.source import name_of, without_wrappers

Rename = Callable[[str], str | None]
"""Gives the checkpoint's name for the trainer's; `None` leaves the tensor out."""

PIECE = 16 << 20
"""Elements of host memory that are cast at a time on a GPU."""


@dataclass(frozen=True)
class Outgoing:
    """The options that all sources share.

    Args:
        dtype: What floating-point tensors are sent as; `None` sends them as they are.
        rename: See `Rename`. Wrappers' parts of a name have been taken out before.
    """

    dtype: torch.dtype | None = None
    rename: Rename | None = None

    def name(self, name: str) -> str | None:
        name = without_wrappers(name)
        return name if self.rename is None else self.rename(name)

    def sent_as(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype if self.dtype is not None and dtype.is_floating_point else dtype

    def spec(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> TensorSpec:
        """`name` is the checkpoint's, `dtype` the trainer's."""
        return TensorSpec(name, name_of(self.sent_as(dtype)), tuple(shape))

    def cast(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in the dtype that is sent: itself, or a new one on the current GPU if this process uses one.

        A GPU reads host memory faster than one of a trainer's few threads converts it.
        """
        tensor = tensor.detach()
        dtype = self.sent_as(tensor.dtype)
        if tensor.dtype == dtype:
            return tensor
        if tensor.device.type == "cpu" and (device := own_device()).type == "cuda":
            try:
                return cast_to(tensor, dtype, device)
            except torch.OutOfMemoryError:
                pass
        return tensor.to(dtype)


def cast_to(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A copy in another dtype on another device. Waits for what it reads of host memory."""
    made = torch.empty(tensor.shape, dtype=dtype, device=device)
    copy_into(made, tensor)
    return made


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy to a contiguous tensor of the same shape; what is cast is cast by the target's device, in pieces."""
    if source.dtype == target.dtype or source.device == target.device:
        target.copy_(source)
        return
    flat, given = target.view(-1), source.reshape(-1)
    for start in range(0, given.numel(), PIECE):
        flat[start : start + PIECE].copy_(given[start : start + PIECE].to(target.device))
