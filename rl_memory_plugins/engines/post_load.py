"""What an engine does to a model's weights after it has loaded them: quantising, packing, absorbing.

A layer that was transformed so does not hold what a checkpoint holds, and a copy into it would be garbage. Which
layers are transformed is not looked up in a list of methods, it is seen: while a post-load step runs, every
operator that makes something of the layer's parameters is noted, and whether the parameters are others afterwards.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rl_memory_plugins.errors import WeightUpdateError
from rl_memory_plugins.weights.trace import takes_shape_only
from rl_memory_plugins.weights.write_recorder import tensors_in, written_by

STEP = "process_weights_after_loading"
"""What both engines call the step, of a layer or of its `quant_method`."""

NEW_LAYOUT = "other parameters"
"""Noted beside the operators where the step left other tensors than it found."""

_ATTRIBUTE = "_rl_memory_post_load"


class PostLoad:
    """The post-load steps of one model, from its first load on.

    Attributes:
        model: Its layers are watched; `watch` must be called before its weights are loaded.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self._first: dict[tuple[torch.nn.Module, bool], set[str]] = {}  # what each step did at the first load
        self._now = self._first
        self._derived: dict[torch.nn.Module, list[StorageWeakRef]] = {}
        self._keeping: set[torch.nn.Module] = set()

    def watch(self) -> None:
        """Wrap the steps of all layers, where that is not done yet: engines exchange quantisation methods."""
        for layer in self.model.modules():
            for owner in (layer, getattr(layer, "quant_method", None)):
                step = getattr(owner, STEP, None)
                if step is not None and not hasattr(step, _ATTRIBUTE):
                    setattr(owner, STEP, self._watched(step, layer if owner is layer else None))

    def transformed(self) -> dict[str, str]:
        """The layers whose steps transformed weights at the first load, and what for: their quantisation methods."""
        names = self._names()
        return {names.get(layer, type(layer).__name__): _method_of(layer) for layer, _ in self._first}

    def hidden(self) -> dict[str, str]:
        """Those of them that keep something made of weights where nothing can exchange it: in no module's tensors."""
        held = {
            StorageWeakRef(tensor.untyped_storage())
            for layer in self.model.modules()
            for tensor in tensors_of(layer).values()
        }
        names = self._names()
        return {
            names.get(layer, type(layer).__name__): _method_of(layer)
            for layer, storages in self._derived.items()
            if any(not storage.expired() and storage not in held for storage in storages)
        }

    def kept_elsewhere(self) -> dict[str, str]:
        """Those whose kernels hold weights in memory of their own, which nothing can release or compare."""
        names = self._names()
        return {names.get(layer, type(layer).__name__): _method_of(layer) for layer in self._keeping}

    def _names(self) -> dict[torch.nn.Module, str]:
        return {layer: name for name, layer in self.model.named_modules()}

    @contextmanager
    def repeating(self, *, partial: bool) -> Iterator[None]:
        """The body loads weights again. Each step must do what it did at the first load.

        Engines skip steps that have run already; what then lies in the layer is not what its kernel expects.

        Raises:
            WeightUpdateError: a step did less, or did not run. That is right where `partial` leaves a layer out, and
                for a `quant_method` of attention: its scales stay unless new ones come.
        """
        self.watch()
        self._now = {}
        try:
            yield
            for (layer, own), first in self._first.items():
                now = self._now.get((layer, own))
                if own:  # it finds the layer as it left it, and may write in place
                    first = first - {NEW_LAYOUT}
                optional = partial or (hasattr(type(layer), STEP) and not own)
                if (now is None and optional) or (now is not None and first <= now):
                    continue
                name, skipped = self._names().get(layer, ""), sorted(first - (now or set()))
                raise WeightUpdateError(
                    f"the engine's reload left {name} without its post-load processing by "
                    f"{_method_of(layer)}: {', '.join(skipped)}",
                    layer=name,
                    quant_method=_method_of(layer),
                    skipped=skipped,
                )
        finally:
            self._now = self._first

    def _watched(self, step: Callable[..., Any], owner: torch.nn.Module | None) -> Callable[..., Any]:
        """The step of a layer, or without `owner` of a method, which may be a module too and is given the layer."""

        @functools.wraps(step)
        def watched(*args: Any, **kwargs: Any) -> Any:
            layer: torch.nn.Module = next(iter((*args, *kwargs.values()))) if owner is None else owner
            before = _layout(layer)
            reads = _Derivations(layer.parameters())
            with reads:
                result = step(*args, **kwargs)
            found = reads.operators | ({NEW_LAYOUT} if _layout(layer) != before else set())
            if reads.keeping:
                self._keeping.add(layer)
            if found or self._now is not self._first:  # of a second load, that it ran at all counts
                self._now.setdefault((layer, owner is not None), set()).update(found)
            if found and self._now is self._first:  # graphs are captured after the first load
                kept = [*self._derived.get(layer, ()), *reads.storages]
                self._derived[layer] = [storage for storage in kept if not storage.expired()]
            return result

        setattr(watched, _ATTRIBUTE, self)
        return watched


