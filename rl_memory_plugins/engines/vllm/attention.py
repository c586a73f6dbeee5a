"""What vLLM's attention layers derive from weights outside the layers, derived again after an update.

vLLM ends a load with the post-load step of each attention layer. In it some backends copy weights of other layers: for
FlashInfer and b12x a copy of the attention sinks in FP32. Other backends derive such things at their first forward
pass: the CPU's copy of sinks, FlashInfer's products of the scales of an FP8 KV cache. GLM-5.3's linear attention then
concatenates weights, and so do experts with a gate for shared ones on ROCm. Nothing of this follows an update that
writes only the weights. vLLM's layer-wise reload repeats the step, and forgets nothing of the forward passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch

from rl_memory_plugins.engines import post_load
from rl_memory_plugins.engines.layer_tensors import BACKEND, STEP, walk
from rl_memory_plugins.engines.saved_layers import SavedLayers
from rl_memory_plugins.errors import WeightUpdateError
from rl_memory_plugins.weights.plan import LoadPlan

#: What a layer concatenates at its first forward pass: the weights of these children, by the attribute.
CONCATENATED = {
    "_merged_conv_weight": ("q_conv1d", "k_conv1d", "v_conv1d"),  # `Glm5NextLinearAttention`
    "_combined_gate_weight": ("gate", "shared_expert_gate"),  # `MoERunner`
}


class AttentionSteps:
    """The attention layers of one model. Make it after the first load, and before the first forward pass.

    Args:
        model: A model that `post_load` watches.
        vllm_config: The configuration of the engine, with this model in the place of the target.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any) -> None:
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

        self._model = model
        self._vllm_config = vllm_config
        self._layers = {
            name: layer
            for name, layer in model.named_modules()
            if isinstance(layer, AttentionLayerBase) and callable(getattr(layer, STEP, None))
        }
        self._fresh = [  # what a forward pass may replace by what it derives
            (name, owner, key, value)
            for name, layer in self._layers.items()
            for owner in (layer, *_backends(layer))  # FlashInfer divides by the layer's scale of outputs once
            for key, value in vars(owner).items()
            if value is None or isinstance(value, torch.nn.Parameter)
        ]
        self._concatenating = [
            (f"{name}.{key}", layer, key)
            for name, layer in model.named_modules()
            for key in CONCATENATED.keys() & vars(layer).keys()
        ]
        self._reading: WeakKeyDictionary[LoadPlan, dict[str, torch.nn.Module]] = WeakKeyDictionary()

    def repeat(self, plan: LoadPlan) -> None:
        """Derive again what depends on the weights that an update with this plan has written, at the same addresses.

        Raises:
            WeightUpdateError: a step has changed what must not change, such as a number that is part of CUDA graphs;
                or what a forward pass has derived is no cast copy.
        """
        for name, owner, key, fresh in self._fresh:
            self._forget(f"{name}.{key}", vars(owner), key, fresh)
        for where, layer, key in self._concatenating:
            _concatenate(where, layer, key)
        if plan not in self._reading:
            self._reading[plan] = dict(self._readers(plan))
        for name, layer in self._reading[plan].items():
            self._repeat_step(name, layer)

    def _forget(self, where: str, attributes: dict[str, Any], key: str, fresh: torch.Tensor | None) -> None:
        """Undo what a forward pass has derived: a number where nothing was, or a cast copy in the place of a weight."""
        now = attributes.get(key)
        if fresh is None:
            if isinstance(now, float):
                attributes[key] = None
        elif isinstance(now, torch.Tensor) and now is not fresh:
            if now.shape != fresh.shape:
                raise WeightUpdateError(f"the engine derives {where} in a way that is not known", name=where)
            with torch.inference_mode():  # a forward pass has made it; CUDA graphs may read it
                now.copy_(fresh)

    def _repeat_step(self, name: str, layer: torch.nn.Module) -> None:
        from vllm.config import set_current_vllm_config

        watch = post_load.of(self._model)
        assert watch is not None
        config = self._vllm_config.model_config
        saved = SavedLayers({name: layer})
        try:
            with set_current_vllm_config(self._vllm_config), torch.no_grad(), watch.outside_loads():
                getattr(layer, STEP)(config.dtype)
            saved.keep_addresses(None if config.enforce_eager else watch.graphs)
        except BaseException:
            saved.restore()
            raise

    def _readers(self, plan: LoadPlan) -> Iterator[tuple[str, torch.nn.Module]]:
        """The attention layers that have weights of the model at hand which the plan writes, or may write."""
        weights = {_address(one) for one in self._model.parameters() if not one.is_meta}
        if not plan.opaque:  # where the engine's loader writes is not known
            weights &= {_address(step.destination) for steps in plan.steps.values() for step in steps}
        for name, layer in self._layers.items():
            if any(_address(one) in weights for one in _at_hand(layer)):
                yield name, layer


def _concatenate(where: str, layer: torch.nn.Module, key: str) -> None:
    """Concatenate weights as a forward pass has done, in the memory that CUDA graphs may read."""
    now = getattr(layer, key)
    if now is None:
        return
    weights = [getattr(layer, child).weight for child in CONCATENATED[key]]
    if (sum(map(len, weights)), sum(map(torch.numel, weights))) != (len(now), now.numel()):
        raise WeightUpdateError(f"the engine derives {where} in a way that is not known", name=where)
    with torch.inference_mode():  # a forward pass has made it
        now.copy_(torch.cat([weight.reshape(-1) for weight in weights]).view_as(now))


def _at_hand(layer: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The tensors that the step of an attention layer can read."""
    yield from (one for one in layer.parameters() if not one.is_meta)
    yield from (held.tensor for _, held, _ in walk(layer) if held is not None)
    for backend in _backends(layer):
        for value in vars(backend).values():
            if isinstance(value, torch.nn.Module):
                yield from (one for one in value.parameters() if not one.is_meta)


def _backends(layer: torch.nn.Module) -> Iterator[Any]:
    """The backend of an attention layer, and those that it chooses from."""
    for path, _, owner in walk(layer):
        if owner is not None and path[0] == BACKEND:
            yield owner


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())
