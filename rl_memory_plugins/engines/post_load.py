"""The post-load steps of an engine, which transform weights after loading (quantise, pack, absorb).

A transformed layer does not hold the checkpoint's tensors: a copy of a checkpoint's tensor into it would corrupt it.
This module detects transformed layers by observation, not by a list of methods. While a post-load step runs, it records
the operators that derive tensors from the layer's parameters, and whether the step replaces the parameters.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rl_memory_plugins.engines.layer_templates import LayerTemplate
from rl_memory_plugins.engines.layer_tensors import STEP, held_by_methods, tensors_of
from rl_memory_plugins.engines.saved_layers import Graphs
from rl_memory_plugins.errors import UnsupportedError, WeightUpdateError
from rl_memory_plugins.weights.trace import takes_shape_only
from rl_memory_plugins.weights.write_recorder import tensors_in, written_by

NEW_LAYOUT = "other parameters"
"""Recorded among the operators if the step has replaced parameters of the layer."""

TRUSTED_AFTER = 2
"""Loads in which a step has repeated its operators, before it is believed to. A step that the engine skips once it has
run leaves other operators in the second load, if not in the first; later loads find the layer as the second did.
Observation costs more than many steps, and under it `torch.compile`d steps run operator by operator."""

_ATTRIBUTE = "_rl_memory_post_load"

_CACHE_SCALE = re.compile("_?[kv]_scale")  # of both engines, with and without `_float` at the end


class PostLoad:
    """Observes the post-load steps of one model.

    Attributes:
        model: The model. Call `watch` before its weights are loaded.
        graphs: What CUDA graphs read and the model's layers no longer hold.
        templates: The layouts of layers before their weights were loaded; empty without `keep_templates`.
        dummy: Whether the first weights are random numbers.
        default_scales: The names of the layers that `give_default_scales` has changed.
        reload: See `layer_reload.made_once`.
        reload_holds_layers: Whether that reload had a plan for which it holds temporary memory of several layers.
    """

    def __init__(self, model: torch.nn.Module, *, dummy: bool = False) -> None:
        self.model = model
        self.dummy = dummy
        # The operators of a load, by layer and whether the step is the layer's own.
        self._first_load: dict[tuple[torch.nn.Module, bool], set[str]] = {}
        self._this_load = self._first_load
        self._repeats: Counter[tuple[torch.nn.Module, bool]] = Counter()
        self._derived: dict[torch.nn.Module, list[StorageWeakRef]] = {}
        self._keeping: set[torch.nn.Module] = set()
        self.graphs = Graphs(self._is_derived)
        self.templates: dict[torch.nn.Module, LayerTemplate] = {}
        self.default_scales: list[str] = []
        self.reload: object = None
        self.reload_holds_layers = False

    def watch(self) -> None:
        """Wrap the steps that are not wrapped yet. Engines replace quantisation methods between loads."""
        for layer in self.model.modules():
            for owner in (layer, getattr(layer, "quant_method", None)):
                step = getattr(owner, STEP, None)
                if step is not None and not hasattr(step, _ATTRIBUTE):
                    setattr(owner, STEP, self._watched(step, layer if owner is layer else None))
                    self._repeats.clear()  # this one has repeated nothing yet

    def unfilled(self) -> list[str]:
        """The parameters of layers with templates that the first load left as they were: no checkpoint has them."""
        names = {layer: name for name, layer in self.model.named_modules()}
        return [f"{names[layer]}.{key}" for layer, one in self.templates.items() for key in one.optional]

    def keep_templates(self) -> None:
        """Record the layouts of the layers that have a step, for a reload. Call this before weights are loaded."""
        holders: dict[int, set[torch.nn.Module]] = {}
        for layer in self.model.modules():
            for parameter in layer._parameters.values():
                holders.setdefault(id(parameter), set()).add(layer)
        for layer in self.model.modules():
            if hasattr(getattr(layer, "quant_method", None), STEP):
                beside = {
                    name: holders[id(one)] - {layer}
                    for name, one in layer._parameters.items()
                    if one is not None and len(holders[id(one)]) > 1
                }
                self.templates[layer] = LayerTemplate(layer, beside, dummy=self.dummy)

    def give_default_scales(self) -> None:
        """Give the scales of an FP8 KV cache, into which a start wrote random numbers, the engine's own values again.

        An engine whose checkpoint has no scales has these. Updates need not bring scales, so random ones would stay.
        """
        for name, layer in self.model.named_modules():
            template = self.templates.get(layer)
            if template is not None and template.has_kv_scales:
                template.give_first_values()
                self.default_scales.append(name)

    def transformed(self) -> dict[str, str]:
        """The layers whose weights were transformed at the first load, with their quantisation methods."""
        return self._described(layer for layer, _ in self._first_load)

    def own_steps(self) -> dict[str, str]:
        """The layers that were transformed by a step of their own, not by that of a quantisation method."""
        return self._described(layer for layer, own in self._first_load if own)

    def hidden(self) -> dict[str, str]:
        """The transformed layers that keep derived tensors where a reload cannot replace them: outside all modules, and
        outside the objects of their quantisation methods."""
        held = {
            StorageWeakRef(tensor.untyped_storage())
            for layer in self.model.modules()
            for tensor in (*tensors_of(layer).values(), *(one.tensor for one in held_by_methods(layer).values()))
        }
        return self._described(
            layer
            for layer, storages in self._derived.items()
            if any(not storage.expired() and storage not in held for storage in storages)
        )

    def kept_elsewhere(self) -> dict[str, str]:
        """The layers whose kernels keep weights in memory of their own, which cannot be released or compared."""
        return self._described(self._keeping)

    def _is_derived(self, layer: torch.nn.Module, tensor: torch.Tensor) -> bool:
        """Whether a step has computed a tensor from the layer's weights."""
        return StorageWeakRef(tensor.untyped_storage()) in self._derived.get(layer, ())

    def _described(self, layers: Iterable[torch.nn.Module]) -> dict[str, str]:
        """The names of layers, with their quantisation methods."""
        names = {layer: name for name, layer in self.model.named_modules()}
        return {names.get(layer, type(layer).__name__): method_of(layer) for layer in layers}

    @contextmanager
    def repeating(self, *, partial: bool) -> Iterator[None]:
        """The body loads weights again. Each step must repeat the operators of the first load.

        Engines may skip a step that has run before. The layer then holds weights in a form that its kernel cannot read.
        A step that has repeated its operators `TRUSTED_AFTER` times is no longer observed, until a load fails.

        Args:
            partial: The update may omit layers. Their steps need not run.

        Raises:
            WeightUpdateError: a step ran fewer operators, or did not run. A step of attention's `quant_method` need not
                run: the scales stay unless the update has new ones.
        """
        self.watch()
        self._this_load = {}
        try:
            yield
            for (layer, own), first in self._first_load.items():
                now = self._this_load.get((layer, own))
                if own:  # a layer's own step finds the layout of its last run, and may write in place
                    first = first - {NEW_LAYOUT}
                optional = partial or (hasattr(type(layer), STEP) and not own)
                if (now is None and optional) or (now is not None and first <= now):
                    continue
                name, method = next(iter(self._described([layer]).items()))
                skipped = sorted(first - (now or set()))
                raise WeightUpdateError(
                    f"the engine's reload left {name} without its post-load processing by {method}: "
                    f"{', '.join(skipped)}",
                    layer=name,
                    quant_method=method,
                    skipped=skipped,
                )
            self._repeats.update(self._this_load.keys())
        except BaseException:
            self._repeats.clear()
            raise
        finally:
            self._this_load = self._first_load

    @contextmanager
    def outside_loads(self) -> Iterator[None]:
        """Steps that run in the body belong to no load."""
        self._this_load = {}
        try:
            yield
        finally:
            self._this_load = self._first_load

    def _watched(self, step: Callable[..., Any], owner: torch.nn.Module | None) -> Callable[..., Any]:
        """Wrap a step of the layer `owner`; or, without `owner`, of a method whose first argument is the layer."""

        @functools.wraps(step)
        def watched(*args: Any, **kwargs: Any) -> Any:
            layer: torch.nn.Module = next(iter((*args, *kwargs.values()))) if owner is None else owner
            step_of = (layer, owner is not None)
            if self._this_load is not self._first_load and self._repeats[step_of] >= TRUSTED_AFTER:
                self._this_load[step_of] = set(self._first_load.get(step_of, ()))
                return step(*args, **kwargs)
            template = self.templates.get(layer) if self._this_load is self._first_load else None
            with template.first_step() if template is not None else nullcontext():
                before, here = _layout(layer), {_moved_to(one.device) for one in layer.parameters()}
                reads = _Derivations(layer.parameters())
                with reads, _Calls(reads):
                    result = step(*args, **kwargs)
            found = reads.operators | ({NEW_LAYOUT} if _layout(layer) != before else set())
            if reads.keeping:
                self._keeping.add(layer)
            if self._this_load is not self._first_load:
                found |= here
            if found or self._this_load is not self._first_load:  # at a later load, also record that the step ran
                self._this_load.setdefault(step_of, set()).update(found)
            if found and self._this_load is self._first_load:  # graphs are captured after the first load
                kept = [*self._derived.get(layer, ()), *reads.storages]
                self._derived[layer] = [storage for storage in kept if not storage.expired()]
            return result

        setattr(watched, _ATTRIBUTE, self)
        return watched


