"""The adapter for verl's hybrid rollouts on vLLM. One line of verl's configuration enables it:

    actor_rollout_ref.model.external_lib=rl_memory_plugins.integrations.verl

verl imports the named module in every process that reads its model configuration. With the adapter

- the rollout's engine has the package enabled;
- a sync is one update of this package, in which every trainer rank sends to the engine rank on its GPU: complete, or an
  error;
- the version of the weights is verl's global step.

verl gives a sync no list of its tensors in advance. Therefore the first sync, before the first rollout, is verl's own,
and the adapter notes the names, dtypes and shapes that it carries.

verl sleeps at level 2 by itself, and at level 1 where the sync does not carry all weights. Syncs that are not whole
models as a checkpoint holds them stay verl's own: LoRA adapters, deltas, quantised rollouts, draft models,
disaggregated prefill, and rollouts on other GPUs than the trainer's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from rl_memory_plugins.hooking import Hooks

ROLLOUTS = "verl.workers.rollout.base:_ROLLOUT_REGISTRY"
SERVERS = "verl.workers.rollout.vllm_rollout.vllm_async_server"
# Not a method of the server: Ray copies an actor's methods before the actor imports this module.
ARGUMENTS = f"{SERVERS}:build_cli_args_from_config"

hooks = Hooks("verl")


def _install(hooks: Hooks) -> None:
    hooks.require(ROLLOUTS)["vllm", "async"] = f"{__name__}.VllmRollout"
    if SERVERS in sys.modules:  # the process of a server; the others need not import the engine
        hooks.wrap(ARGUMENTS, _enable)


def _enable(original: Callable[[dict[str, Any]], list[str]]) -> Callable[[dict[str, Any]], list[str]]:
    """Enable the package in the engine. Options that the configuration names stay."""

    def arguments(config: dict[str, Any]) -> list[str]:
        given = config.get("additional_config") or {}
        return original({**config, "additional_config": {"rl_memory": {}, **given}})

    return arguments


def __getattr__(name: str) -> Any:
    """`VllmRollout`, which needs verl's class and with it the engine."""
    if name != "VllmRollout":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()[name] = _rollout()
    return made


def _rollout() -> type:
    import torch
    from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

    from rl_memory_plugins.errors import ManifestError
    from rl_memory_plugins.trainer import EngineClient, Peers, StreamSource, TensorSpec, push_from_all
    from rl_memory_plugins.weights.source import spec_of

    class VllmRollout(ServerAdapter):  # type: ignore[misc]
        """verl's rollout, with the update of this package in place of verl's sender."""

        _engines: list[EngineClient]  # of this rank: the replica's, or none
        _peers: Peers
        _specs: list[TensorSpec] | None = None  # of the trainer's tensors, once a sync has carried them
        _cast: frozenset[str] = frozenset()  # to the rollout's dtype: what the engine refuses in the trainer's

        async def update_weights(
            self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **kwargs: Any
        ) -> None:
            """Send all weights. Every rank of the trainer calls it.

            Args:
                weights: Names and whole tensors, the same on every rank.
                global_steps: The version of the weights.
                wire_format, **kwargs: See verl's `ServerAdapter`.

            Raises:
                RLMemoryError: on every rank, if the update failed on one.
            """
            if not self._is_whole(weights, wire_format, kwargs):
                await super().update_weights(weights, global_steps=global_steps, wire_format=wire_format, **kwargs)
                return
            version = None if global_steps is None else str(global_steps)
            if self._specs is None:
                specs: list[TensorSpec] = []
                await super().update_weights(_noting(weights, specs), global_steps=global_steps, **kwargs)
                self._engines, self._peers = await self._engines_here(), Peers()
                push_from_all(self._engines, {}, self._peers, partial=True, weight_version=version)  # names the weights
                self._specs = specs
                return
            try:
                push_from_all(self._engines, self._source(weights), self._peers, weight_version=version)
            except ManifestError as error:  # nothing has been gathered
                wrong = frozenset(m["name"] for m in error.details.get("mismatches", ()) if m["kind"] == "dtype")
                if wrong <= self._cast:
                    raise
                self._cast |= wrong
                push_from_all(self._engines, self._source(weights), self._peers, weight_version=version)
            if self._has_server:
                await self.server_handle.clear_kv_cache.remote()
                if global_steps is not None:
                    await self.server_handle.set_global_steps.remote(global_steps)

        def _is_whole(self, weights: Any, wire_format: str, kwargs: dict[str, Any]) -> bool:
            """Whether the tensors of a sync are all weights of the engine as a checkpoint holds them."""
            config = self.config
            return (
                wire_format == "named_tensors"
                and not hasattr(weights, "__aiter__")  # from a trainer on other GPUs
                and not kwargs.get("peft_config")
                and self._pd_role is None  # each role has an engine of its own
                and config.quantization is None
                and getattr(self.model_config.hf_config, "quantization_config", None) is None
                and not (config.qat or {}).get("enable", False)
                and not (config.mtp is not None and config.mtp.enable and config.mtp.enable_rollout)
            )

        def _source(self, weights: Any) -> StreamSource:
            """The tensors of a sync. Gates of experts and others may stay in float32: the engine says what to cast."""
            specs = [
                TensorSpec(spec.name, self.config.dtype, spec.shape) if spec.name in self._cast else spec
                for spec in self._specs or ()
            ]
            dtypes = {spec.name: getattr(torch, spec.dtype) for spec in specs}

            def tensors() -> Iterator[tuple[str, torch.Tensor]]:
                for name, tensor in weights:
                    yield name, tensor.to(dtypes.get(name, tensor.dtype))

            return StreamSource(specs, tensors)

        async def _engines_here(self) -> list[EngineClient]:
            if not self._ensure_server_handle():
                return []
            host, port = await self.server_handle.get_server_address.remote()
            return [EngineClient(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")]

    def _noting(weights: Any, specs: list[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            specs.append(spec_of(name, tensor))
            yield name, tensor

    return VllmRollout


hooks.install(_install)
