"""vLLM's layer-wise reload, for models whose weights were transformed after loading: quantised, packed, absorbed.

vLLM puts each layer back to its checkpoint's shapes, collects its tensors, loads and transforms them in temporary
memory, and copies the result over the old memory, so CUDA graphs stay right. Around that, this module sees to what
vLLM leaves to its caller: that each layer is given whole, that no layer is left half-way when a load breaks off,
that tensors which are no parameters stay where they are, and that every step ran that ran at the first load.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from rl_memory_plugins.engines.post_load import PostLoad, tensors_of
from rl_memory_plugins.engines.vllm.first_load import of as first_load_of
from rl_memory_plugins.errors import UnsupportedError, WeightUpdateError
from rl_memory_plugins.weights.plan import Loader

RELOAD = "vllm.model_executor.model_loader.reload"
#: What is used of it, checked at the start.
SYMBOLS = (
    f"{RELOAD}.layerwise:initialize_layerwise_reload",
    f"{RELOAD}.layerwise:finalize_layerwise_processing",
    f"{RELOAD}.layerwise:get_layerwise_info",
    f"{RELOAD}.layerwise:_place_kernel_tensors",
    f"{RELOAD}.meta:restore_layer_on_meta",
    f"{RELOAD}.meta:SKIP_TENSORS",
)


class LayerwiseReload:
    """The reload of one model that has transformed layers.

    Args:
        post_load: The watch over the model's post-load steps.
        layers: Those that are transformed, and by what.
        vllm_config: The engine's.
        load_weights: The model's own loader.
        region: What is made of weights belongs there.
        graphs: Whether compiled code or CUDA graphs refer to the model's tensors by address.

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
    ) -> None:
        self._post_load = post_load
        self._model = post_load.model
        self._vllm_config = vllm_config
        self._load_weights = load_weights
        self._region = region
        self._graphs = graphs
        self._device = next(self._model.parameters()).device
        name, method = next(iter(layers.items()))
        self.why = f"vLLM transforms the weights of {len(layers)} layers after loading, such as {name} by {method}"
        kept = post_load.kept_elsewhere()
        if kept:
            raise self._unsupported("their kernels keep packed copies in memory of their own", kept)
        passed_over = self._passed_over(layers)
        if passed_over:
            raise self._unsupported(
                "the model's load_weights copies into their parameters by itself, where vLLM's reload sees no weights",
                passed_over,
            )
        if graphs and self._device.type == "cpu":
            raise self._unsupported("compiled code on the CPU keeps what was packed: start with enforce_eager", layers)
        hidden = post_load.hidden()
        if graphs and hidden:
            raise self._unsupported(
                "they keep tensors that CUDA graphs use and that a reload would replace: start with enforce_eager",
                hidden,
            )

    def _passed_over(self, transformed: Mapping[str, str]) -> dict[str, str]:
        """The layers with a parameter whose weights a reload would lose, see `FirstLoad`; empty if none is known."""
        first_load = first_load_of(self._model)
        if first_load is None or not first_load.is_known:
            return {}
        if first_load.passed_over is None:
            layers = dict(self._model.named_modules())
            with self.checkpoint_layout() as layout:
                places = [name.rpartition(".") for name in layout]
            names = [layer for layer, _, name in places if not first_load.has_given(layers[layer], name)]
            first_load.passed_over = {name: transformed.get(name, type(layers[name]).__name__) for name in names}
        return first_load.passed_over

    def _unsupported(self, why: str, layers: Mapping[str, str]) -> UnsupportedError:
        name, method = next(iter(layers.items()))
        return UnsupportedError(
            f"the weights of {len(layers)} layers, such as {name} by {method}, cannot be updated: {why}",
            layers=dict(list(layers.items())[:20]),
        )

    @contextmanager
    def checkpoint_layout(self) -> Iterator[dict[str, torch.Tensor]]:
        """See `Reload`. What a layer keeps aside from its parameters is left as it is."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
        from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta

        layers = _Layers(self._model)
        try:
            expected: dict[str, torch.Tensor] = {}
            for name, layer in self._model.named_modules():
                tied = _tied(layer, layers.seen_before(layer))
                restore_layer_on_meta(layer, get_layerwise_info(layer))
                for table in (layer._parameters, layer._buffers):
                    for key, tensor in table.items():
                        if tensor is not None and tensor.is_meta:
                            table[key] = _without_memory(tensor)
                if _is_attention(layer):
                    continue  # its scales are optional; vLLM sets those that do not come
                persistent = {
                    key: buffer
                    for key, buffer in layer._buffers.items()
                    if layer._parameters and key not in layer._non_persistent_buffers_set
                }
                for key, tensor in {**layer._parameters, **persistent}.items():
                    if tensor is not None and key not in tied and not _is_set_aside(key):
                        expected[f"{name}.{key}"] = tensor
            yield expected
        finally:
            layers.restore()

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], *, partial: bool) -> None:
        """See `Reload`."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import layerwise
        from vllm.utils.torch_utils import set_default_torch_dtype

        config = self._vllm_config.model_config
        # Not the function that is installed there: it takes a load for one that somebody else makes.
        finalize = getattr(layerwise.finalize_layerwise_processing, "__wrapped__")  # noqa: B009
        layers = _Layers(self._model)
        try:
            with (
                set_current_vllm_config(self._vllm_config),
                set_default_torch_dtype(config.dtype),
                torch.no_grad(),
                self._post_load.repeating(partial=partial),
                _new_moe_kernels(self._model) if self._device.type == "cpu" else nullcontext(),
            ):
                layerwise.initialize_layerwise_reload(self._model)
                with self._region():
                    self._load_weights(weights)
                    finalize(self._model, config)
                    if hasattr(self._model, "process_weights_after_loading"):
                        self._model.process_weights_after_loading()
                    layers.keep_addresses(self._graphs)
        except BaseException:
            layers.restore()
            for layer in self._model.modules():
                layerwise.get_layerwise_info(layer).reset()
            raise


