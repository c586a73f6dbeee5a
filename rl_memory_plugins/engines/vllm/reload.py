"""How layers that vLLM transformed after loading are loaded again: quantised, packed, absorbed.

vLLM gives each layer the shapes of its checkpoint again, collects the layer's tensors, loads and transforms them in
temporary memory, and copies the result over the old memory, where CUDA graphs read it. vLLM leaves the rest to its
caller, and this module does the rest: each layer gets all its tensors, a load that breaks off leaves no layer half-way,
plain tensors keep their addresses, and every post-load step of the first load runs again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch

from rl_memory_plugins.engines import post_load
from rl_memory_plugins.engines.layer_reload import LayerReload, made_once
from rl_memory_plugins.engines.layer_tensors import STEP
from rl_memory_plugins.engines.post_load import PostLoad, method_of, refuse_untried, unsupported
from rl_memory_plugins.engines.saved_layers import SavedLayers, without_memory
from rl_memory_plugins.engines.vllm.first_load import of as first_load_of
from rl_memory_plugins.engines.vllm.graph_numbers import SCALES, held_by_graphs
from rl_memory_plugins.engines.vllm.update_session import own_reload
from rl_memory_plugins.errors import UnsupportedError, WeightUpdateError
from rl_memory_plugins.weights.loader_run import Loader
from rl_memory_plugins.weights.model_loader import Reload
from rl_memory_plugins.weights.plan import LoadPlan

RELOAD = "vllm.model_executor.model_loader.reload"
#: The symbols that this package uses; `worker.py` requires them at the start.
SYMBOLS = (
    f"{RELOAD}.layerwise:initialize_layerwise_reload",
    f"{RELOAD}.layerwise:finalize_layerwise_processing",
    f"{RELOAD}.layerwise:get_layerwise_info",
    f"{RELOAD}.layerwise:_place_kernel_tensors",
    f"{RELOAD}.meta:restore_layer_on_meta",
    f"{RELOAD}.meta:SKIP_TENSORS",
    f"{RELOAD}.meta:materialize_meta_tensor",
)


def repeats_every_step() -> bool:
    """Whether vLLM's reload sees each parameter's load. Before 0.25 it lost steps of int4 layers unnoticed."""
    from vllm.model_executor.model_loader.reload import layerwise

    return hasattr(layerwise, "_wrap_parameters_weight_loader")


def reload_of(
    model: torch.nn.Module,
    vllm_config: Any,
    load_weights: Loader,
    region: Callable[[], AbstractContextManager[None]],
    shared: Collection[torch.nn.Module] = (),
) -> Reload | None:
    """This package's reload of a model, or vLLM's own, where layers have steps that only vLLM's repeats.

    See `LayerReload` and `LayerwiseReload`. vLLM's runs Python for each tensor of each expert, loads layers anew that
    nothing has transformed, and loses weights that a model copies into its parameters by itself.

    Returns: `None` if vLLM has transformed no layer of the model.

    Raises:
        UnsupportedError: neither can transform a layer again, or the load format hides which layers are transformed.
    """
    from vllm.config import set_current_vllm_config

    watch = post_load.of(model)
    if watch is None:
        load_format = vllm_config.load_config.load_format
        raise UnsupportedError(
            f"what load_format={load_format} does to weights after loading is not known: they cannot be updated",
            load_format=str(load_format),
        )
    layers = transformed_layers(watch)
    if not layers:
        return None
    watch.graphs.holds = held_by_graphs
    graphs = not vllm_config.model_config.enforce_eager

    def make() -> LayerReload:
        return LayerReload(
            watch,
            layers,
            load_weights,
            engine="vLLM",
            graphs=graphs,
            context=lambda: set_current_vllm_config(vllm_config),
            require=functools.partial(_require_default_scales, watch) if graphs else lambda plan: None,
            scales_stay=True,  # as in vLLM's own reload
            holds_layers=False,  # which has one layer at a time in temporary memory
        )

    steps = watch.own_steps()
    if not steps and _are_default_scales(watch, layers):  # for them vLLM's reload would load every layer anew
        return made_once(watch, layers, make)
    own = LayerwiseReload(watch, layers, vllm_config, load_weights, region, graphs, shared)
    if not steps and not hasattr(model, STEP) and _is_for_this_package(watch, layers):
        with suppress(UnsupportedError):
            return made_once(watch, layers, make)
    if not own.loses_weights():
        return own
    if steps:
        why = "the model's load_weights copies into parameters by itself, where vLLM's reload sees no weights"
        raise unsupported(steps, why)
    return made_once(watch, layers, make)


class LayerwiseReload:
    """The reload of one model that has transformed layers.

    Args:
        post_load: Observes the post-load steps of the model.
        layers: The names of the transformed layers, with their quantisation methods.
        vllm_config: The configuration of the engine.
        load_weights: The model's own loader.
        region: Gives the region for the tensors that the load makes.
        graphs: Whether compiled code or CUDA graphs refer to the model's tensors by address.
        shared: Layers that another model has too, and has loaded.

    Raises:
        UnsupportedError: vLLM cannot transform one of these layers again.
    """

    def __init__(
        self,
        post_load: PostLoad,
        layers: Mapping[str, str],
        vllm_config: Any,
        load_weights: Loader,
        region: Callable[[], AbstractContextManager[None]],
        graphs: bool,
        shared: Collection[torch.nn.Module] = (),
    ) -> None:
        self._post_load = post_load
        self._shared = shared
        self._model = post_load.model
        self._vllm_config = vllm_config
        self._load_weights = load_weights
        self._region = region
        self._graphs = graphs
        self._device = next(self._model.parameters()).device
        self.is_temporary: Callable[[torch.Tensor], bool] | None = None
        self.optional: dict[str, torch.Tensor] = {}
        name, method = next(iter(layers.items()))
        self.why = f"vLLM transforms the weights of {len(layers)} layers after loading, such as {name} by {method}"
        if not repeats_every_step():
            raise unsupported(
                layers, "the reload of this vLLM release does not wrap the loaders of all parameters: use 0.25"
            )
        refuse_untried(self._model, layers)
        kept = post_load.kept_elsewhere()
        if kept:
            raise unsupported(kept, "their kernels keep packed copies in memory of their own")
        taken = _taken_away(post_load, layers)
        if taken:
            raise unsupported(taken, "attention has packed them into memory of its own and taken them out of the layer")
        if graphs and self._device.type == "cpu":
            raise unsupported(layers, "compiled code on the CPU keeps packed weights: start with enforce_eager")
        hidden = post_load.hidden()
        if graphs and hidden:
            why = "they keep tensors that CUDA graphs use and that a reload would replace: start with enforce_eager"
            raise unsupported(hidden, why)

    def loses_weights(self) -> bool:
        """Whether the model copies into a parameter by itself, where this reload sees no weights; see `FirstLoad`."""
        first_load = first_load_of(self._model)
        if first_load is None or not first_load.filled:
            return False
        if first_load.passed_over is None:
            layers = dict(self._model.named_modules())
            with self.checkpoint_layout() as layout:
                places = [name.rpartition(".") for name in layout]
            places = [place for place in places if layers[place[0]] not in self._shared]
            first_load.passed_over = any((layers[layer], name) not in first_load.filled for layer, _, name in places)
        return first_load.passed_over

    def suits(self, plan: LoadPlan) -> bool:
        """See `Reload`."""
        return True

    @contextmanager
    def checkpoint_layout(self) -> Iterator[dict[str, torch.Tensor]]:
        """See `Reload`. A layer's plain tensors stay as they are."""
        from vllm.model_executor.model_loader.reload import meta
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        skipped = getattr(meta, "SKIP_LOAD_TENSORS", meta.SKIP_TENSORS)  # vLLM's reload does not load them
        layers = SavedLayers(dict(self._model.named_modules()))
        try:
            expected: dict[str, torch.Tensor] = {}
            for name, layer in self._model.named_modules():
                tied = layers.tied(layer)
                meta.restore_layer_on_meta(layer, get_layerwise_info(layer))
                for table in (layer._parameters, layer._buffers):
                    for key, tensor in table.items():
                        if tensor is not None and tensor.is_meta:
                            table[key] = _without_memory(tensor)
                if hasattr(type(layer), STEP):  # attention: its scales are optional
                    continue
                persistent = {
                    key: buffer
                    for key, buffer in layer._buffers.items()
                    if layer._parameters and key not in layer._non_persistent_buffers_set
                }
                for key, tensor in {**layer._parameters, **persistent}.items():
                    if tensor is not None and key not in tied and key not in skipped:
                        expected[f"{name}.{key}"] = tensor
            yield expected
        finally:
            layers.restore()

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], plan: LoadPlan) -> None:
        """See `Reload`."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import layerwise
        from vllm.utils.torch_utils import set_default_torch_dtype

        if self._graphs:
            _require_default_scales(self._post_load, plan)
        config = self._vllm_config.model_config
        # Not the hook of `worker.py`, which watches the loads of other callers.
        finalize = getattr(layerwise.finalize_layerwise_processing, "__wrapped__")  # noqa: B009
        layers = SavedLayers(dict(self._model.named_modules()))
        try:
            with (
                set_current_vllm_config(self._vllm_config),
                set_default_torch_dtype(config.dtype),
                torch.no_grad(),
                post_load.restoring_cache_scales(self._model),
                self._post_load.repeating(partial=plan.partial or bool(plan.omitted)),
                _new_moe_kernels(self._model) if self._device.type == "cpu" else nullcontext(),
                _zeroed_memory() if plan.padding else nullcontext(),
            ):
                with own_reload():
                    layerwise.initialize_layerwise_reload(self._model)
                with self._region():
                    self._load_weights(weights)
                    finalize(self._model, config)
                    if hasattr(self._model, "process_weights_after_loading"):
                        self._model.process_weights_after_loading()
                    layers.keep_addresses(self._post_load.graphs if self._graphs else None)
        except BaseException:
            layers.restore()
            for layer in self._model.modules():
                layerwise.get_layerwise_info(layer).reset()
            raise
        finally:
            # vLLM leaves its collecting loader on parameters that it does not take apart (`bias`), in layers that the
            # update omits. The loader would ignore the weights of the next update.
            for parameter in self._model.parameters():
                _restore_own_loader(parameter)


def _are_default_scales(post_load: PostLoad, layers: Collection[str]) -> bool:
    """Whether the weights can be copied into the parameters, and all that was transformed are the engine's own scales.

    The transformed layers are attention for whose scales of the KV cache no checkpoint brought any.
    """
    modules = dict(post_load.model.named_modules())
    attention = {modules[name] for name in layers if name in modules}

    def has_defaults(layer: torch.nn.Module) -> bool:
        template = post_load.templates.get(layer)
        return (
            template is not None
            and template.has_kv_scales
            and bool(template.blank)
            and template.blank.keys() <= template.optional
        )

    return (
        len(attention) == len(layers)
        and all(hasattr(type(layer), STEP) and has_defaults(layer) for layer in attention)
        and _others_are_loadable(post_load, layers)
    )


def _is_for_this_package(post_load: PostLoad, layers: Collection[str]) -> bool:
    """Whether `LayerReload` loads the layers as vLLM's first load did, in as little memory as vLLM's reload."""
    return (
        not post_load.reload_holds_layers
        and not any(template.is_deferred for template in post_load.templates.values())  # vLLM's load quantises them
        and len({one.device for one in post_load.model.parameters() if not one.is_meta}) == 1  # some are offloaded
        and _others_are_loadable(post_load, layers)
    )


def _others_are_loadable(post_load: PostLoad, layers: Collection[str]) -> bool:
    """Whether the layers that were not transformed still have parameters that their loaders take.

    vLLM up to 0.32 may have put plain parameters in their place.
    """
    names = {layer: name for name, layer in post_load.model.named_modules()}
    return all(one.is_loadable() for layer, one in post_load.templates.items() if names.get(layer) not in layers)


def _require_default_scales(post_load: PostLoad, plan: LoadPlan) -> None:
    """Check that an update brings no scales of the KV cache to CUDA graphs that were captured with the defaults.

    Raises:
        WeightUpdateError: it does, and graphs may have the scales as numbers. Nothing has been written.
    """
    modules = dict(post_load.model.named_modules())
    for layer in post_load.default_scales:
        if not any(post_load.graphs.holds(modules[layer], name) for name in SCALES):
            continue
        scales = post_load.templates[modules[layer]].parameters
        new = [name for name in plan.opaque if name.rpartition(".")[2] in scales]
        if new:
            raise WeightUpdateError(
                f"{new[0]} is a scale of the KV cache, but CUDA graphs have the scales of {layer} as numbers, from a "
                "start with dummy weights: start with the checkpoint's weights, or with enforce_eager",
                name=new[0],
                layer=layer,
            )


def _taken_away(post_load: PostLoad, layers: Mapping[str, str]) -> dict[str, str]:
    """Those of the layers without a transforming step whose parameters are empty now: another layer's step did that."""
    modules, own = dict(post_load.model.named_modules()), post_load.transformed()
    return {
        name: method
        for name, method in layers.items()
        if name not in own and any(one is not None and not one.numel() for one in modules[name]._parameters.values())
    }


