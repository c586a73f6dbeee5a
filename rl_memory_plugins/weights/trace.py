"""Tracing of a model's loader. The trace writes no real memory.

The loader runs on meta tensors under a dispatch mode, which records copies from views of these tensors into real memory
and executes no write to real memory. A name is *opaque* if its loading does anything else than such copies and fills:
then only the loader can load it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rl_memory_plugins.weights.casts import CastRule
from rl_memory_plugins.weights.coverage import Coverage
from rl_memory_plugins.weights.manifest import Mismatch, TensorSpec
from rl_memory_plugins.weights.rearranged import Elements, Rearranged
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
    """Records how a loader copies the tensors of `specs` into real memory.

    Args:
        specs: The tensors of the manifest.
        memory: The model's parameters.
        buffers: Its buffers. What the loader computes of them counts only if it has written them.
        casts: Which copies may cast.

    Attributes:
        steps: For each name that is not opaque, its copies and fills in order.
        opaque: For each name that only the loader can load, the reason.
        wrong_dtype: Names whose copy would make a cast that `casts` does not allow.
        casts: For each name whose copy makes an allowed cast, the dtype of the tensor and that of the memory.
        written: The real memory that the loader would overwrite.
        destinations: The same memory as tensors.
        unseen_writes: The loader would write more memory: it needs values, which the trace does not have.
        perhaps_written: The storages of which an operator would write some elements; the trace cannot tell which.
        derives: An operator that computes new tensors from `memory` or `buffers`, which a replay would not run; else
            empty.
        current: The name that the loader read last.
    """

    def __init__(
        self,
        specs: Iterable[TensorSpec],
        memory: Iterable[torch.Tensor] = (),
        *,
        buffers: Iterable[torch.Tensor] = (),
        casts: CastRule | None = None,
    ) -> None:
        super().__init__()
        self._memory = {_storage(tensor) for tensor in memory}
        self._buffers = {_storage(tensor) for tensor in buffers} - self._memory
        self.derives = ""
        self._derived_from: set[int] = set()  # the storages of `memory` that such operators read
        self.unseen_writes = False
        self.perhaps_written: set[int] = set()
        self.steps: dict[str, list[Step]] = {}
        self.opaque: dict[str, str] = {}
        self.wrong_dtype: dict[str, Mismatch] = {}
        self.written = Coverage()
        self.destinations: list[torch.Tensor] = []
        self.current: str | None = None
        self.casts: dict[str, tuple[str, str]] = {}
        self._rule = casts or CastRule()
        self._specs = {spec.name: spec for spec in specs}
        self._tensors = {
            name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
            for name, spec in self._specs.items()
        }
        self._sources = {_storage(tensor): name for name, tensor in self._tensors.items()}
        # By storage, the names whose data it holds or would hold. `_tainted` keeps the tensors, so no id is reused.
        self._taint: dict[int, set[str]] = {storage: {name} for storage, name in self._sources.items()}
        self._tainted: list[torch.Tensor] = []
        self._rearranged: dict[int, Rearranged] = {}  # by storage
        self._pending: list[tuple[int, FillStep, str]] = []
        self._first_fills: dict[Any, FillStep] = {}  # before it reads a name, by the memory; it may be called again
        self._before_names = ""  # why only the loader can do what it does before it reads a name
        self._previous: tuple[int, str] | None = None  # storage and name of the copy recorded last

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's own guard against compilers, around each operator, takes a tenth of a trace

    def feed(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The loader's input: names and meta tensors."""
        for name in names:
            self.current = name
            yield name, self._tensors[name]

    def forget(self, name: str) -> None:
        """Drop the steps of a name whose loading failed in the middle."""
        self.steps.pop(name, None)
        self._previous = None

    def mark_opaque(self, names: Iterable[str], why: str) -> None:
        for name in names:
            self.opaque.setdefault(name, why)

    def read_value(self, tensor: torch.Tensor) -> Any:
        """A placeholder for a value that the loader reads. The names of the tensor become opaque."""
        self.refuse("the loader reads its values", tensor)
        return 1.0 if tensor.is_floating_point() else 1

    def derives_from(self, tensor: torch.Tensor) -> bool:
        """Whether the loader computes other tensors from this tensor of the model."""
        return _storage(tensor) in self._derived_from

    def may_have_written(self, tensor: torch.Tensor) -> bool:
        """Whether the loader would perhaps write a tensor of which `written` has not all."""
        return self.unseen_writes or _storage(tensor) in self.perhaps_written

    def finish(self, owned: Callable[[torch.Tensor], bool] | None) -> None:
        """Assign the remaining fills and drop the steps of opaque names. Call this once, after the loader.

        Args:
            owned: Whether a written tensor is one of the model's. A name that writes others becomes opaque: nobody
                would notice if the model replaced them.
        """
        for _, fill, name in self._pending:  # fills of memory without a copy
            self.steps.setdefault(name, []).append(fill)
        self._pending = []
        if owned is not None:
            outside = "the loader writes memory outside the model's parameters and buffers"
            for name, steps in self.steps.items():
                if not all(owned(step.destination) for step in steps):
                    self.mark_opaque([name], outside)
            if not all(owned(fill.destination) for fill in self._first_fills.values()):
                self._before_names = self._before_names or outside
        if self._before_names:
            self.mark_opaque([*self.steps], self._before_names)
        first = next((name for name in self._specs if name in self.steps), None)
        if first is not None and not self.opaque:  # else the loader runs, and makes them itself
            self.steps[first][:0] = self._first_fills.values()
        for name in self.opaque:
            self.steps.pop(name, None)
            self.wrong_dtype.pop(name, None)
            self.casts.pop(name, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _may_view(func):
            out = func(*args, **(kwargs or {}))
            one = out if isinstance(out, torch.Tensor) else out[0] if out else args[0]  # all are of the same argument
            if _storage(one) == _storage(args[0]):  # a view shares the names of its base
                return out
            return self._note(func, args, kwargs or {}, [], out)
        if func is aten.copy_.default and not args[0].is_meta:
            self._copy(args[0], args[1])
            return args[0]
        kwargs = dict(kwargs or {})
        if func is aten._local_scalar_dense.default and self._names(args[0]):
            return self.read_value(args[0])
        written = written_by(func, args, kwargs)
        if any(not tensor.is_meta for tensor in written):
            return self._write(func, args, kwargs, written)
        if func is aten._to_copy.default and args[0].is_meta:
            kwargs["device"] = torch.device("meta")  # a move between devices changes no value
            kwargs.pop("pin_memory", None)
        return self._note(func, args, kwargs, written, func(*args, **kwargs))

    def _note(self, func: Any, args: Any, kwargs: Any, written: list[torch.Tensor], out: Any) -> Any:
        """Follow the names through an operator that has run, and return what the loader gets."""
        inputs = tensors_in((args, *kwargs.values()))
        known = {_storage(tensor) for tensor in inputs}
        fresh = [tensor for tensor in tensors_in(out) if _storage(tensor) not in known]
        if not fresh and not written:
            return out
        if fresh and known & self._memory and not takes_shape_only(func):
            self.derives = self.derives or str(func)
            self._derived_from |= known & self._memory
        names = self._names(*inputs)
        if not names:
            return out
        if func in (aten._to_copy.default, aten.clone.default) and _same_layout(out, args[0]):
            return args[0]
        if func in (aten._to_copy.default, aten.clone.default) and out.dtype == args[0].dtype:
            elements = self._elements(args[0])
            if elements is not None:
                self._rearranged[_storage(out)] = Rearranged(elements, tuple(out.shape), tuple(out.stride()))
        for tensor in written:
            self._rearranged.pop(_storage(tensor), None)
        if written:
            changed = {self._sources[s] for s in map(_storage, written) if s in self._sources}
            self.mark_opaque(changed, f"the loader modifies the tensor with {func}")
        self._spread(names, *fresh, *written)
        return out

    def _write(self, func: Any, args: Any, kwargs: Any, written: list[torch.Tensor]) -> Any:
        """Record a write to real memory if a plan can replay it. Never execute it."""
        if func is aten._foreach_copy_.default:
            for destination, source in zip(args[0], args[1], strict=True):
                self._copy(destination, source)
        elif func is aten.fill_.Scalar or func is aten.zero_.default:
            self._fill(args[0], args[1] if len(args) > 1 else 0)
        elif any(tensor.numel() for tensor in written):
            self.refuse(f"the loader runs {func} on the model's memory", *tensors_in((args, kwargs)))
            overwritten = overwritten_by(func, args, kwargs)
            if len(overwritten) < len(written):
                self.perhaps_written |= {_storage(tensor) for tensor in written}
            for tensor in overwritten:
                self.overwrite(tensor)
        returns = func._schema.returns
        if not returns:
            return None
        if len(returns) == 1 and isinstance(returns[0].type, torch.TensorType):
            return written[0]
        return tuple(written)

    def _copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        elements = self._elements(source)
        if elements is None:
            self.refuse("the loader computes the values that it writes", source, destination=destination)
        else:
            name = elements.name
            if source.shape != destination.shape:
                if source.numel() != destination.numel() and source.dim() > 0:
                    raise RuntimeError(
                        f"shape {list(source.shape)} does not match the engine's {list(destination.shape)}"
                    )
                source = source.expand(destination.shape)
            if source.dtype != destination.dtype:
                self._cast(self._specs[name], str(destination.dtype)[6:])
            self._spread({name}, destination)
            if destination.numel():
                target = _storage(destination)
                steps = self.steps.setdefault(name, [])
                steps += [fill for storage, fill, _ in self._pending if storage == target]
                self._pending = [pending for pending in self._pending if pending[0] != target]
                _, stride, offset = self._elements(source) or elements
                steps.append(CopyStep(destination, tuple(source.shape), stride, offset))
                self._previous = (target, name)
        if not destination.is_meta:
            self.overwrite(destination)

    def overwrite(self, destination: torch.Tensor) -> None:
        """Note that the loader would overwrite a tensor in real memory."""
        self.written.add(destination)
        self.destinations.append(destination)
        if _storage(destination) in self._buffers:
            self._memory.add(_storage(destination))

    def _cast(self, spec: TensorSpec, held: str) -> None:
        if self._rule.allows(spec, held):
            self.casts[spec.name] = (spec.dtype, held)
        else:
            text = f"the trainer sends {spec.dtype}, the engine has {held}: send it, or choose a dtype (`dtype=`)"
            self.wrong_dtype[spec.name] = Mismatch("dtype", spec.name, text, expected=held)

    def _elements(self, tensor: torch.Tensor) -> Elements | None:
        """The elements of a manifest's tensor that a tensor holds; `None` if it holds others, or their bits."""
        storage = _storage(tensor)
        if storage in self._rearranged:
            elements = self._rearranged[storage].elements_of(tensor)
        else:
            name = self._sources.get(storage)
            elements = None if name is None else Elements(name, tuple(tensor.stride()), int(tensor.storage_offset()))
        # A copy of bits that are read as another dtype (`view(dtype)`) would be replayed as a cast of values.
        return elements if elements is not None and tensor.dtype == self._tensors[elements.name].dtype else None

    def _fill(self, destination: torch.Tensor, value: Any) -> None:
        """Record a fill (e.g. of vocabulary padding) with the name whose copy writes the same storage."""
        if destination.numel() == 0:
            return
        self.overwrite(destination)
        storage = _storage(destination)
        if self.current is None:
            place = (storage, destination.storage_offset(), destination.shape, destination.stride())
            self._first_fills.pop(place, None)  # the last one counts, and comes behind the others
            self._first_fills[place] = FillStep(destination, value)
            return
        if self._previous is not None and self._previous[0] == storage:
            self.steps[self._previous[1]].append(FillStep(destination, value))
        else:
            self._pending.append((storage, FillStep(destination, value), self.current))

    def refuse(self, why: str, *inputs: torch.Tensor, destination: torch.Tensor | None = None) -> None:
        names = self._names(*inputs) or ({self.current} if self.current is not None else set())
        self._before_names = self._before_names or ("" if names else why)
        self.mark_opaque(names, why)
        if destination is not None:
            self._spread(names, destination)

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
                self._tainted.append(tensor)
            self._taint[storage] |= names


class PythonGuard(TorchFunctionMode):  # type: ignore[misc]
    """Handles operations that bypass dispatch: a loader that replaces a parameter's `data` or reads values."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _GUARDED:  # nearly all, such as each look at a shape
            return func(*args, **kwargs) if kwargs else func(*args)
        if func in _READS and args[0].is_meta:
            return _READS[func](self._tracer.read_value(args[0]))
        if func == _SET_DATA and not args[0].is_meta:
            self._tracer.refuse("the loader replaces the memory of a parameter", *tensors_in(args[1:]))
            self._tracer.overwrite(args[0])
            return None
        return func(*args, **(kwargs or {}))


_SET_DATA = torch.Tensor.data.__set__
_READS: dict[Any, Any] = {
    torch.Tensor.item: lambda value: value,
    torch.Tensor.__float__: float,
    torch.Tensor.__int__: int,
    torch.Tensor.__bool__: bool,
}
_GUARDED = {_SET_DATA, *_READS}


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@functools.cache
def _may_view(func: Any) -> bool:
    """Whether an operator writes nothing and, by its schema, returns a view of its first argument, or a list of views.
    Some copy nevertheless."""
    schema = func._schema
    if schema.is_mutable or len(schema.returns) != 1 or schema.returns[0].alias_info is None:
        return False
    return bool(schema.arguments) and isinstance(schema.arguments[0].type, torch.TensorType)


def takes_shape_only(func: Any) -> bool:
    """Whether an operator reads the shape of its input and no values, like `new_empty` and `zeros_like`."""
    name = func._schema.name.partition("::")[2]
    return bool(name.startswith("new_") or name.endswith("_like"))


def _same_layout(left: torch.Tensor, right: torch.Tensor) -> bool:
    return bool(left.dtype == right.dtype and left.stride() == right.stride() and left.shape == right.shape)
