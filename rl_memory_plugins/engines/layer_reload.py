"""Updates of models whose weights the engine has transformed after loading: quantised, packed, permuted.

A transformed layer gets parameters of the checkpoint's layout again, in temporary memory, as soon as its first tensor
arrives. Once all have arrived, the post-load step of the layer's own quantisation method runs, and the result is copied
into the old memory, where CUDA graphs read it. The temporary memory is that of one layer at a time if the tensors
arrive layer by layer.

SGLang itself can load such a layer again for few quantisation methods only, and then at new addresses. vLLM's own
reload loses weights that a model copies into its parameters by itself.

A tensor is written by the copies that the trace of the model's loader recorded. A tensor of which the loader computes
something goes to the loader; the layers that it may write keep their temporary memory until the loader returns.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch

from rl_memory_plugins.engines.layer_templates import LayerTemplate
from rl_memory_plugins.engines.layer_tensors import STEP
from rl_memory_plugins.engines.post_load import PostLoad, refuse_untried, restoring_cache_scales, unsupported
from rl_memory_plugins.engines.saved_layers import Graphs, SavedLayers
from rl_memory_plugins.errors import WeightUpdateError
from rl_memory_plugins.weights.coverage import Coverage
from rl_memory_plugins.weights.feed import Feed
from rl_memory_plugins.weights.filled import Filled
from rl_memory_plugins.weights.loader_run import Loader
from rl_memory_plugins.weights.plan import Batch, LoadPlan, Write
from rl_memory_plugins.weights.trace import CopyStep, Step
from rl_memory_plugins.weights.write_recorder import recording


class LayerReload:
    """The reload of one model that has transformed layers.

    Args:
        post_load: Observes the post-load steps of the model, with templates of its layers.
        layers: The names of the transformed layers, with their quantisation methods.
        load_weights: The model's own loader.
        engine: The engine's name, for messages.
        context: Gives the context in which the engine runs post-load steps.
        graphs: Whether compiled code or CUDA graphs refer to the model's tensors by address.
        require: Raises an error for an update that the engine cannot take, before anything is written.
        scales_stay: A complete update may leave out the scales of an FP8 KV cache that the first load filled.
        holds_layers: This reload also loads plans for which several layers have temporary memory at a time. Without it
            `suits` says once that such a plan does not suit.

    Attributes:
        layers: The names of the transformed layers.

    Raises:
        UnsupportedError: the reload cannot replace what one of these layers keeps.
    """

    def __init__(
        self,
        post_load: PostLoad,
        layers: Mapping[str, str],
        load_weights: Loader,
        *,
        engine: str,
        graphs: bool,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        require: Callable[[LoadPlan], None] = lambda plan: None,
        scales_stay: bool = False,
        holds_layers: bool = True,
    ) -> None:
        self._post_load = post_load
        self._load_weights = load_weights
        self._context = context
        self._require = require
        self._graphs = post_load.graphs if graphs else None
        self._holds_layers = holds_layers
        modules = dict(post_load.model.named_modules())
        self.layers = layers.keys()
        gone = {name: method for name, method in layers.items() if name not in modules}
        if gone:
            raise unsupported(gone, "they are no longer part of the model")
        self._layers = {name: modules[name] for name in layers}
        name, method = next(iter(layers.items()))
        self.why = f"{engine} transforms the weights of {len(layers)} layers after loading, such as {name} by {method}"
        refuse_untried(post_load.model, layers)
        templates = post_load.templates
        unknown = {name: layers[name] for name, layer in self._layers.items() if layer not in templates}
        if unknown:
            raise unsupported(unknown, f"their layout before {engine} transformed them is not known")
        own = set(self._layers.values())
        copied = {name: layers[name] for name, layer in self._layers.items() if templates[layer].leave_shared(own)}
        if copied:
            raise unsupported(copied, "they keep a copy of a parameter of another layer")
        kept = post_load.kept_elsewhere()
        if kept:
            raise unsupported(kept, "their kernels keep packed copies in memory of their own")
        hidden = post_load.hidden()
        if graphs and hidden:
            why = "they keep tensors that CUDA graphs use and that a reload would replace: disable CUDA graphs"
            raise unsupported(hidden, why)
        self._templates = {name: templates[layer] for name, layer in self._layers.items()}
        self._optional = {
            name: frozenset(one.parameters) if scales_stay and one.has_kv_scales else one.optional
            for name, one in self._templates.items()
        }
        self._known: MutableMapping[LoadPlan, dict[str, list[tuple[str, str, Step]]]] = WeakKeyDictionary()
        self._places = {  # by the address of a blank parameter
            _address(blank): (name, key)
            for name, template in self._templates.items()
            for key, blank in template.blank.items()
        }

    def is_temporary(self, tensor: torch.Tensor) -> bool:
        """See `Reload`."""
        return _address(tensor) in self._places

    @property
    def optional(self) -> dict[str, torch.Tensor]:
        """See `Reload`: those that the checkpoint did not have."""
        blanks = ((name, template.blank, self._optional[name]) for name, template in self._templates.items())
        return {f"{name}.{key}": blank[key] for name, blank, keys in blanks for key in keys if key in blank}

    @contextmanager
    def checkpoint_layout(self) -> Iterator[dict[str, torch.Tensor]]:
        """See `Reload`. Only transformed layers change. Parameters that the checkpoint did not have are left out."""
        with ExitStack() as stack:
            for template in self._templates.values():
                stack.enter_context(template.traced())
            expected: dict[str, torch.Tensor] = dict(self._post_load.model.named_parameters())
            for name, optional in self._optional.items():
                for key in optional:
                    expected.pop(f"{name}.{key}", None)
            yield expected

    def suits(self, plan: LoadPlan) -> bool:
        """See `Reload`."""
        if self._holds_layers or self._post_load.reload_holds_layers or len(self._held(plan)) <= 1:
            return True
        self._post_load.reload_holds_layers = True
        return False

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], plan: LoadPlan) -> None:
        """See `Reload`."""
        self._require(plan)
        held = self._held(plan)
        routes = self._routes(plan)
        layers_of = {name: {layer for layer, _, _ in route if layer} for name, route in routes.items()}
        self._require_read_layers(plan)
        while more := set().union(*(layers for layers in layers_of.values() if held & layers)) - held:
            held |= more  # a tensor of several layers goes to the loader as a whole
        streamed = {name: layers for name, layers in layers_of.items() if held.isdisjoint(layers)}
        missing = Counter(itertools.chain(*streamed.values()))  # the tensors of each layer that have not arrived
        opened: dict[str, _Opened] = {}
        writes = _Writes(together=plan.is_orderless)
        if isinstance(weights, Feed):
            weights.lend(streamed.keys(), writes.run)

        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            """Load the streamed tensors, and yield those for the model's own loader."""
            for name, tensor in weights:
                if name not in streamed:
                    writes.run()
                    yield name, tensor
                    continue
                for layer in streamed[name]:
                    if layer not in opened:
                        opened[layer] = self._open(layer, plan)
                for layer, key, step in routes[name]:
                    writes.add(step, opened[layer].memory[key] if layer else None, tensor)
                for layer in streamed[name]:
                    missing[layer] -= 1
                    if not missing[layer]:
                        writes.run()
                        opened.pop(layer).close(self._graphs)
            writes.run()

        try:
            with (
                self._context(),
                torch.no_grad(),
                restoring_cache_scales(self._post_load.model),
                self._post_load.repeating(partial=True),
            ):
                opened.update((layer, self._open(layer, plan)) for layer in sorted(held))
                written = Coverage()
                if held or streamed.keys() != plan.opaque.keys():
                    with recording(written) if held else ExitStack():
                        self._load_weights(stream())
                for _ in stream():
                    pass
                for layer in sorted(held):
                    opened.pop(layer).close_if_written(written, self._optional[layer], self._graphs)
                for layer in self._without_tensors(plan, held | missing.keys()):
                    self._open(layer, plan).close(self._graphs)
        except BaseException:
            for one in opened.values():
                one.saved.restore()
            raise

    def _require_read_layers(self, plan: LoadPlan) -> None:
        """Check that the update has the layers of which the model's loader computes other tensors.

        Raises:
            WeightUpdateError: the loader would read a layer whose temporary memory is undefined.
        """
        absent = sorted({name.rpartition(".")[0] for name in plan.read_unwritten} & self._layers.keys())
        if absent and (plan.partial or plan.omitted):
            raise WeightUpdateError(
                f"the model's loader computes other tensors of {absent[0]}, which the engine has transformed: a "
                "partial update must have this layer too",
                reason="incomplete",
                missing=absent,
            )

    def _routes(self, plan: LoadPlan) -> dict[str, list[tuple[str, str, Step]]]:
        """The steps of each tensor, each with the transformed layer and parameter that it writes, or empty names."""
        if plan not in self._known:
            self._known[plan] = {
                name: [(*self._places.get(_address(step.destination), ("", "")), step) for step in steps]
                for name, steps in plan.rebuilt.items()
            }
        return self._known[plan]

    def _without_tensors(self, plan: LoadPlan, loaded: Set[str]) -> list[str]:
        """The layers of a complete update without tensors in the checkpoint. They get their defaults again."""
        if plan.partial:
            return []
        return [name for name in self._layers.keys() - loaded if not self._is_kept(name, plan.omitted)]

    def _is_kept(self, layer: str, omitted: Set[str]) -> bool:
        if any(f"{layer}.{name}" in omitted for name in self._layers[layer]._parameters):
            return True
        if not self._templates[layer].has_kv_scales:
            return False
        if self._optional[layer] != self._templates[layer].optional:  # the scales of the first load stay
            return True
        # The scales belong to the weights beside them, and may be no parameters any more.
        parent = f"{layer.rpartition('.')[0]}."
        beside = {name for name, _ in self._post_load.model.named_parameters() if name.startswith(parent)}
        return bool(beside) and beside <= omitted

    def _open(self, layer: str, plan: LoadPlan) -> _Opened:
        device = next(parameter.device for parameter in self._post_load.model.parameters() if not parameter.is_meta)
        padding = {name: plan.padding.get(f"{layer}.{name}", ()) for name in self._templates[layer].parameters}
        return _Opened(layer, self._layers[layer], self._templates[layer], device, padding)

    def _held(self, plan: LoadPlan) -> set[str]:
        """The layers that only the model's own loader can load, or that it reads to compute other tensors."""
        held = {name.rpartition(".")[0] for name in plan.derived_from}
        passed = plan.opaque.keys() - plan.rebuilt.keys()
        if passed:
            covered = Coverage()
            for steps in plan.rebuilt.values():
                for step in steps:
                    covered.add(step.destination)
            ends = {name.rpartition(".")[2] for name in passed}
            held |= {
                name
                for name, template in self._templates.items()
                for key, blank in template.blank.items()
                if (key not in self._optional[name] or key in ends) and covered.fraction(blank) < 1
            }
        return held & self._layers.keys()