def restore_layers(model: torch.nn.Module) -> None:
    """Put back what a layer-wise load has taken apart that did not come to its end: its parameters are on the meta
    device, and the next load would go on with what was collected. What came whole stays."""
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
            info.reset()


def transformed_layers(post_load: PostLoad) -> dict[str, str]:
    """The layers that were seen to be transformed, and those that are no longer what vLLM has recorded of them."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    found = post_load.transformed()
    for name, layer in post_load.model.named_modules():
        for key, recorded in get_layerwise_info(layer).restore_metadata[0].items():
            now = layer._parameters.get(key)
            if now is None or (now.shape, now.dtype) != (recorded.shape, recorded.dtype):
                found.setdefault(name, type(getattr(layer, "quant_method", None) or layer).__name__)
    return found


class _Layers:
    """A model's layers as they are now."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._names = {layer: name for name, layer in model.named_modules()}
        self._attributes = {layer: dict(vars(layer)) for layer in self._names}
        self._tensors = {layer: tensors_of(layer) for layer in self._names}
        self._tables = {
            layer: (dict(layer._parameters), dict(layer._buffers), set(layer._non_persistent_buffers_set))
            for layer in self._names
        }
        self._first: dict[int, tuple[torch.nn.Module, str]] = {}
        for layer, (parameters, _, _) in self._tables.items():
            for name, parameter in parameters.items():
                if parameter is not None:
                    self._first.setdefault(id(parameter), (layer, name))

    def seen_before(self, layer: torch.nn.Module) -> set[int]:
        """Those of a layer's parameters that an earlier layer has as well."""
        return {
            id(parameter)
            for parameter in self._tables[layer][0].values()
            if parameter is not None and self._first[id(parameter)][0] is not layer
        }

    def restore(self) -> None:
        """Put everything back. What lies in the tensors is not touched."""
        for layer, attributes in self._attributes.items():
            vars(layer).clear()
            vars(layer).update(attributes)
            for table, former in zip((layer._parameters, layer._buffers), self._tables[layer][:2], strict=True):
                table.clear()
                table.update(former)
            layer._non_persistent_buffers_set.clear()
            layer._non_persistent_buffers_set.update(self._tables[layer][2])

    def keep_addresses(self, graphs: bool) -> None:
        """Move the values of new tensors to where the old ones were, and put the old ones back.

        Raises:
            WeightUpdateError: a tensor, or a number that graphs have taken in, is another now.
        """
        for layer, former in self._tensors.items():
            now = tensors_of(layer)
            for name, old in former.items():
                new = now.get(name)
                if new is None or new is old:
                    self._require(new is old or name not in layer._parameters, layer, name)
                    continue
                same = (new.shape, new.dtype, new.device) == (old.shape, old.dtype, old.device)
                self._require(same, layer, name)
                if new.data_ptr() != old.data_ptr():
                    old.data.copy_(new.data)
                    setattr(layer, name, old)
            if graphs:
                for name, value in self._attributes[layer].items():
                    if isinstance(value, (int, float)):
                        changed = vars(layer).get(name)
                        self._require(changed is value or changed == value, layer, name)

    def _require(self, condition: bool, layer: torch.nn.Module, name: str) -> None:
        if not condition:
            where = f"{self._names[layer]}.{name}"
            raise WeightUpdateError(f"vLLM's reload changed {where}, which must stay what it is", name=where)


