"""The adapters that `update_adapter` has added, as vLLM's servers and callers name them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

from rl_memory_plugins.engine_api import AsyncioApi
from rl_memory_plugins.engines.vllm.adapters import image_of_version, number_in, path_of
from rl_memory_plugins.errors import InvalidRequestError, UnsupportedError
from rl_memory_plugins.records import AdapterStatus, EngineStatus
from rl_memory_plugins.server.gate import report_adapter, report_refusal


def as_request(adapter: AdapterStatus) -> Any:
    """The `LoRARequest` of a version."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(adapter.name, adapter.number, path_of(adapter.number))


def request_for(name: str, adapters: Iterable[AdapterStatus]) -> Any:
    """
    Raises:
        InvalidRequestError: there is no adapter of this name.
    """
    known = {adapter.name: adapter for adapter in adapters}
    if name not in known:
        raise _no_adapter(name, known)
    return as_request(known[name])


def _no_adapter(name: str, known: Iterable[str]) -> InvalidRequestError:
    return InvalidRequestError(f"there is no adapter {name!r}", field="name", got=name, allowed=list(known))


def with_present_versions(
    engines: list[EngineStatus], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call that adds a request, whose adapter is the present version of its name.

    A caller may keep a `LoRARequest` for longer than a version lives.

    Args:
        engines: The status of the engines; empty if it is not known.

    Raises:
        InvalidRequestError: the adapter has been removed. If this code runs for an HTTP request, the gate answers this
            error.
    """

    def present(value: Any) -> Any:
        if number_in(value) is not None:
            return _present(value, engines)
        former = number_in(getattr(value, "lora_request", None))
        if former is not None:  # a request that is complete already
            value.lora_request = _present(value.lora_request, engines)
            number = number_in(value.lora_request) or former
            for image in getattr(value, "mm_features", None) or ():
                image.identifier = image_of_version(image.identifier, former, number)
        return value

    return tuple(map(present, args)), {name: present(value) for name, value in kwargs.items()}


def _present(request: Any, engines: list[EngineStatus]) -> Any:
    if not engines:
        return request
    known = {adapter.name: adapter for adapter in engines[0].adapters}
    adapter = known.get(request.lora_name)
    if adapter is None:
        error = _no_adapter(request.lora_name, known)
        report_refusal(error)
        raise error
    report_adapter(adapter.version)
    return as_request(adapter)


class ServedAdapters(MutableMapping[str, Any]):
    """The `LoRARequest`s of a server by name: vLLM's own, and those of the engine's status as it is now.

    Args:
        own: vLLM's own.
        api: The engine's API.
    """

    def __init__(self, own: dict[str, Any], api: AsyncioApi) -> None:
        self._own = own
        self._api = api

    def _sent(self) -> dict[str, AdapterStatus]:
        engines = self._api.status_now()
        return {adapter.name: adapter for adapter in engines[0].adapters} if engines else {}

    def __getitem__(self, name: str) -> Any:
        sent = self._sent().get(name)
        return self._own[name] if sent is None else as_request(sent)

    def __iter__(self) -> Iterator[str]:
        return iter({**self._own, **self._sent()})

    def __len__(self) -> int:
        return len({**self._own, **self._sent()})

    def __setitem__(self, name: str, request: Any) -> None:
        self._own[name] = request

    def __delitem__(self, name: str) -> None:
        if name in self._sent():
            raise UnsupportedError(f"the adapter {name} came by update_adapter: remove it by remove_adapter")
        del self._own[name]
