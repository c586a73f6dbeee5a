"""The layers of a vLLM model that take adapters, and what of an adapter fits them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_memory_plugins.engines.lora_layers import ExpertSizes, features
from rl_memory_plugins.weights.manifest import Mismatch, TensorSpec


class AdapterLayers:
    """The layers of a model that take adapters, compared with the tensors of one.

    Args:
        loras: vLLM's `WorkerLoRAManager`.
        config: PEFT's configuration.
    """

    def __init__(self, loras: Any, config: Mapping[str, Any]) -> None:
        manager = loras._adapter_manager
        self._modules: dict[str, Any] = manager.modules
        self._packed: dict[str, list[str]] = manager.packed_modules
        self._parts = {
            part: (manager.modules[whole], index, len(parts))
            for whole, parts in manager.packed_modules.items()
            for index, part in enumerate(parts)
        }
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        self._mapper = getattr(mapper, "get_rename_mapper", lambda: mapper)()
        self._skipped = getattr(manager.model, "lora_skip_prefixes", None) or ()
        self._pooling = bool(getattr(manager, "is_pooling_model", False))
        self._max_rank = loras.lora_config.max_lora_rank
        self._rank = None if config.get("rank_pattern") else config["r"]
        self._saved = set(config.get("modules_to_save") or ())
        self._seen: dict[str, dict[bool, TensorSpec]] = {}

    def take(self, spec: TensorSpec) -> bool:
        """Returns whether this rank uses the tensor, or the engine leaves it out on purpose.

        Raises:
            ValueError: the name is not that of an adapter's tensor, or the shape does not fit.
        """
        from vllm.lora.utils import is_base_embedding_weights, parse_fine_tuned_lora_name

        name = spec.name
        if is_base_embedding_weights(name):
            return True
        if any(f".{prefix}" in name or name.startswith(prefix) for prefix in self._skipped):
            return True
        module_name, is_a = parse_fine_tuned_lora_name(name, self._mapper)
        if module_name in self._saved:
            return True
        layer, index, count = self._find(module_name)
        if layer is None:
            return False
        self._seen.setdefault(module_name, {})[is_a] = spec
        if "lora_embedding" in name:
            return True
        shape, experts = spec.shape, 1
        sizes = expert_sizes(layer)
        if sizes is None:
            expected = features(layer, index, count, incoming=is_a)
        elif count > 1:
            # vLLM lists the projections of an expert as (gate, down, up), or as (up, down) where there is no gate.
            per_expert = len(layer.w13_lora_a_stacked) + 1
            down = index % per_expert == 1
            expected = sizes.features("down" if down else "up", incoming=is_a)
            if count == per_expert and len(shape) == 3:  # all experts in one tensor; they may share one factor
                shape = _of_one_expert(shape, sizes.number, may_be_shared=down != is_a)
        else:
            expected, experts = self._fused(module_name, sizes, incoming=is_a), sizes.number
        if expected is not None:
            self._check(shape, expected, experts, is_a)
        return True

    def incomplete(self) -> list[Mismatch]:
        """The tensors without the other half of their pair, and layers of which only some experts have adapters."""
        lonely = [
            Mismatch("missing", spec.name, f"lora_{'B' if is_a else 'A'} of this layer is not in the manifest")
            for pair in self._seen.values()
            if len(pair) == 1
            for is_a, spec in pair.items()
        ]
        return [*lonely, *self._some_experts()]

    def _some_experts(self) -> list[Mismatch]:
        found = []
        for name, layer in self._modules.items():
            if expert_sizes(layer) is None:
                continue
            parts = self._packed.get(name) or [name, f"{name}.base_layer"]
            seen = [part for part in parts if part in self._seen]
            missing = [part for part in parts if part not in self._seen]
            if seen and missing:
                some = next(iter(self._seen[seen[0]].values()))
                found.append(
                    Mismatch("missing", some.name, f"vLLM needs adapters of all experts; {missing[0]} has none")
                )
        return found

    def _fused(self, name: str, sizes: ExpertSizes, *, incoming: bool) -> int | None:
        """The features of a projection of all experts in one matrix, as PEFT saves stacked experts.

        The module of the experts stands for the down projection. Its `base_layer` stands for gate and up.

        Raises:
            ValueError: the engine takes the experts one by one.
        """
        whole = name.removesuffix(".base_layer")
        if whole in self._packed:
            example = self._packed[whole][0]
            raise ValueError(f"vLLM takes the adapters of these experts one by one, as {example}")
        return sizes.features("down" if whole == name else "gate_up", incoming=incoming)

    def _check(self, shape: tuple[int, ...], expected: int, experts: int, is_a: bool) -> None:
        """Raises a ValueError if a matrix of the adapter does not fit.

        Args:
            shape: The shape of the matrix.
            expected: The features of the layer.
            experts: The number of experts that the matrix has, side by side.
            is_a: Whether the matrix is A, of shape (rank, features), or B, of shape (features, rank).
        """
        if len(shape) != 2:
            raise ValueError(f"the shape {list(shape)} is not that of a matrix")
        rank, size = shape if is_a else reversed(shape)
        if size != expected:
            raise ValueError(f"the shape {list(shape)} does not fit a layer with {expected} features")
        each, rest = divmod(rank, experts)
        if rest or each > self._max_rank or (self._rank is not None and each != self._rank):
            of_experts = f" for {experts} experts" if experts > 1 else ""
            raise ValueError(
                f"the shape {list(shape)} has rank {rank}{of_experts}; the configuration has "
                f"{self._rank or 'a pattern'}, and the engine takes ranks up to {self._max_rank}"
            )

    def _find(self, name: str) -> tuple[Any, int, int]:
        """The layer of this name, the index of the part of it that has the name, and the number of parts."""
        names = [name, f"model.{name}"] if self._pooling else [name]
        for each in names:
            if each in self._parts:
                return self._parts[each]
            # The fused gate and up projection of experts is saved as the `base_layer` of their module.
            layer = self._modules.get(each) or self._modules.get(each.removesuffix(".base_layer"))
            if layer is not None:
                return layer, 0, 1
        return None, 0, 0


def expert_sizes(layer: Any) -> ExpertSizes | None:
    """The sizes of a layer of experts with LoRA; `None` for any other layer."""
    stacked = getattr(layer, "w13_lora_a_stacked", None)
    if not stacked:
        return None
    config = getattr(layer, "moe_config", None)
    hidden, intermediate = stacked[0].shape[-1], layer.w2_lora_a_stacked[0].shape[-1]
    padded = (
        getattr(config, "hidden_dim_unpadded", hidden) != hidden
        or getattr(config, "intermediate_size_per_partition_unpadded", intermediate) != intermediate
        or bool(getattr(config, "intermediate_pad", None))
    )
    count = getattr(layer, "global_num_experts", 0) or getattr(layer.base_layer, "global_num_experts", 1)
    return ExpertSizes(hidden, intermediate * layer.tp_size, count, padded)


def _of_one_expert(shape: tuple[int, ...], count: int, *, may_be_shared: bool) -> tuple[int, ...]:
    """The shape of one expert's matrix in a tensor of all experts.

    Raises:
        ValueError: the tensor has another number of experts.
    """
    if shape[0] != count and not (may_be_shared and shape[0] == 1):
        raise ValueError(f"the shape {list(shape)} is not that of {count} experts")
    return shape[1:]
