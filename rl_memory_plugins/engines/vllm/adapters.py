"""The adapters of one worker. vLLM loads an adapter from a folder; here its loader reads tensors that a trainer sent.

A version has a path that is no file (`path_of`). vLLM's own loader runs for it, with its checks and its conversions.
Where the loader would read files, it gets the configuration and the tensors. They stay in host memory, because vLLM
drops adapters that requests have not used for long, and all adapters after a reload of the weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from rl_memory_plugins.engines.lora_layers import features
from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.hooking import Hooks
from rl_memory_plugins.weights.manifest import Mismatch, TensorSpec

if TYPE_CHECKING:
    import torch

LORA_MODEL = "vllm.lora.lora_model:LoRAModel"
PEFT = "vllm.lora.peft_helper:PEFTHelper"

_FOLDER = "/rl_memory/adapters/"  # an absolute path: vLLM looks for any other on a hub


def install(hooks: Hooks) -> None:
    hooks.wrap("vllm.lora.worker_manager:WorkerLoRAManager._load_adapter", _load_adapter)
    hooks.wrap(f"{PEFT}.from_local_dir", _read_config)
    hooks.wrap(f"{LORA_MODEL}.from_local_checkpoint", _read_tensors)
    hooks.wrap("vllm.lora.request:LoRARequest.__eq__", _same_version)
    hooks.wrap("vllm.v1.core.kv_cache_utils:_gen_lora_extra_hash_keys", _with_path)
    for path in (f"{PEFT}.from_dict", f"{PEFT}.validate_legal", f"{LORA_MODEL}.from_lora_tensors"):
        hooks.require(path)
    for name in ("parse_fine_tuned_lora_name", "is_base_embedding_weights"):
        hooks.require(f"vllm.lora.utils:{name}")


def path_of(number: int) -> str:
    """The path of a version in vLLM's requests."""
    return f"{_FOLDER}{number}"


def number_in(request: Any) -> int | None:
    """The number of the version that a `LoRARequest` names; `None` if its adapter is not of this package."""
    path = getattr(request, "lora_path", "")
    return int(path.removeprefix(_FOLDER)) if path.startswith(_FOLDER) else None


class _Sent(NamedTuple):
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]