def attach(model: torch.nn.Module, *, templates: bool = False, dummy: bool = False) -> None:
    """Watch a new model. Call this before its weights are loaded.

    Args:
        templates: Record the layouts of its layers; see `PostLoad.keep_templates`.
        dummy: The first weights are random numbers; see `LayerTemplate`.
    """
    post_load = PostLoad(model, dummy=dummy)
    if templates:
        post_load.keep_templates()
    post_load.watch()
    setattr(model, _ATTRIBUTE, post_load)


def of(model: torch.nn.Module) -> PostLoad | None:
    """The `PostLoad` of a model; `None` if the model is not watched."""
    return getattr(model, _ATTRIBUTE, None)


def cache_scales(model: torch.nn.Module) -> dict[str, object]:
    """The scales by which attention writes and reads keys and values of an FP8 KV cache, by name; empty without any."""
    found: dict[str, object] = {name: tensor.tolist() for name, tensor in cache_scale_tensors(model).items()}
    for name, layer in _scaled(model):
        held = vars(layer).items()
        found |= {f"{name}.{key}": one for key, one in held if isinstance(one, float) and _CACHE_SCALE.match(key)}
    return found


def cache_scale_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Those of them that are tensors, by name."""
    return {
        f"{name}.{key}": tensor
        for name, layer in _scaled(model)
        for key, tensor in tensors_of(layer).items()
        if _CACHE_SCALE.match(key) and not tensor.is_meta
    }


@contextmanager
def restoring_cache_scales(model: torch.nn.Module) -> Iterator[None]:
    """If the body fails, these tensors have their former numbers again. Post-load steps write them in place."""
    scales = [(tensor, tensor.clone()) for tensor in cache_scale_tensors(model).values()]
    try:
        yield
    except BaseException:
        for tensor, former in scales:
            tensor.copy_(former)
        raise


def _scaled(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    watch = of(model)
    layers = {layer for layer, one in watch.templates.items() if one.has_kv_scales} if watch is not None else set()
    if layers:
        yield from ((name, layer) for name, layer in model.named_modules() if layer in layers)


def has_dummy_weights(model: torch.nn.Module) -> bool:
    """Whether a watched model was started with random numbers for weights."""
    watch = of(model)
    return watch is not None and watch.dummy


def transformed_in(model: torch.nn.Module) -> int:
    """The number of a model's post-load steps that have transformed weights; 0 if the model is not watched."""
    watch = of(model)
    return 0 if watch is None else len(watch._first_load)


