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

from rl_memory_plugins.engines.vllm.adapter_layers import AdapterLayers
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
    hooks.wrap("vllm.v1.engine.input_processor:InputProcessor._get_mm_identifier", _with_version)
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


def image_of_version(identifier: str, former: int, number: int) -> str:
    """The key of what the model's tower computes of an image, for another version of the adapter."""
    own = identifier.removesuffix(f"@{former}")
    return identifier if own == identifier else f"{own}@{number}"


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
        layers = AdapterLayers(self._loras, config)
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


def _with_version(original: Callable[..., str]) -> Callable[..., str]:
    """Key what the tower computes of images by version, where it depends on the adapter. vLLM keys it by name."""

    def _get_mm_identifier(self: Any, mm_hash: str, lora_request: Any) -> str:
        found, number = original(self, mm_hash, lora_request), number_in(lora_request)
        return found if number is None or found == mm_hash else f"{found}@{number}"

    return _get_mm_identifier