class VllmAdapters:
    """See `weights.adapters.AdapterSlots`.

    Args:
        worker: vLLM's worker.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    @property
    def _loras(self) -> Any:
        return self._worker.model_runner.lora_manager

    @property
    def _sent(self) -> dict[int, _Sent]:
        loras = self._loras
        if not hasattr(loras, "rl_memory_sent"):
            loras.rl_memory_sent = {}
        return loras.rl_memory_sent  # type: ignore[no-any-return]

    def check(self, name: str, config: Mapping[str, Any]) -> None:
        served = self._worker.model_config.served_model_name
        if name in ([served] if isinstance(served, str) else served or ()):
            raise InvalidRequestError(
                f"an adapter cannot have the name of the served model, {name}", field="name", got=name
            )
        try:
            _peft_helper(config).validate_legal(self._loras.lora_config)
        except (ValueError, TypeError) as error:
            raise InvalidRequestError(f"the adapter {name} does not fit this engine: {error}", field="config") from None

    def fit(self, config: Mapping[str, Any], specs: Sequence[TensorSpec]) -> tuple[list[Mismatch], list[str]]:
        layers = _Layers(self._loras, config)
        found: list[Mismatch] = []
        unused = []
        for spec in specs:
            try:
                if not layers.take(spec):
                    unused.append(spec.name)
            except ValueError as error:
                found.append(Mismatch("shape" if "shape" in str(error) else "unknown", spec.name, str(error)))
        return [*found, *layers.incomplete()], unused

    def add(self, number: int, name: str, config: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        from vllm.lora.request import LoRARequest

        self._sent[number] = _Sent(dict(config), {key: tensor.cpu() for key, tensor in tensors.items()})
        self._loras.add_adapter(LoRARequest(name, number, path_of(number)))

    def remove(self, number: int) -> None:
        if self._sent.pop(number, None) is not None:
            self._loras.remove_adapter(number)


def _peft_helper(config: Mapping[str, Any]) -> Any:
    from vllm.lora.peft_helper import PEFTHelper

    return PEFTHelper.from_dict(dict(config))


class _Layers:
    """The layers of a model that take adapters, compared with the tensors of one.

    Args:
        loras: vLLM's `WorkerLoRAManager`.
        config: PEFT's configuration.
    """

    def __init__(self, loras: Any, config: Mapping[str, Any]) -> None:
        manager = loras._adapter_manager
        self._modules: dict[str, Any] = manager.modules
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
        expected = features(layer, index, count, incoming=is_a)
        if expected is None or "lora_embedding" in name:
            return True
        if len(spec.shape) != 2:
            raise ValueError(f"the shape {list(spec.shape)} is not that of a matrix")
        rank, size = spec.shape if is_a else reversed(spec.shape)
        if size != expected:
            raise ValueError(f"the shape {list(spec.shape)} does not fit a layer with {expected} features")
        if rank > self._max_rank or (self._rank is not None and rank != self._rank):
            raise ValueError(
                f"the shape {list(spec.shape)} has rank {rank}; the configuration has {self._rank or 'a pattern'}, "
                f"and the engine takes ranks up to {self._max_rank}"
            )
        return True

    def incomplete(self) -> list[Mismatch]:
        """The tensors without the other half of their pair."""
        return [
            Mismatch("missing", spec.name, f"lora_{'B' if is_a else 'A'} of this layer is not in the manifest")
            for pair in self._seen.values()
            if len(pair) == 1
            for is_a, spec in pair.items()
        ]

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


# -- hooks --------------------------------------------------------------------------------------------------

_reading: _Sent | None = None  # what vLLM's loader gets in this call


@contextmanager
def _as_files(sent: _Sent) -> Iterator[None]:
    global _reading
    _reading = sent
    try:
        yield
    finally:
        _reading = None


def _load_adapter(original: Callable[..., Any]) -> Callable[..., Any]:
    def _load_adapter(self: Any, lora_request: Any) -> Any:
        number = number_in(lora_request)
        if number is None:
            return original(self, lora_request)
        with _as_files(self.rl_memory_sent[number]):
            return original(self, lora_request)

    return _load_adapter


def _read_config(original: Callable[..., Any]) -> Callable[..., Any]:
    def from_local_dir(cls: Any, lora_path: str, max_position_embeddings: int | None, *args: Any, **kwargs: Any) -> Any:
        if _reading is None:
            return original(cls, lora_path, max_position_embeddings, *args, **kwargs)
        return cls.from_dict({**_reading.config, "vllm_max_position_embeddings": max_position_embeddings})

    return from_local_dir


def _read_tensors(original: Callable[..., Any]) -> Callable[..., Any]:
    def from_local_checkpoint(cls: Any, lora_dir: str, *args: Any, **kwargs: Any) -> Any:
        if _reading is None:
            return original(cls, lora_dir, *args, **kwargs)
        taken = inspect.signature(cls.from_lora_tensors).parameters
        given = {key: value for key, value in kwargs.items() if key in taken}
        # Copies: vLLM scales and packs the tensors in place.
        tensors = {name: tensor.clone() for name, tensor in _local(kwargs.get("moe_ep_spec")).items()}
        return cls.from_lora_tensors(tensors=tensors, **given)

    return from_local_checkpoint


def _local(experts: Any) -> dict[str, torch.Tensor]:
    """The tensors that concern this rank, if its experts are some of the model's."""
    assert _reading is not None
    if experts is None:
        return _reading.tensors
    from vllm.lora.lora_model import _is_remote_expert_key

    return {name: tensor for name, tensor in _reading.tensors.items() if not _is_remote_expert_key(name, experts)}


def _same_version(original: Callable[..., bool]) -> Callable[..., bool]:
    """Tell two versions of a name apart. vLLM compares names alone, and would load one of two in a batch."""

    def __eq__(self: Any, value: object) -> bool:
        equal = original(self, value)
        return equal and (number_in(self) is None or self.lora_path == value.lora_path)  # type: ignore[attr-defined]

    return __eq__


def _with_path(original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Key the prefix cache by version. Some releases of vLLM key it by name."""

    def _gen_lora_extra_hash_keys(request: Any) -> list[Any]:
        number = number_in(request.lora_request)
        return [*original(request), *([] if number is None else [number])]

    return _gen_lora_extra_hash_keys