class _Derivations(TorchDispatchMode):  # type: ignore[misc]
    """Records how operators use weights. Operators that bypass dispatch modes need `_Calls` too.

    Attributes:
        operators: The operators that derived tensors from weights, or wrote weights.
        keeping: The operators among them without a result: they keep derived tensors where nothing can find them.
        storages: The memory of derived tensors.
    """

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.operators: set[str] = set()
        self.keeping: set[str] = set()
        self.storages: list[StorageWeakRef] = []
        self._of_weights = {StorageWeakRef(weight.untyped_storage()) for weight in weights if not _is_lazy(weight)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.note(func, args, kwargs or {}, out)
        return out

    def note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        inputs = {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors_in((args, kwargs))}
        if inputs.isdisjoint(self._of_weights) or takes_shape_only(func) or _is_copy_of_itself(func, args):
            return
        made = {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors_in(out)} - inputs
        written = {StorageWeakRef(tensor.untyped_storage()) for tensor in written_by(func, args, kwargs)}
        gave_nothing = not tensors_in(out) and not written
        if made or written or gave_nothing:
            self.operators.add(_moved_to(out.device) if _only_moves(func, args, out) else str(func))
            self.storages += (made | written) - self._of_weights
            self._of_weights |= made | written
        if gave_nothing and func.namespace != "aten":
            self.keeping.add(str(func))


class _Calls(TorchFunctionMode):  # type: ignore[misc]
    """Records engines' own operators. Those that are registered for all devices at once bypass dispatch modes."""

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
        and isinstance(args[1], torch.Tensor)  # `copy_` takes a number too
        and args[0].data_ptr() == args[1].data_ptr()
        and args[0].stride() == args[1].stride()
    )


