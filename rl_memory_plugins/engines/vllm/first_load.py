"""Observe the models of an enabled engine while vLLM makes them and loads their first weights."""

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
    hooks.wrap("vllm.model_executor.model_loader.dummy_loader:DummyModelLoader.load_weights", _with_default_scales)


class FirstLoad:
    """Records the parameters that the model's `load_weights` fills by their `weight_loader`, or by vLLM's default.

    vLLM's layer-wise reload collects weights in these loaders. It loses weights that `load_weights` copies into a
    parameter itself, because the parameter is on the meta device then.

    Attributes:
        filled: The layers and names of these parameters. Empty for dummy weights, which no loader fills.
        passed_over: For `reload.py`: whether `load_weights` filled a parameter itself; `None` until known.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        self.passed_over: bool | None = None
        self._model = model
        self.filled: set[tuple[torch.nn.Module, str]] = set()
        for layer in model.modules():
            for name, parameter in layer.named_parameters(recurse=False):
                own = hasattr(parameter, "weight_loader")
                loader = parameter.weight_loader if own else default_weight_loader
                parameter.weight_loader = _RecordingLoader(
                    loader, functools.partial(self.filled.add, (layer, name)), own
                )

    def end(self) -> None:
        """Restore the loaders, also on parameters that the engine has made since and given the same loaders."""
        for parameter in self._model.parameters():
            # Loaders are nested if layers share the parameter.
            while isinstance(loader := getattr(parameter, "weight_loader", None), _RecordingLoader):
                if loader.own:
                    parameter.weight_loader = loader.loader
                else:
                    del parameter.weight_loader


class _RecordingLoader:
    """The loader of a parameter that records its use. It equals the loader that it calls."""

    def __init__(self, loader: Callable[..., Any], note: Callable[[], None], own: bool) -> None:
        self.loader = loader
        self.own = own  # whether `loader` is the parameter's own, not vLLM's default
        self._note = note
        self.__wrapped__ = loader  # for `inspect.signature`

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._note()
        return self.loader(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return self.loader == (other.loader if isinstance(other, _RecordingLoader) else other)

    def __hash__(self) -> int:
        return hash(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # `copy` asks before the attribute exists
            raise AttributeError(name)
        return getattr(self.loader, name)


def of(model: torch.nn.Module) -> FirstLoad | None:
    """The record of a model's first load; `None` if it was not watched."""
    return getattr(model, _ATTRIBUTE, None)


_loading: list[FirstLoad] | None = None  # a list while an enabled engine makes its models in this process


@contextlib.contextmanager
def enabled_load() -> Iterator[None]:
    """The body makes the models of an enabled engine."""
    global _loading
    _loading = []
    try:
        yield
    finally:
        for first_load in _loading:
            first_load.end()
        _loading = None


def _watch(original: Callable[..., None]) -> Callable[..., None]:
    """Watch each model that vLLM has just made; vLLM calls this function for each of them."""

    def record_metadata_for_reloading(model: Any) -> None:
        original(model)
        if _loading is not None:
            post_load.attach(model, templates=True)
            first_load = FirstLoad(model)
            setattr(model, _ATTRIBUTE, first_load)
            _loading.append(first_load)

    return record_metadata_for_reloading


def _with_default_scales(original: Callable[..., None]) -> Callable[..., None]:
    """Let no scale of an FP8 KV cache be a random number: CUDA graphs and backends would go on with it."""

    def load_weights(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        original(self, model, *args, **kwargs)
        watch = post_load.of(model)
        if watch is not None:
            watch.give_default_scales()

    return load_weights


def _keep_weights_in_parameters(original: Callable[..., None]) -> Callable[..., None]:
    """Make linear layers of an enabled engine multiply by their parameters.

    vLLM's CPU build packs the weights into copies that only closures hold. Nothing can release or update them.
    """

    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        from torch.nn.functional import linear

        if _loading is not None or getattr(layer, "cpu_linear", None) is linear:
            layer.cpu_linear = linear
        else:
            original(layer, remove_weight)

    return dispatch_cpu_unquantized_gemm
