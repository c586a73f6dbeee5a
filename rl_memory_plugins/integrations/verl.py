"""The adapter for verl's hybrid rollouts on vLLM and SGLang. One line of verl's configuration enables it:

    actor_rollout_ref.model.external_lib=rl_memory_plugins.integrations.verl

verl imports the named module in every process that reads its model configuration. With the adapter

- the rollout's engine has the package enabled;
- a sync is one update of this package, in which every trainer rank sends to the engine rank on its GPU: complete, or an
  error;
- the version of the weights is verl's global step.

With FSDP2 the adapter takes the parameters themselves, casts the shards and gathers them in batches, where verl gathers
one by one and in the masters' dtype. Other trainers' tensors come from verl's generator, which does not list them in
advance. The first sync, before the first rollout, is then verl's own, and the adapter notes the names, dtypes and
shapes that it carries.

verl sleeps at level 2 by itself on vLLM, and at level 1 where the sync does not carry all weights. On SGLang it keeps a
copy of the weights in host memory; the adapter drops that copy where the engine starts with random weights, which no
rollout may see. Syncs that are not whole models as a checkpoint holds them stay verl's own: LoRA adapters, deltas,
quantised rollouts, draft models, disaggregated prefill, and rollouts on other GPUs than the trainer's.
"""

from __future__ import annotations

import json
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rl_memory_plugins.hooking import Hooks
from rl_memory_plugins.integrations.engine_dtypes import EngineDtypes, cast_stream

if TYPE_CHECKING:
    import torch

    from rl_memory_plugins.trainer import EngineClient, Peers, TensorSource, TensorSpec

    Named: TypeAlias = Iterable[tuple[str, torch.Tensor]]

ROLLOUTS = "verl.workers.rollout.base:_ROLLOUT_REGISTRY"
VLLM = "verl.workers.rollout.vllm_rollout"
SGLANG = "verl.workers.rollout.sglang_rollout"
FSDP = "verl.workers.engine.fsdp"

hooks = Hooks("verl")


def _install(hooks: Hooks) -> None:
    rollouts = hooks.require(ROLLOUTS)
    rollouts["vllm", "async"] = f"{__name__}.VllmRollout"
    rollouts["sglang", "async"] = f"{__name__}.SglangRollout"
    # In the process of a server; the others need not import the engine. These are not methods of verl's server: Ray
    # copies an actor's methods before the actor imports this module.
    if f"{VLLM}.vllm_async_server" in sys.modules:
        hooks.wrap(f"{VLLM}.vllm_async_server:build_cli_args_from_config", _enable)
    if f"{SGLANG}.async_sglang_server" in sys.modules:
        from rl_memory_plugins.engines.sglang import register

        os.environ.setdefault("RL_MEMORY", "1")  # verl makes SGLang's arguments itself
        register()
        hooks.wrap("sglang.srt.entrypoints.engine:Engine._launch_subprocesses", _keep_no_random_weights)


def _enable(original: Callable[[dict[str, Any]], list[str]]) -> Callable[[dict[str, Any]], list[str]]:
    """Enable the package in vLLM. Options that the configuration names stay."""

    def arguments(config: dict[str, Any]) -> list[str]:
        given = config.get("additional_config") or {}
        return original({**config, "additional_config": {"rl_memory": {}, **given}})

    return arguments


def _keep_no_random_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    def launch(cls: Any, server_args: Any, *args: Any, **kwargs: Any) -> Any:
        if server_args.load_format == "dummy" and _is_plain(server_args):
            server_args.enable_weights_cpu_backup = False
        return original(cls, server_args, *args, **kwargs)

    return launch


def _is_plain(server_args: Any) -> bool:
    """Whether a sync carries all weights of this SGLang. Others may need what they have started with."""
    if any(getattr(server_args, name) for name in ("quantization", "speculative_algorithm", "enable_lora")):
        return False
    file = Path(server_args.model_path) / "config.json"  # verl names a folder on this machine
    return file.is_file() and not json.loads(file.read_text()).get("quantization_config")


def __getattr__(name: str) -> Any:
    """`VllmRollout` and `SglangRollout`, which need verl's classes and with them the engine."""
    make = {"VllmRollout": _vllm_rollout, "SglangRollout": _sglang_rollout}.get(name)
    if make is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    hooks.wrap(f"{FSDP}.transformer_impl:FSDPEngine.get_per_tensor_param", _with_parameters)
    made = globals()[name] = make()
    return made


def _vllm_rollout() -> type:
    from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

    class VllmRollout(_Updates, ServerAdapter):  # type: ignore[misc]
        async def _server(self) -> Any:
            return self.server_handle if self._ensure_server_handle() else None

    return VllmRollout


def _sglang_rollout() -> type:
    from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter

    class SglangRollout(_Updates, ServerAdapter):  # type: ignore[misc]
        async def _server(self) -> Any:
            await self._init_server_adapter()
            return None if self._engine is None else self.server_actor

    return SglangRollout


