"""What is seen of an enabled engine's models while vLLM makes them and loads their first weights."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rl_memory_plugins.engines import post_load
from rl_memory_plugins.hooking import Hooks

if TYPE_CHECKING:
    import torch

_ATTRIBUTE = "_rl_memory_first_load"


def install(hooks: Hooks) -> None:
    hooks.wrap("vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm", _keep_weights_in_parameters)
    hooks.wrap("vllm.model_executor.model_loader.utils:record_metadata_for_reloading", _watch)


class FirstLoad:
    """Which parameters the model's loader gave to the `weight_loader` of each, or to vLLM's default.

    vLLM's layer-wise reload collects weights in those loaders. What a model's `load_weights` copies into a parameter by
    itself is lost then: the parameter is on the meta device.

    Attributes:
        passed_over: For `reload.py`: the layers with a parameter that got its weights otherwise; `None` until known.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        self.passed_over: dict[str, str] | None = None
        self._model = model
        self._given: set[tuple[torch.nn.Module, str]] = set()
        for layer in model.modules():
            for name, parameter in layer.named_parameters(recurse=False):
                own = hasattr(parameter, "weight_loader")
                loader = parameter.weight_loader if own else default_weight_loader
                parameter.weight_loader = _Noted(loader, functools.partial(self._given.add, (layer, name)), own)

    def end(self) -> None:
        """Put the loaders back. Parameters that the engine has made meanwhile may have taken them over."""
        for parameter in self._model.parameters():
            while isinstance(noted := getattr(parameter, "weight_loader", None), _Noted):  # several, if layers share it
                if noted.own:
                    parameter.weight_loader = noted.loader
                else:
                    del parameter.weight_loader

    @property
    def is_known(self) -> bool:
        """Whether any loader was used; none is for dummy weights."""
        return bool(self._given)

    def has_given(self, layer: torch.nn.Module, name: str) -> bool:
        return (layer, name) in self._given


class _Noted:
    """A parameter's loader that notes its use. Models compare it with vLLM's default, so it equals what it calls."""

    def __init__(self, loader: Callable[..., Any], note: Callable[[], None], own: bool) -> None:
        self.loader = loader
        self.own = own  # the parameter had it; else it is vLLM's default
        self._note = note
        self.__wrapped__ = loader  # for `inspect.signature`

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._note()
        return self.loader(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return self.loader == (other.loader if isinstance(other, _Noted) else other)

    def __hash__(self) -> int:
        return hash(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self.loader, name)


def of(model: torch.nn.Module) -> FirstLoad | None:
    """A model's first load, if it was watched."""
    return getattr(model, _ATTRIBUTE, None)


_loading: list[FirstLoad] | None = None  # of the models that an enabled engine makes now, in this process


@contextlib.contextmanager
def enabled_load() -> Iterator[None]:
    """In this process an enabled engine makes its models now."""
    global _loading
    _loading = []
    try:
        yield
    finally:
        for first_load in _loading:
            first_load.end()
        _loading = None


def _watch(original: Callable[..., None]) -> Callable[..., None]:
    """vLLM calls it for each model that it has just made."""

    def record_metadata_for_reloading(model: Any) -> None:
        original(model)
        if _loading is not None:
            post_load.attach(model)
            first_load = FirstLoad(model)
            setattr(model, _ATTRIBUTE, first_load)
            _loading.append(first_load)

    return record_metadata_for_reloading


def _keep_weights_in_parameters(original: Callable[..., None]) -> Callable[..., None]:
    """vLLM's CPU build packs linear weights into copies that closures hold and that nothing can release or
    update. In an enabled engine a linear layer multiplies by its parameter, from its first load on."""

    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        from torch.nn.functional import linear

        if _loading is not None or getattr(layer, "cpu_linear", None) is linear:
            layer.cpu_linear = linear
        else:
            original(layer, remove_weight)

    return dispatch_cpu_unquantized_gemm