def _tied(layer: torch.nn.Module, shared: set[int]) -> set[str]:
    """The names of parameters that are another layer's: whoever loads that one loads them."""
    return {name for name, parameter in layer._parameters.items() if id(parameter) in shared}


def _without_memory(meta: torch.Tensor) -> torch.Tensor:
    """A tensor like one that vLLM has recorded, at an address that nothing else has and with its own loader."""
    last = sum((extent - 1) * step for extent, step in zip(meta.shape, meta.stride(), strict=True))
    nbytes = (last + 1) * meta.element_size() if meta.numel() else 0
    if nbytes:
        no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
        flat = torch.frombuffer(pages, dtype=torch.uint8).view(meta.dtype)
        tensor = flat.as_strided(meta.shape, meta.stride())
    else:
        tensor = torch.empty(meta.shape, dtype=meta.dtype)
    tensor.__class__ = meta.__class__
    tensor.__dict__ = dict(meta.__dict__)
    loader = getattr(tensor, "weight_loader", None)
    unwrapped = loader
    while getattr(unwrapped, "__name__", "") == "online_process_loader":  # one that collects, of the first load
        unwrapped = getattr(unwrapped, "__wrapped__")  # noqa: B009
    if unwrapped is not loader:
        tensor.weight_loader = unwrapped
    return tensor


def _is_attention(layer: torch.nn.Module) -> bool:
    """Whether vLLM transforms it after all other layers, from what they hold."""
    return hasattr(type(layer), "process_weights_after_loading")


def _is_set_aside(name: str) -> bool:
    """Whether vLLM's reload leaves tensors of this name alone."""
    from vllm.model_executor.model_loader.reload import meta

    return name in getattr(meta, "SKIP_LOAD_TENSORS", meta.SKIP_TENSORS)


@contextmanager
def _new_moe_kernels(model: torch.nn.Module) -> Iterator[None]:
    """Have vLLM build them anew: on a reload it keeps them, and then does not pack the CPU's weights again."""
    former: dict[Any, Any] = {}
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            former[method], method.moe_kernel = method.moe_kernel, None
    try:
        yield
    finally:
        for method, kernel in former.items():  # of layers that were left out
            method.moe_kernel = method.moe_kernel or kernel