class _Updates:
    """For a rollout of verl: the update of this package in place of verl's sender."""

    config: Any
    model_config: Any
    _pd_role: Any
    _engines: list[EngineClient]  # of this rank: the replica's, or none
    _peers: Peers | None = None
    _specs: list[TensorSpec] | None = None  # of the tensors of verl's generator, once a sync has carried them
    _dtypes: EngineDtypes

    async def _server(self) -> Any:
        """The actor of the replica's server, or `None` in a rank that does not lead a replica."""
        raise NotImplementedError

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
        from rl_memory_plugins.trainer import Peers, push_from_all

        verls_own = super().update_weights  # type: ignore[misc]
        if not self._is_whole(weights, wire_format, kwargs):
            await verls_own(weights, global_steps=global_steps, wire_format=wire_format, **kwargs)
            return
        if self._peers is None:
            self._engines, self._peers = await self._engines_here(), Peers()
            self._dtypes = EngineDtypes()
        version = None if global_steps is None else str(global_steps)
        if self._specs is None and not isinstance(weights, _Parameters):
            specs: list[TensorSpec] = []
            await verls_own(_noting(weights, specs), global_steps=global_steps, **kwargs)
            push_from_all(self._engines, {}, self._peers, partial=True, weight_version=version)  # names the weights
            self._specs = specs
            return
        self._dtypes.push(
            self._engines, lambda dtypes: self._source(weights, dtypes), self._peers, weight_version=version
        )
        server = await self._server()
        if server is not None and global_steps is not None:
            await server.set_global_steps.remote(global_steps)

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

    def _source(self, weights: Any, dtypes: Mapping[str, str]) -> TensorSource:
        """The tensors of a sync, in the trainer's dtypes or in others that are given by name."""
        if isinstance(weights, _Parameters):
            return weights.source(dtypes)
        return cast_stream(self._specs or [], weights, dtypes)

    async def _engines_here(self) -> list[EngineClient]:
        from rl_memory_plugins.trainer import EngineClient

        server = await self._server()
        if server is None:
            return []
        host, port = await server.get_server_address.remote()
        return [EngineClient(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")]


# -- the trainer's tensors -------------------------------------------------------------------------------------


def _noting(weights: Named, specs: list[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
    from rl_memory_plugins.weights.source import spec_of

    for name, tensor in weights:
        specs.append(spec_of(name, tensor))
        yield name, tensor


def _with_parameters(original: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """Give the rollout the parameters of an FSDP2 trainer beside verl's generator."""
    convert = hooks.require("verl.utils.model:convert_weight_keys")
    unfuse = hooks.require(f"{FSDP}.utils:unfuse_moe_params")
    layouts: weakref.WeakKeyDictionary[Any, _Layout] = weakref.WeakKeyDictionary()  # by model: listing takes long

    def get_per_tensor_param(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        from torch.distributed.fsdp import FSDPModule

        from rl_memory_plugins.weights.source import named_tensors

        weights, peft_config = original(self, *args, **kwargs)
        module = self.module
        if not isinstance(module, FSDPModule) or hasattr(module, "peft_config") or getattr(self, "_qat_enabled", False):
            return weights, peft_config
        parameters = convert(dict(named_tensors(module)), module)
        kind = self.model_config.hf_config.model_type
        layout = layouts.setdefault(module, _Layout(lambda tensors: unfuse(tensors, kind)))
        return _Parameters(weights, parameters, layout), peft_config

    return get_per_tensor_param


class _Layout:
    """The tensors of the checkpoint that each parameter of a trainer becomes.

    Args:
        expand: verl's function, which may split a whole parameter into several tensors.
    """

    def __init__(self, expand: Callable[[Named], Named]) -> None:
        self.expand = expand
        self._specs: dict[tuple[Any, ...], list[TensorSpec]] = {}

    def specs(self, name: str, parameter: Any) -> list[TensorSpec]:
        import torch

        from rl_memory_plugins.weights.source import spec_of

        key = name, parameter.dtype, parameter.shape
        if key not in self._specs:
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            self._specs[key] = [spec_of(*made) for made in self.expand([(name, whole)])]
        return self._specs[key]


class _Parameters(Iterator[tuple[str, "torch.Tensor"]]):
    """The parameters of an FSDP2 trainer. Iterating yields whole tensors as verl's own generator does.

    Args:
        weights: verl's generator.
        parameters: By name, shards or whole tensors.
        layout: See `_Layout`.
    """

    def __init__(self, weights: Iterator[Any], parameters: Mapping[str, Any], layout: _Layout) -> None:
        self._weights = weights
        self._parameters = parameters
        self._layout = layout

    def __next__(self) -> Any:
        return next(self._weights)

    def source(self, dtypes: Mapping[str, str]) -> TensorSource:
        """The tensors, cast before a batch of them is gathered.

        Args:
            dtypes: By the checkpoint's name, the dtypes to send where they are not the trainer's.
        """
        import torch

        from rl_memory_plugins.trainer import StreamSource, TensorSpec
        from rl_memory_plugins.trainer.sources.gather import gather_all
        from rl_memory_plugins.trainer.sources.outgoing import Outgoing

        by_dtype: dict[str, tuple[list[TensorSpec], dict[str, Any]]] = {}
        for name, parameter in self._parameters.items():
            pieces = self._layout.specs(name, parameter)
            dtype = dtypes.get(pieces[0].name, pieces[0].dtype)
            specs, parameters = by_dtype.setdefault(dtype, ([], {}))
            specs += (TensorSpec(piece.name, dtype, piece.shape) for piece in pieces)
            parameters[name] = parameter

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for dtype, (_, parameters) in by_dtype.items():
                yield from self._layout.expand(gather_all(parameters.items(), Outgoing(getattr(torch, dtype))))

        return StreamSource([spec for specs, _ in by_dtype.values() for spec in specs], tensors)


hooks.install(_install)