def made_once(watch: PostLoad, layers: Mapping[str, str], make: Callable[[], LayerReload]) -> LayerReload:
    """The reload of a model's transformed layers. A reload keeps what it finds of a plan for later updates.

    Raises:
        UnsupportedError: as `LayerReload`.
    """
    former = watch.reload
    if isinstance(former, LayerReload) and former.layers == layers.keys():
        return former
    watch.reload = made = make()
    return made


def reset(post_load: PostLoad, names: Set[str], *, graphs: bool) -> set[str]:
    """Bring layers back to the state of a first load whose checkpoint has nothing for them, by their own step.

    Args:
        names: Parameters that the first load left as they were, such as the scales of an FP8 KV cache.
        graphs: As for `LayerReload`.

    Returns: the parameters of the layers that have no others than `names`.

    Raises:
        WeightUpdateError: the step has changed what must not change.
    """
    found: set[str] = set()
    with post_load.outside_loads(), torch.no_grad():
        for name, layer in post_load.model.named_modules():
            template = post_load.templates.get(layer)
            own = {f"{name}.{key}": one for key, one in layer._parameters.items() if one is not None}
            if template is not None and own and own.keys() <= names:
                device = next(iter(own.values())).device
                _Opened(name, layer, template, device, {}).close(post_load.graphs if graphs else None)
                found |= own.keys()
    return found