def attach(model: torch.nn.Module) -> None:
    """Watch a model that has just been made."""
    post_load = PostLoad(model)
    post_load.watch()
    setattr(model, _ATTRIBUTE, post_load)


def of(model: torch.nn.Module) -> PostLoad | None:
    """A model's watch, if it had one from the start."""
    return getattr(model, _ATTRIBUTE, None)


def transformed_in(model: torch.nn.Module) -> int:
    """How many of a model's post-load steps were seen to transform weights; 0 where nobody watches them."""
    watch = of(model)
    return 0 if watch is None else len(watch._first)


def tensors_of(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A layer's own tensors: parameters, buffers and plain attributes."""
    own: Mapping[str, Any] = {**vars(layer), **layer._buffers, **layer._parameters}
    return {name: value for name, value in own.items() if isinstance(value, torch.Tensor)}


class _Derivations:
    """What happens to weights while it is entered.

    Attributes:
        operators: Those that made something of weights, or changed them.
        keeping: Those among them that gave nothing back, so that what they made is where nobody can see it.
        storages: The memory of what was made.
    """

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        self.operators: set[str] = set()
        self.keeping: set[str] = set()
        self.storages: list[StorageWeakRef] = []
        self._of_weights = {StorageWeakRef(weight.untyped_storage()) for weight in weights if not _is_lazy(weight)}
        self._modes = contextlib.ExitStack()

    def __enter__(self) -> _Derivations:
        self._modes.enter_context(_Calls(self))
        self._modes.enter_context(_Dispatched(self))
        return self

    def __exit__(self, *error: Any) -> None:
        self._modes.close()

    def note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        inputs = {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors_in((args, kwargs))}
        if inputs.isdisjoint(self._of_weights) or takes_shape_only(func) or _is_copy_of_itself(func, args):
            return
        made = {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors_in(out)} - inputs
        written = {StorageWeakRef(tensor.untyped_storage()) for tensor in written_by(func, args, kwargs)}
        gave_nothing = not tensors_in(out) and not written
        if made or written or gave_nothing:
            self.operators.add(str(func))
            self.storages += (made | written) - self._of_weights
            self._of_weights |= made | written
        if gave_nothing and func.namespace != "aten":
            self.keeping.add(str(func))


class _Dispatched(TorchDispatchMode):  # type: ignore[misc]
    """Every operator that goes through the dispatcher."""

    def __init__(self, derivations: _Derivations) -> None:
        super().__init__()
        self._derivations = derivations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._derivations.note(func, args, kwargs or {}, out)
        return out


class _Calls(TorchFunctionMode):  # type: ignore[misc]
    """Calls of engines' own operators: those that are registered for all devices at once bypass dispatch modes."""

    def __init__(self, derivations: _Derivations) -> None:
        super().__init__()
        self._derivations = derivations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(func, torch._ops.OpOverloadPacket):
            func = getattr(func, func.overloads()[0])
        if isinstance(func, torch._ops.OpOverload) and func.namespace != "aten":
            self._derivations.note(func, args, kwargs or {}, out)
        return out


def _is_copy_of_itself(func: Any, args: Any) -> bool:
    return (
        func is torch.ops.aten.copy_.default
        and isinstance(args[1], torch.Tensor)  # torch takes a number too
        and args[0].data_ptr() == args[1].data_ptr()
        and args[0].stride() == args[1].stride()
    )


def _layout(layer: torch.nn.Module) -> dict[str, tuple[Any, ...]]:
    return {
        name: (weight.data_ptr(), tuple(weight.shape), tuple(weight.stride()), weight.dtype)
        for name, weight in layer._parameters.items()
        if weight is not None and not _is_lazy(weight)
    }


def _is_lazy(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin)


def _method_of(layer: torch.nn.Module) -> str:
    method = getattr(layer, "quant_method", None)
    scheme = getattr(layer, "scheme", None)
    return type(scheme or method or layer).__name__
