"""A source for models wrapped by FullyShardedDataParallel (FSDP1)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from rl_memory_plugins.trainer.offloading import host_view, temporarily_loaded
from rl_memory_plugins.trainer.sources.outgoing import Outgoing, Rename
from rl_memory_plugins.weights.manifest import TensorSpec

if TYPE_CHECKING:
    import torch


class _Own(NamedTuple):
    """A parameter of a unit. Its module holds the whole parameter while the unit is gathered."""

    name: str  # in the checkpoint
    module: torch.nn.Module
    attribute: str
    shape: tuple[int, ...]


class FSDP1Source:
    """A model wrapped by `FullyShardedDataParallel`. The source gathers one wrapped unit at a time.

    All ranks must iterate in step. An offloaded flat parameter is loaded only while its unit is gathered. Persistent
    buffers and parameters outside FSDP are sent without a gather.

    Args:
        model: The root module, with or without `use_orig_params`.
        dtype, rename: See `Outgoing`.
    """

    def __init__(
        self, model: torch.nn.Module, *, dtype: torch.dtype | None = None, rename: Rename | None = None
    ) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel

        self._model = model
        self._outgoing = Outgoing(dtype, rename)
        self._units: list[tuple[Any, list[_Own]]] = []
        names = {module: prefix for prefix, module in reversed(list(model.named_modules()))}
        for unit in FullyShardedDataParallel.fsdp_modules(model):
            flat = getattr(unit._handle, "flat_param", None)
            if flat is None:  # the unit has no parameters
                continue
            own = []
            for info, shape in zip(flat._param_infos, flat._shapes, strict=True):
                name = self._outgoing.name(f"{names[info.module]}.{info.param_name}".lstrip("."))
                if name is not None:
                    own.append(_Own(name, info.module, info.param_name, tuple(shape)))
            self._units.append((unit, own))

    def specs(self) -> list[TensorSpec]:
        specs = [
            self._outgoing.spec(one.name, unit._handle.flat_param.dtype, one.shape)
            for unit, own in self._units
            for one in own
        ]
        return specs + [self._outgoing.spec(name, tensor.dtype, tensor.shape) for name, tensor in self._unmanaged()]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        from torch.distributed.fsdp import FullyShardedDataParallel

        root = next(iter(FullyShardedDataParallel.fsdp_modules(self._model)), None)
        if root is not None and root._handle is None:  # the root is not in `_units`
            # Before the first forward, the unit that is gathered first becomes the root. It must be the real root.
            with FullyShardedDataParallel.summon_full_params(root, recurse=False, writeback=False):
                pass
        for unit, own in self._units:
            flat = unit._handle.flat_param
            with (
                temporarily_loaded([flat]),
                FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False),
            ):
                for one in own:
                    yield one.name, self._outgoing.cast(getattr(one.module, one.attribute))
        for name, tensor in self._unmanaged():
            yield name, self._outgoing.cast(host_view(tensor.detach()))

    def _unmanaged(self) -> Iterator[tuple[str, torch.Tensor]]:
        managed = {
            (id(info.module), info.param_name)
            for unit, _ in self._units
            for info in (*unit._handle.flat_param._param_infos, *unit._handle.flat_param._shared_param_infos)
        }
        for prefix, module in self._model.named_modules():
            persistent = {
                name: buffer
                for name, buffer in module._buffers.items()
                if name not in module._non_persistent_buffers_set
            }
            for name, tensor in (*module._parameters.items(), *persistent.items()):
                if tensor is None or (id(module), name) in managed or name == "_flat_param":
                    continue
                sent = self._outgoing.name(f"{prefix}.{name}".lstrip("."))
                if sent is not None:
                    yield sent, tensor