class _Opened:
    """A layer with temporary parameters of the checkpoint's layout.

    Args:
        padding: For parameters with padding, the regions that are no padding.

    Attributes:
        parameters: The temporary parameters.
        memory: The same as plain tensors.
        saved: The layer as it was.
    """

    def __init__(
        self, name: str, layer: torch.nn.Module, template: LayerTemplate, device: torch.device, padding: Filled
    ) -> None:
        self._name = name
        self._padding = padding
        self._layer = layer
        self._template = template
        self.saved = SavedLayers({name: layer})
        self.parameters = template.materialised(device, [name for name, regions in padding.items() if regions])
        self.memory = {name: one.data.as_subclass(torch.Tensor) for name, one in self.parameters.items()}
        template.give(self.parameters)

    def close(self, graphs: Graphs | None) -> None:
        """Transform the layer as the first load did, into its old memory."""
        now = {name: parameter for name, parameter in self._layer._parameters.items() if parameter is not None}
        self._template.rewind(now)  # the model's loader may have replaced a temporary parameter
        try:
            with self._template.default_dtype():
                getattr(self._layer.quant_method, STEP)(self._layer)
            self.saved.keep_addresses(graphs)
        except BaseException:
            self.saved.restore()
            raise

    def close_if_written(self, written: Coverage, optional: frozenset[str], graphs: Graphs | None) -> None:
        """Close a layer that the model's loader has written; restore a layer that the update has left out.

        Raises:
            WeightUpdateError: the loader has written a part of the layer.
        """
        covered = {name: written.fraction(parameter) for name, parameter in self.parameters.items()}
        if not any(covered.values()):
            self.saved.restore()
            return
        missing = [
            name
            for name, fraction in covered.items()
            if fraction < 1 and name not in optional and not self._is_filled(name, written)
        ]
        if missing:
            self.saved.restore()
            names = [f"{self._name}.{name}" for name in missing]
            raise WeightUpdateError(
                f"the update did not cover {names[0]}, but the engine reloads whole layers",
                reason="incomplete",
                missing=names,
            )
        self.close(graphs)

    def _is_filled(self, name: str, written: Coverage) -> bool:
        """Whether all of a parameter but its padding is written."""
        regions, parameter = self._padding.get(name, ()), self.parameters[name]
        return bool(regions) and all(written.fraction(region.of(parameter)) == 1 for region in regions)


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


