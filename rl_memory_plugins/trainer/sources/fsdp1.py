"""A source for models wrapped by FullyShardedDataParallel (FSDP1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.distributed.fsdp import FullyShardedDataParallel

from rl_memory_plugins.trainer.offloading import host_view, temporarily_loaded
from rl_memory_plugins.trainer.sources.outgoing import Dtypes, Outgoing, Rename
from rl_memory_plugins.weights.manifest import Mismatch, TensorSpec

if TYPE_CHECKING:
    import torch


class _Parameter(NamedTuple):
    """A parameter of an FSDP unit. Its module holds the whole parameter while the unit is gathered."""

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

    only_reads = True  # see `weights.source.ReadingSource`

    def __init__(self, model: torch.nn.Module, *, dtype: Dtypes = None, rename: Rename | None = None) -> None:
        self._model = model
        self._outgoing = Outgoing(dtype, rename)
        self._units: list[tuple[Any, list[_Parameter]]] = []
        prefixes = {module: prefix for prefix, module in model.named_modules()}
        for unit in FullyShardedDataParallel.fsdp_modules(model):
            flat = getattr(unit._handle, "flat_param", None)
            if flat is None:  # the unit has no parameters
                continue
            parameters = []
            for info, shape in zip(flat._param_infos, flat._shapes, strict=True):
                name = self._outgoing.name(f"{prefixes[info.module]}.{info.param_name}".lstrip("."))
                if name is not None:
                    parameters.append(_Parameter(name, info.module, info.param_name, tuple(shape)))
            self._units.append((unit, parameters))

    def specs(self) -> list[TensorSpec]:
        specs = [
            self._outgoing.spec(parameter.name, unit._handle.flat_param.dtype, parameter.shape)
            for unit, parameters in self._units
            for parameter in parameters
        ]
        return specs + [self._outgoing.spec(name, tensor.dtype, tensor.shape) for name, tensor in self._unmanaged()]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        root = next(iter(FullyShardedDataParallel.fsdp_modules(self._model)), None)
        if root is not None and root._handle is None:  # the root is not in `_units`
            # Before the first forward, the unit that is gathered first becomes the root. It must be the real root.
            with FullyShardedDataParallel.summon_full_params(root, recurse=False, writeback=False):
                pass
        for unit, parameters in self._units:
            flat = unit._handle.flat_param
            with (
                temporarily_loaded(flat),
                FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False),
            ):
                for name, module, attribute, _ in parameters:
                    yield name, self._outgoing.cast(name, getattr(module, attribute))
        for name, tensor in self._unmanaged():
            yield name, self._outgoing.cast(name, host_view(tensor.detach()))

    @property
    def negotiable(self) -> bool:
        """See `weights.source.NegotiableSource`."""
        return self._outgoing.negotiable

    def revise(self, mismatches: Sequence[Mismatch]) -> bool:
        return self._outgoing.revise(mismatches)

    def _unmanaged(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The persistent buffers, and the parameters outside FSDP."""
        managed = {
            (id(info.module), info.param_name)
            for unit, _ in self._units
            for info in (*unit._handle.flat_param._param_infos, *unit._handle.flat_param._shared_param_infos)
        }
        for prefix, module in self._model.named_modules():
            skipped = {"_flat_param", *module._non_persistent_buffers_set}
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None or (id(module), name) in managed or name in skipped:
                    continue
                sent = self._outgoing.name(f"{prefix}.{name}".lstrip("."))
                if sent is not None:
                    yield sent, tensor
