"""Under which name and in which dtype a tensor leaves the trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_memory_plugins.weights.manifest import TensorSpec

if TYPE_CHECKING:
    import torch

Rename = Callable[[str], str | None]
"""Gives the checkpoint's name for the trainer's; `None` leaves the tensor out."""

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
        return TensorSpec(name, str(self.sent_as(dtype)).removeprefix("torch."), tuple(shape))

    def cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self.sent_as(tensor.dtype))