class _Writes:
    """Recorded writes that wait, to be queued many at a time: of experts each tensor is small, and there are thousands.

    Args:
        together: The order of the writes does not matter.
    """

    def __init__(self, *, together: bool) -> None:
        self._most = 256 if together else 1
        self._waiting: list[Write] = []

    def add(self, step: Step, memory: torch.Tensor | None, source: torch.Tensor) -> None:
        """Run a recorded step, now or later.

        Args:
            memory: In place of the blank parameter of the trace; `None` if the step writes memory of the model.
            source: Contiguous or not, in memory that stays as it is until `run`.
        """
        destination = step.destination if memory is None else _same_place(step.destination, memory)
        if isinstance(step, CopyStep):
            whole = source.contiguous()
            start = whole.storage_offset() + step.offset
            self._waiting.append((destination, whole.as_strided(step.size, step.stride, start)))
        else:
            self._waiting.append((destination, step.value))
        if len(self._waiting) >= self._most:
            self.run()

    def run(self) -> None:
        """Queue all that waits on the current stream."""
        if self._waiting:
            Batch(self._waiting, group=self._most > 1).run()
            self._waiting = []


def _same_place(planned: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor that lie where the planned ones lie in theirs."""
    size, stride, offset = planned.size(), planned.stride(), planned.storage_offset()
    if memory.dtype == planned.dtype:
        return memory.as_strided(size, stride, offset)
    whole = torch.empty(0, dtype=planned.dtype, device=memory.device)
    return whole.set_(memory.untyped_storage(), offset, size, stride)
