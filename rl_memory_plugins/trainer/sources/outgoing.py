"""Under which name and in which dtype a tensor leaves the trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rl_memory_plugins.weights.manifest import TensorSpec
from rl_memory_plugins.weights.source import name_of

Rename = Callable[[str], str | None]
"""Gives the checkpoint's name for the trainer's; `None` leaves the tensor out."""

PIECE = 16 << 20
"""Elements of host memory that are cast at a time on a GPU."""

WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"""What FSDP1, activation checkpointing and torch.compile put into names."""


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
        for part in WRAPPERS:
            name = name.replace(part, "")
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
        if tensor.dtype != dtype and tensor.device.type == "cpu" and torch.cuda.is_initialized():
            try:
                return cast_to(tensor, dtype, torch.device("cuda", torch.cuda.current_device()))
            except torch.OutOfMemoryError:
                pass
        return tensor.to(dtype)


def cast_to(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A copy in another dtype on another device, which does the conversion piece by piece. Waits for the reads."""
    source = tensor.reshape(-1)
    made = torch.empty(source.numel(), dtype=dtype, device=device)
    for start in range(0, source.numel(), PIECE):
        made[start : start + PIECE].copy_(source[start : start + PIECE].to(device))
    return made.view(tensor.shape)
