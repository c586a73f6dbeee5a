"""Where a trainer's tensors come from."""

from __future__ import annotations

import collections
import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch

from rl_memory_plugins.errors import InvalidRequestError, WeightUpdateError
from rl_memory_plugins.weights.manifest import Mismatch, TensorSpec
from rl_memory_plugins.weights.shards import Layout


@runtime_checkable
class TensorSource(Protocol):
    """Tensors under the names of the checkpoint that the engine loads.

    A source that gathers or converts tensors does so in `tensors()`, one at a time. The sender takes the next tensor
    only when a slot has room for it.
    """

    def specs(self) -> list[TensorSpec]:
        """All tensors in the order of `tensors()`."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields each tensor once.

        The sender has read a tensor in host memory before it takes the next. It copies a tensor on a GPU on the stream
        of that GPU that is current at the yield. The source must order its writes before that stream, and later writes
        into the same memory after that stream. Memory from another stream needs `record_stream`.
        """


@runtime_checkable
class ResidentSource(TensorSource, Protocol):
    """A source whose tensors all exist before an update and do not change during it. They need no staging.

    It says nothing about a subclass with a `tensors` of its own.
    """

    def resident(self) -> list[torch.Tensor] | None:
        """The same tensor objects as `tensors()`, in the same order; `None` if `tensors()` makes some of them."""


@runtime_checkable
class StableSource(TensorSource, Protocol):
    """A source that makes some of its tensors, and neither changes nor frees them before the update ends.

    Their copies may then be made together.

    Attributes:
        stable: Whether that holds now.
    """

    @property
    def stable(self) -> bool: ...


@runtime_checkable
class GroupingSource(TensorSource, Protocol):
    """A source that makes several tensors at a time.

    Attributes:
        group_bytes: How many bytes of them, on the GPU of the trainer; 0 if it makes them one by one.
    """

    @property
    def group_bytes(self) -> int: ...


@runtime_checkable
class ArrivingSource(TensorSource, Protocol):
    """A source whose tensors come from another trainer.

    Attributes:
        silent_s: The longest wait for one of them, in seconds.
    """

    @property
    def silent_s(self) -> float: ...


class Places(Protocol):
    """Where tensors will lie in the bucket that is being packed. A name is in it if its tensor lies there whole.

    The tensors are contiguous, of the dtype and shape of the specs, and on the GPU of the bucket. What they hold may be
    written until they are yielded. None of them may be used after the next bucket has begun.
    """

    def __contains__(self, name: object, /) -> bool: ...

    def __getitem__(self, name: str, /) -> torch.Tensor: ...


@runtime_checkable
class PlacingSource(TensorSource, Protocol):
    """A source that can make tensors where they are sent from, which saves a copy.

    It says nothing about a subclass with `tensors` of its own.
    """

    def tensors_in(self, places: Places) -> Iterator[tuple[str, torch.Tensor]]:
        """As `tensors`. It may yield the tensors of `places` themselves.

        When it takes a tensor, the sender has set `places` to the bucket of that tensor.
        """


@runtime_checkable
class NegotiableSource(TensorSource, Protocol):
    """A source that can change its specs to what the engine takes.

    Attributes:
        negotiable: Whether it can. The sender then asks the engine before it offers the tensors.
    """

    @property
    def negotiable(self) -> bool: ...

    def revise(self, mismatches: Sequence[Mismatch]) -> bool:
        """Change the specs after the engine has refused them.

        Args:
            mismatches: Those of all ranks, the same in every process that iterates over the source.

        Returns: Whether `specs` has changed.
        """


