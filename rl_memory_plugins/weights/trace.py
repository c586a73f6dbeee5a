"""Watching a model's loader without letting it write.

The loader runs on meta tensors under a dispatch mode. Copies from views of them into real memory are recorded
and not executed; no other write to real memory is executed either. What a name's loading does beyond such
copies makes the name *opaque*: only the loader itself can load it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rl_memory_plugins.weights.coverage import Coverage
from rl_memory_plugins.weights.manifest import Mismatch, TensorSpec
from rl_memory_plugins.weights.write_recorder import overwritten_by, tensors_in, written_by

aten = torch.ops.aten


class CopyStep(NamedTuple):
    """`destination.copy_(source.as_strided(size, stride, offset))`, in elements of the contiguous source."""

    destination: torch.Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class FillStep(NamedTuple):
    destination: torch.Tensor
    value: Any


Step = CopyStep | FillStep


class Tracer(TorchDispatchMode):  # type: ignore[misc]
    """Records what a loader does with the tensors of `specs` to a model's `memory`.

    Attributes:
        steps: Per name, what loading it does to real memory, in order. Not for opaque names.
        opaque: Names only the loader can load, and why.
        wrong_dtype: Names whose copy would cast; empty with `allow_cast`.
        written: All real memory that the loader meant to write anew.
        blind: Whether it meant to write more, and how much depends on values.
        derives: What the loader computes of the model's own memory, if it does: then no replay is what it does.
        current: The name that the loader took last.
    """

    def __init__(
        self, specs: Iterable[TensorSpec], memory: Iterable[torch.Tensor] = (), *, allow_cast: bool = False
    ) -> None:
        super().__init__()
        self._memory = {_storage(tensor) for tensor in memory}
        self.derives = ""
        self.blind = False
        self.steps: dict[str, list[Step]] = {}
        self.opaque: dict[str, str] = {}
        self.wrong_dtype: dict[str, Mismatch] = {}
        self.written = Coverage()
        self.current: str | None = None
        self._allow_cast = allow_cast
        self._tensors = {
            spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta") for spec in specs
        }
        self._sources = {_storage(tensor): name for name, tensor in self._tensors.items()}
        # Which names' data a storage holds or would hold. Its tensors are kept, so that no id is used twice.
        self._taint: dict[int, set[str]] = {storage: {name} for storage, name in self._sources.items()}
        self._kept: list[torch.Tensor] = []
        self._pending: list[tuple[int, FillStep, str | None]] = []
        self._previous: tuple[int, str] | None = None  # storage and name of the copy recorded last

    def feed(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The loader's input."""
        for name in names:
            self.current = name
            yield name, self._tensors[name]

    def forget(self, name: str) -> None:
        """Drop the steps of a name whose loading failed half-way."""
        self.steps.pop(name, None)
        self._previous = None

    def mark_opaque(self, names: Iterable[str], why: str) -> None:
        for name in names:
            self.opaque.setdefault(name, why)

    def read_value(self, tensor: torch.Tensor) -> Any:
        """Stands in for a value that the loader asks for; what it does with it is not replayed."""
        self.refuse("its loader reads values", tensor)
        return 1.0 if tensor.is_floating_point() else 1

    def destinations(self) -> list[tuple[str, list[torch.Tensor]]]:
        """The memory that each name's loading writes."""
        found = [(name, [step.destination for step in steps]) for name, steps in self.steps.items()]
        return [*found, *((name, [fill.destination]) for _, fill, name in self._pending if name is not None)]

    def finish(self) -> None:
        """Settle what was left open; call once, after the loader."""
        for _, fill, name in self._pending:  # fills of memory that no copy goes to
            if name is not None:
                self.steps.setdefault(name, []).append(fill)
        self._pending = []
        for name in self.opaque:
            self.steps.pop(name, None)
            self.wrong_dtype.pop(name, None)

    # -- dispatch -------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is aten._local_scalar_dense.default and self._names(args[0]):
            return self.read_value(args[0])
        written = written_by(func, args, kwargs)
        if any(not tensor.is_meta for tensor in written):
            return self._write(func, args, kwargs, written)
        if func is aten._to_copy.default and args[0].is_meta:
            kwargs["device"] = torch.device("meta")  # moving data to a device changes no value
            kwargs.pop("pin_memory", None)
        out = func(*args, **kwargs)
        inputs = tensors_in((args, kwargs))
        known = {_storage(tensor) for tensor in inputs}
        fresh = [tensor for tensor in tensors_in(out) if _storage(tensor) not in known]
        if not fresh and not written:  # a view; it shares its base's names
            return out
        if fresh and known & self._memory and not takes_shape_only(func):
            self.derives = self.derives or str(func)
        names = self._names(*inputs)
        if not names:
            return out
        if func in (aten._to_copy.default, aten.clone.default) and _same_layout(out, args[0]):
            return args[0]
        if written:
            changed = {self._sources[s] for s in map(_storage, written) if s in self._sources}
            self.mark_opaque(changed, f"its loader changes the tensor by {func}")
        self._spread(names, *fresh, *written)
        return out

    def _write(self, func: Any, args: Any, kwargs: Any, written: list[torch.Tensor]) -> Any:
        """A write to real memory: record it if it can be replayed; never do it."""
        if func is aten.copy_.default:
            self._copy(args[0], args[1])
        elif func is aten._foreach_copy_.default:
            for destination, source in zip(args[0], args[1], strict=True):
                self._copy(destination, source)
        elif func is aten.fill_.Scalar or func is aten.zero_.default:
            self._fill(args[0], args[1] if len(args) > 1 else 0)
        elif any(tensor.numel() for tensor in written):
            self.refuse(f"its loader runs {func} on the model's memory", *tensors_in((args, kwargs)))
            overwritten = overwritten_by(func, args, kwargs)
            self.blind = self.blind or len(overwritten) < len(written)
            for tensor in overwritten:
                self.written.add(tensor)
        returns = func._schema.returns
        if not returns:
            return None
        if len(returns) == 1 and isinstance(returns[0].type, torch.TensorType):
            return written[0]
        return tuple(written)

    def _copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        storage = _storage(source)
        name = self._sources.get(storage)
        if name is None:
            self.refuse("its loader computes what it writes", source, destination=destination)
        else:
            if source.shape != destination.shape:
                if source.numel() != destination.numel() and source.dim() > 0:
                    raise RuntimeError(
                        f"shape {list(source.shape)} does not match the engine's {list(destination.shape)}"
                    )
                source = source.expand(destination.shape)
            if source.dtype != destination.dtype and not self._allow_cast:
                expected, got = str(destination.dtype)[6:], str(source.dtype)[6:]
                self.wrong_dtype[name] = Mismatch("dtype", name, f"{got}; the engine's memory is {expected}")
            self._record_copy(name, destination, source)
        if not destination.is_meta:
            self.written.add(destination)

    def _record_copy(self, name: str, destination: torch.Tensor, source: torch.Tensor) -> None:
        storage = _storage(destination)
        self._spread({name}, destination)
        if destination.numel() == 0:
            return
        steps = self.steps.setdefault(name, [])
        steps += [fill for target, fill, _ in self._pending if target == storage]
        self._pending = [pending for pending in self._pending if pending[0] != storage]
        steps.append(CopyStep(destination, tuple(source.shape), tuple(source.stride()), int(source.storage_offset())))
        self._previous = (storage, name)

    def _fill(self, destination: torch.Tensor, value: Any) -> None:
        """A fill, e.g. of the padding of a vocabulary, belongs to the copy into the same memory beside it."""
        if destination.numel() == 0:
            return
        self.written.add(destination)
        storage = _storage(destination)
        if self._previous is not None and self._previous[0] == storage:
            self.steps[self._previous[1]].append(FillStep(destination, value))
        else:
            self._pending.append((storage, FillStep(destination, value), self.current))

    def refuse(self, why: str, *inputs: torch.Tensor, destination: torch.Tensor | None = None) -> None:
        names = self._names(*inputs) or ({self.current} if self.current is not None else set())
        self.mark_opaque(names, why)
        if destination is not None:
            self._spread(names, destination)

    # -- taint ----------------------------------------------------------------------------------------------

    def _names(self, *tensors: torch.Tensor) -> set[str]:
        names: set[str] = set()
        for tensor in tensors:
            names |= self._taint.get(_storage(tensor), set())
        return names

    def _spread(self, names: set[str], *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            storage = _storage(tensor)
            if storage not in self._taint:
                self._taint[storage] = set()
                self._kept.append(tensor)
            self._taint[storage] |= names


class PythonGuard(TorchFunctionMode):  # type: ignore[misc]
    """Keeps a traced loader from what dispatch does not see: rebinding a parameter's memory, reading values."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and args[0].is_meta:
            return _READS[func](self._tracer.read_value(args[0]))
        if func == _SET_DATA and not args[0].is_meta:
            self._tracer.refuse("its loader replaces a parameter's memory", *tensors_in(args[1:]))
            return None
        return func(*args, **(kwargs or {}))


_SET_DATA = torch.Tensor.data.__set__
_READS: dict[Any, Any] = {
    torch.Tensor.item: lambda value: value,
    torch.Tensor.__float__: float,
    torch.Tensor.__int__: int,
    torch.Tensor.__bool__: bool,
}


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def takes_shape_only(func: Any) -> bool:
    """Whether an operator reads no values: it makes memory like a tensor's."""
    name = func._schema.name.partition("::")[2]
    return bool(name.startswith("new_") or name.endswith("_like"))


def _same_layout(left: torch.Tensor, right: torch.Tensor) -> bool:
    return bool(left.dtype == right.dtype and left.stride() == right.stride() and left.shape == right.shape)