def _moved_to(device: torch.device) -> str:
    """Recorded in place of the operator if a step has copied weights to another device, and for weights that a reload
    has made there: vLLM makes the scales of an FP8 KV cache on the CPU then."""
    return f"a copy on {device}"


def _only_moves(func: Any, args: Any, out: Any) -> bool:
    return (
        func is torch.ops.aten._to_copy.default
        and out.device != args[0].device
        and (out.dtype, out.stride()) == (args[0].dtype, args[0].stride())
    )


def _layout(layer: torch.nn.Module) -> dict[str, tuple[Any, ...]]:
    return {
        name: (weight.data_ptr(), tuple(weight.shape), tuple(weight.stride()), weight.dtype)
        for name, weight in layer._parameters.items()
        if weight is not None and not _is_lazy(weight)
    }


def refuse_untried(model: torch.nn.Module, layers: Mapping[str, str]) -> None:
    """Refuse layers in formats whose kernels need a Blackwell GPU (NVFP4, MXFP8), where no update has been tried.

    Args:
        layers: The names of the transformed layers, with their quantisation methods.

    Raises:
        UnsupportedError: a layer has such a format.
    """
    modules = dict(model.named_modules())
    found = {}
    for name, method in layers.items():
        lower = method.lower().replace("mxfp4", "")
        mxfp8 = getattr(getattr(modules.get(name), "quant_method", None), "use_mxfp8", False)
        if "fp4" in lower or "mxfp8" in lower or mxfp8 is True:
            found[name] = method
    if found:
        raise unsupported(found, "their format (NVFP4, MXFP8) needs a Blackwell GPU, where no update has been tried")


def unsupported(layers: Mapping[str, str], why: str) -> UnsupportedError:
    """The error for layers that cannot be updated.

    Args:
        layers: The names of the layers, with their quantisation methods; not empty.
    """
    name, method = next(iter(layers.items()))
    return UnsupportedError(
        f"the weights of {len(layers)} layers, such as {name} by {method}, cannot be updated: {why}",
        layers=dict(list(layers.items())[:20]),
    )


def _is_lazy(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin)


def method_of(layer: torch.nn.Module) -> str:
    """The name of a layer's quantisation method; else of its class."""
    method = getattr(layer, "quant_method", None)
    scheme = getattr(layer, "scheme", None)
    return type(scheme or method or layer).__name__