@runtime_checkable
class ShardedSource(TensorSource, Protocol):
    """A source of tensors that lie in parts in several processes.

    It says nothing about a subclass with `specs` or `tensors` of its own and no `held`.

    Attributes:
        gathered: The bytes of the tensors that the last iteration has gathered; `None` if that is not known.
    """

    @property
    def gathered(self) -> int | None: ...

    def layouts(self) -> list[Layout | None] | None:
        """For each tensor of `specs` how it lies over the ranks of `torch.distributed`; `None` if it must be gathered.

        Only this process need know its layouts. `None` if no tensor has one. All processes call it in step.
        """

    def leave_out(self, names: Collection[str]) -> None:
        """The next `tensors()` does not yield these, and gathers none of them: `held` has them until the next call.

        At the end of an update it is called without names.
        """

    def held(self, name: str) -> torch.Tensor:
        """What this process holds of a tensor, in the dtype in which it is sent. It does not change in the update."""


@runtime_checkable
class ReadingSource(TensorSource, Protocol):
    """A source that says whether it writes to the trainer's weights.

    Attributes:
        only_reads: No write to them runs while the source is in use, not even one that it undoes later, as of adapters
            that it merges. The weights may then be copied to host memory meanwhile. Without it a handoff copies them
            after the update. It says nothing about a subclass with `specs` or `tensors` of its own.
    """

    @property
    def only_reads(self) -> bool: ...


WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"""The parts that FSDP1, activation checkpointing and torch.compile add to names."""


def without_wrappers(name: str) -> str:
    if "._" in name or name.startswith("_"):  # as all of them begin; thousands of names have none
        for part in WRAPPERS:
            name = name.replace(part, "")
    return name


def named_tensors(
    module: torch.nn.Module | Mapping[str, torch.Tensor], rename: Callable[[str], str | None] = without_wrappers
) -> Iterator[tuple[str, torch.Tensor]]:
    """A module's parameters and persistent buffers, or a mapping's entries.

    Yields a tensor with several names (tied weights) once, under the first name that `rename` keeps. Leaves out extra
    state that is not a tensor. The tensors are not detached: a detached one keeps the old memory if a parameter's
    `data` is replaced.

    Args:
        rename: Returns the name to send, or `None` to leave an entry out.

    Raises:
        InvalidRequestError: another entry is not a tensor, or a tensor is on the meta device.
    """
    entries = module.state_dict(keep_vars=True) if isinstance(module, torch.nn.Module) else module
    # A mapping of another kind may make tensors on access, so that one has the id of one that has gone.
    makes = type(entries) not in (dict, collections.OrderedDict)
    seen: dict[int, weakref.ref[torch.Tensor] | None] = {}  # by id
    for name, tensor in entries.items():
        is_tensor = isinstance(tensor, torch.Tensor)
        if not is_tensor and name.endswith("_extra_state"):
            continue
        sent = rename(name)
        if sent is None:
            continue
        if not is_tensor or tensor.is_meta:
            problem = "is on the meta device" if is_tensor else f"is a {type(tensor).__name__} and not a tensor"
            raise InvalidRequestError(f"{name} cannot be sent: it {problem}", name=name)
        if id(tensor) in seen and ((known := seen[id(tensor)]) is None or known() is tensor):
            continue
        seen[id(tensor)] = weakref.ref(tensor) if makes else None
        yield sent, tensor


def spec_of(name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> TensorSpec:
    return TensorSpec(name, name_of(dtype or tensor.dtype), tuple(tensor.shape))


@functools.cache
def name_of(dtype: torch.dtype) -> str:
    """torch's name of a dtype without the prefix, e.g. `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def next_tensor(spec: TensorSpec, tensors: Iterator[tuple[str, torch.Tensor]]) -> torch.Tensor:
    """The next tensor of a source.

    Raises:
        WeightUpdateError: there is none, or it is not what the specs list.
    """
    name, tensor = next(tensors, ("", None))
    if tensor is None:
        raise WeightUpdateError(f"the source ended before it yielded {spec.name}", name=spec.name)
    if name != spec.name or tensor.shape != spec.shape or name_of(tensor.dtype) != spec.dtype:
        raise WeightUpdateError(
            f"the source yielded {name} {tensor.dtype} {list(tensor.shape)}, but its specs list {spec.name} "
            f"{spec.dtype} {list(spec.shape)}",
            name=spec.name,
        )
    return tensor.resolve_neg() if tensor.is_neg() else tensor  # a lazy negation is not in the bytes
