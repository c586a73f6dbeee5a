"""The tensors that modules, optimisers and collections hold, and the plain tensors that hold their bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from rl_memory_plugins.errors import InvalidRequestError, UnsupportedError

Target: TypeAlias = (
    torch.nn.Module | torch.optim.Optimizer | Mapping[str, torch.Tensor] | Sequence[torch.Tensor] | torch.Tensor
)


def check_target(target: Any) -> None:
    """Refuse a target whose tensors would not be found and would silently stay on the device."""
    found = isinstance(target, (torch.nn.Module, torch.optim.Optimizer, Mapping, list, tuple, torch.Tensor))
    items = target if isinstance(target, (list, tuple)) else ()
    if not found or any(isinstance(item, (torch.nn.Module, torch.optim.Optimizer)) for item in items):
        raise InvalidRequestError(
            f"this {type(target).__name__} cannot be moved: pass each module and each torch.optim.Optimizer as a "
            "separate target, and tensors singly or in mappings, lists and tuples",
            field="targets",
            got=type(target).__name__,
        )


def on_accelerator(tensor: torch.Tensor) -> bool:
    return tensor.device.type not in ("cpu", "meta")


def tensors_of(target: Target, gradients: bool | None = None) -> Iterator[torch.Tensor]:
    """All tensors of a target. `Offloader` documents `gradients`."""
    if isinstance(target, torch.nn.Module):
        modules = modules_of(target)
        held = (parameter for module in modules for parameter in module._parameters.values() if parameter is not None)
        parameters = {id(parameter): parameter for parameter in held}.values()
        if gradients is not True:
            yield from parameters
            yield from (buffer for module in modules for buffer in module._buffers.values() if buffer is not None)
        if gradients is not False:
            yield from (parameter.grad for parameter in parameters if parameter.grad is not None)
    else:
        found: list[torch.Tensor] = []
        if isinstance(target, torch.optim.Optimizer):
            _collect([optimizer.state for optimizer in optimizers_in(target)], found)
        else:
            _collect(target, found)
        yield from found


def optimizers_in(*targets: Target) -> list[torch.optim.Optimizer]:
    """The optimisers among the targets, and those that these hold: they have the state of torch's
    `ZeroRedundancyOptimizer`, of accelerate's wrapper, of containers such as torchtitan's, and of optimisers that take
    steps around those of another.
    """
    found: dict[int, torch.optim.Optimizer] = {}  # by id: a weak proxy has no hash
    waiting: list[Any] = list(targets)
    while waiting:
        one = waiting.pop(0)
        if not isinstance(one, torch.optim.Optimizer) or id(one) in found:
            continue
        found[id(one)] = one
        for name, value in list(getattr(one, "__dict__", {}).items()):  # another thread may be in a step of it
            if name in ("state", "param_groups", "defaults"):  # have no optimisers, and many entries
                continue
            waiting += value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    return list(found.values())


def _collect(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (dict, Mapping)):
        for item in value.values():
            _collect(item, found)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, found)


def modules_of(root: torch.nn.Module) -> list[torch.nn.Module]:
    """As `root.modules()`, whose nested generators take ten times as long."""
    found: dict[int, torch.nn.Module] = {}  # by id: a weak proxy has no hash
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            waiting += [child for child in reversed(list(module._modules.values())) if child is not None]
    return list(found.values())


def reshard(module: torch.nn.Module) -> None:
    """Free the parameters that FSDP has gathered: without a backward, the root keeps them after a forward."""
    for child in modules_of(module):
        # A module takes a microsecond to say that it lacks an attribute. `type` would be that of a weak proxy.
        if hasattr(child.__class__, "unshard") and hasattr(child.__class__, "reshard"):  # FSDP2's mixin
            child.reshard()
        handle = child.__dict__.get("_handle")
        if handle is not None and hasattr(handle, "reshard") and handle.uses_sharded_strategy:  # FSDP1
            whole = getattr(handle.flat_param, "_full_param_padded", None)
            if whole is not None and whole.untyped_storage().nbytes():
                handle.reshard(True)


def plain_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that hold a tensor's bytes: the local shard of a DTensor, the values and scales of a quantised
    tensor, the indices and values of a sparse tensor, or the tensor itself. A lazy module's parameter has none yet.

    Raises:
        UnsupportedError: the tensor's bytes are known to torch's kernels only.
    """
    if torch.nn.parameter.is_lazy(tensor):
        return
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, name)
            if isinstance(part, torch.Tensor):  # a DTensor also lists its mesh
                yield from plain_parts(part)
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    elif tensor.layout is torch.strided:
        yield tensor
    else:
        raise UnsupportedError(f"a tensor of {tensor.layout} cannot be moved: it has no storage")


def has_memory(storage: Any) -> bool:
    try:
        return bool(storage.data_ptr())
    except RuntimeError:  # the storage of a wrapper subclass has no data pointer
        return False