def restore_layers(model: torch.nn.Module) -> None:
    """Restore the layers that a broken-off layer-wise load has left on the meta device. Loaded layers stay as they are.

    The next load would otherwise go on with the tensors that vLLM has collected.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
            info.reset()


def transformed_layers(post_load: PostLoad) -> dict[str, str]:
    """The layers with an observed transformation, and those whose parameters differ from vLLM's record of them."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    found = post_load.transformed()
    for name, layer in post_load.model.named_modules():
        for key, recorded in get_layerwise_info(layer).restore_metadata[0].items():
            now = layer._parameters.get(key)
            if now is None or (now.shape, now.dtype) != (recorded.shape, recorded.dtype):
                found.setdefault(name, method_of(layer))
    return found


def _without_memory(recorded: torch.Tensor) -> torch.Tensor:
    """A tensor like the recorded one, with its own loader, without physical memory."""
    tensor: Any = without_memory(recorded)
    _restore_own_loader(tensor)  # the first load may have left its collecting loader
    return tensor


def _restore_own_loader(tensor: Any) -> None:
    """Remove vLLM's collecting loader from around a parameter's own."""
    loader: Any = getattr(tensor, "weight_loader", None)
    own = inspect.unwrap(loader, stop=lambda found: getattr(found, "__name__", "") != "online_process_loader")
    if own is not loader:
        tensor.weight_loader = own


@contextmanager
def _zeroed_memory() -> Iterator[None]:
    """Make vLLM's reload begin with zeros, as vLLM makes parameters with padding; its reload leaves them undefined."""
    from vllm.model_executor.model_loader.reload import meta

    original = meta.materialize_meta_tensor

    def materialize_meta_tensor(tensor: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = original(tensor)
        made.data.zero_()
        return made

    meta.materialize_meta_tensor = materialize_meta_tensor
    try:
        yield
    finally:
        meta.materialize_meta_tensor = original


@contextmanager
def _new_moe_kernels(model: torch.nn.Module) -> Iterator[None]:
    """Make vLLM build its kernels of experts again. A reload would keep them and not pack the CPU's weights again."""
    former: dict[Any, Any] = {}
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            former[method], method.moe_kernel = method.moe_kernel, None
    try:
        yield
    finally:
        for method, kernel in former.items():  # of layers that the update omits
            method.moe_kernel = method.moe_kernel or kernel
