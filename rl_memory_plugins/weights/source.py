"""Where a trainer's tensors come from."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, runtime_checkable

import torch

from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.weights.manifest import TensorSpec


@runtime_checkable
class TensorSource(Protocol):
    """Tensors under the names of the checkpoint that the engine loads.

    A source that gathers or converts does so in `tensors()`, one tensor at a time; nothing is asked for before
    there is room for it.
    """

    def specs(self) -> list[TensorSpec]:
        """All tensors, in the order in which `tensors()` gives them."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors, each once.

        A tensor in host memory has been read when the next is asked for. A GPU's may not have been: it is copied in
        the order of the stream of its GPU that was current when it was given. So what the source writes into it
        must be ordered before that stream, and what it writes into a tensor that it gave before, after it. Memory
        that was allocated on another stream needs `record_stream`, as for any copy.
        """


@runtime_checkable
class ResidentSource(TensorSource, Protocol):
    """A source whose tensors all exist, and stay as they are during an update: nothing need be staged."""

    def resident(self) -> list[torch.Tensor] | None:
        """The very tensors that `tensors()` gives, in its order; None if some are made on the way."""


WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"""What FSDP1, activation checkpointing and torch.compile put into names."""


def without_wrappers(name: str) -> str:
    for part in WRAPPERS:
        name = name.replace(part, "")
    return name


def named_tensors(
    module: torch.nn.Module | Mapping[str, torch.Tensor], rename: Callable[[str], str | None] = without_wrappers
) -> Iterator[tuple[str, torch.Tensor]]:
    """A module's parameters and persistent buffers, or a mapping's entries.

    Tensors that are the same object under two names (tied weights) come once, under the first that is sent. Modules'
    extra state is left out where it is no tensor. Not detached: those would stay on the old memory where a parameter's
    `data` is replaced.

    Args:
        rename: Gives the name that is sent; None leaves an entry out.

    Raises:
        InvalidRequestError: another entry is no tensor, or a tensor has no content (the meta device).
    """
    entries = module.state_dict(keep_vars=True) if isinstance(module, torch.nn.Module) else module
    seen: dict[int, weakref.ref[torch.Tensor]] = {}  # by id; a mapping that makes its tensors uses one twice
    for name, tensor in entries.items():
        is_tensor = isinstance(tensor, torch.Tensor)
        if not is_tensor and name.endswith("_extra_state"):
            continue
        sent = rename(name)
        if sent is None:
            continue
        if not is_tensor or tensor.is_meta:
            what = "is on the meta device" if is_tensor else f"is no tensor but a {type(tensor).__name__}"
            raise InvalidRequestError(f"{name} {what}: it cannot be sent", name=name)
        known = seen.get(id(tensor))
        if known is None or known() is not tensor:
            seen[id(tensor)] = weakref.ref(tensor)
            yield sent, tensor


def spec_of(name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> TensorSpec:
    return TensorSpec(name, name_of(dtype or tensor.dtype), tuple(tensor.shape))


@functools.cache
def name_of(dtype: torch.dtype) -> str:
    """torch's name for it, without the prefix."""
    return str(dtype).removeprefix("torch.")
