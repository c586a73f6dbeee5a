"""The adapter for TRL's trainers, colocated with vLLM or with `vllm serve` as their server.

    from rl_memory_plugins.integrations.trl import callback

    trainer = GRPOTrainer(..., callbacks=[callback()])

The callback is TRL's own seam. With it

- the colocated engine has the package enabled, and each sync is one `load_weights` of all tensors, where TRL loads
  tensor by tensor;
- a sync to a server is one update of this package in place of a broadcast over NCCL: complete, or an error;
- the version of the weights is the trainer's global step.

TRL sleeps at level 2 by itself. Trainers without the callback stay as they are, in the same process too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rl_memory_plugins.hooking import Hooks

if TYPE_CHECKING:
    import torch

__all__ = ["callback"]

MODULE = "trl.generation.vllm_generation"
GENERATION = f"{MODULE}:VLLMGeneration"

hooks = Hooks("trl")


class _Run:
    """What the engine needs to know of one trainer.

    Args:
        rl_memory: The options of the colocated engine.
    """

    def __init__(self, rl_memory: Any) -> None:
        self.rl_memory = rl_memory
        self.model: Any = None
        self.state: Any = None  # transformers' `TrainerState`, which `train()` replaces

    @property
    def version(self) -> str:
        """The version of the weights that the trainer has now."""
        return str(self.state.global_step)


_runs: weakref.WeakSet[_Run] = weakref.WeakSet()


def callback(rl_memory: Any = True) -> Any:
    """A `transformers.TrainerCallback` that lets one trainer of TRL use this package. Each trainer needs its own.

    Args:
        rl_memory: The options of the colocated engine, as `rl_memory_plugins.vllm.LLM` takes them.

    Raises:
        UnsupportedError: names every symbol that the installed TRL does not have.
    """
    from transformers import TrainerCallback

    hooks.install(_install)
    run = _Run(rl_memory)

    class RLMemoryCallback(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.run = run

        def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            run.model, run.state = model, state  # TRL makes its engine next
            _runs.add(run)

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            run.state = state

    return RLMemoryCallback()


def _install(hooks: Hooks) -> None:
    hooks.wrap(f"{GENERATION}._init_vllm", _init_vllm)
    hooks.wrap(f"{GENERATION}._iter_named_params", _load_at_once)
    hooks.wrap(f"{GENERATION}.sync_weights", _name_weights)
    hooks.require(f"{MODULE}:LLM")
    for name in ("init_communicator", "update_named_params", "reset_prefix_cache", "get_server_info"):
        hooks.require(f"{MODULE}:VLLMClient.{name}")


def _run_of(generation: Any) -> _Run | None:
    return getattr(generation, "rl_memory", None)


def _init_vllm(original: Callable[..., None]) -> Callable[..., None]:
    """Give the engine of a trainer with the callback this package, or its client our stream."""

    def init_vllm(self: Any) -> None:
        run = self.rl_memory = next((run for run in _runs if run.model is self.model), None)
        if run is None:
            original(self)
        else:
            with _in_trl(LLM=_engine_class(run), VLLMClient=_client_class(run)):
                original(self)

    return init_vllm


@contextmanager
def _in_trl(**names: Any) -> Iterator[None]:
    """Replace names of TRL's module while the body runs."""
    import importlib

    module = importlib.import_module(MODULE)
    before = {name: getattr(module, name) for name in names}
    vars(module).update(names)
    try:
        yield
    finally:
        vars(module).update(before)


# -- colocated -------------------------------------------------------------------------------------------------


def _engine_class(run: _Run) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        from rl_memory_plugins.vllm import LLM

        return LLM(*args, rl_memory=run.rl_memory, **kwargs)

    return make


def _load_at_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """Load what TRL would yield to a loop that loads tensor by tensor, and yield nothing.

    DeepSpeed's ZeRO-3 and FSDP1 free each tensor before they yield the next. A model may collect tensors before it
    loads them, so for these two TRL's loop stays.
    """

    def iter_named_params(self: Any) -> Any:
        tensors = original(self)
        if _run_of(self) is None or self.mode != "colocate" or self._dist.is_zero3 or self._dist.fsdp_version == 1:
            return tensors
        self.llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights(tensors)
        return iter(())

    return iter_named_params


def _name_weights(original: Callable[..., None]) -> Callable[..., None]:
    """Give the weights of a colocated engine the trainer's step as their version. A server gets it with the update."""

    def sync_weights(self: Any) -> None:
        original(self)
        run = _run_of(self)
        if run is not None and self.mode == "colocate":
            from rl_memory_plugins.engines.vllm.client import SyncApi, api_of

            api_of(self.llm.llm_engine, SyncApi).notice_loads(run.version)

    return sync_weights


# -- with a server ---------------------------------------------------------------------------------------------


def _client_class(run: _Run) -> type:
    import torch
    from trl.generation.vllm_client import VLLMClient

    from rl_memory_plugins.trainer import EngineClient, StreamSource, TensorSpec

    class StreamingClient(VLLMClient):  # type: ignore[misc]
        """TRL's client, with the update of this package in place of a broadcast over NCCL."""

        engine: EngineClient
        dtype: torch.dtype  # of the engine's weights

        def init_communicator(self, device: Any = 0) -> None:
            self.engine = EngineClient(self.base_url)  # TRL's own requests send no key either
            self.engine.memory()  # raises if the server does not have the package
            self.dtype = getattr(torch, self.get_server_info()["model_config"]["dtype"].removeprefix("torch."))

        def update_named_params(self, metadata: Any, named_params: Iterator[tuple[str, torch.Tensor]]) -> None:
            specs = [self._spec(*one) for one in metadata]
            try:
                source = StreamSource(specs, lambda: named_params, dtype=self.dtype)
                self.engine.update_weights(source, weight_version=run.version)
            finally:
                for _ in named_params:  # the trainer's other processes gather all tensors, also after a failure
                    pass

        def _spec(self, name: str, dtype: str, shape: list[int]) -> TensorSpec:
            sent = self.dtype if getattr(torch, dtype).is_floating_point else getattr(torch, dtype)
            return TensorSpec(name, str(sent).removeprefix("torch."), tuple(shape))

        def reset_prefix_cache(self) -> None:
            """The update has reset it."""

        def close_communicator(self) -> None:
            self.engine.close()

    return StreamingClient
