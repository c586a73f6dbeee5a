"""The adapter for OpenRLHF's PPO on Ray, with vLLM on the trainer's GPUs. It runs OpenRLHF's command:

    python -m rl_memory_plugins.integrations.openrlhf --train.colocate_all --vllm.enable_sleep ...

takes the arguments of `openrlhf.cli.train_ppo_ray`. With the adapter

- engines that share GPUs with the trainer have the package enabled;
- a sync is one update of this package, in which every trainer rank sends to the engine rank on its GPU: complete, or an
  error;
- the sleep between a rollout and its training step is level 2. A rollout without a sync in between follows all other
  sleeps: the first one, those after evaluations, and those after rollouts without samples. These stay level 1;
- the version of the weights is OpenRLHF's global step.

These syncs stay OpenRLHF's own, and all sleeps then stay level 1: trainers with LoRA, 4-bit weights or DeepSpeed's
tensor parallelism, models with images, asynchronous training, and engines on other GPUs.

OpenRLHF has no registry. The adapter derives classes from three of OpenRLHF's actors, and puts them in their place in
the process of the command. Ray carries the classes from there to all other processes.
"""

from __future__ import annotations

import functools
import importlib
import runpy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rl_memory_plugins.hooking import Hooks

if TYPE_CHECKING:
    import torch

    from rl_memory_plugins.trainer import Peers, TensorSpec

__all__ = ["install", "main"]

ENGINES = "openrlhf.trainer.ray.vllm_engine"
ENGINE = f"{ENGINES}:RolloutRayActor"
POLICY = "openrlhf.trainer.ray.ppo_actor:PolicyModelActor"
TRAINER = "openrlhf.trainer.ppo_trainer:PPOTrainer"


def main() -> None:
    """Run OpenRLHF's command with the adapter."""
    install()
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)


@functools.cache
def install() -> None:
    """Put the adapter's actors in place of OpenRLHF's in this process, before OpenRLHF's command imports them.

    The options of the engines come from the environment of this process; see `config.RLMemoryConfig`.

    Raises:
        UnsupportedError: names every symbol that the installed OpenRLHF does not have.
    """
    import ray

    own: dict[str, Any] = {}

    def find(hooks: Hooks) -> None:
        for actor in (ENGINE, POLICY, TRAINER):
            own[actor] = hooks.require(f"{actor}.__ray_actor_class__")  # the class below `@ray.remote`
        hooks.require(f"{ENGINES}:batch_vllm_engine_call")
        hooks.require("openrlhf.trainer.ppo_utils.samples_generator:SamplesGenerator._generate_vllm")

    Hooks("openrlhf").install(find)
    _put(ENGINE, ray.remote(_engine_class(own[ENGINE])))
    _put(POLICY, ray.remote(num_gpus=1)(_policy_class(own[POLICY])))
    _put(TRAINER, ray.remote(_trainer_class(own[TRAINER])))


def _put(path: str, actor: Any) -> None:
    module, name = path.split(":")
    setattr(importlib.import_module(module), name, actor)


def _engine_class(base: Any) -> type:
    from rl_memory_plugins.config import RLMemoryConfig

    options = (RLMemoryConfig.from_environment() or RLMemoryConfig()).to_dict()

    class RolloutRayActor(base):  # type: ignore[misc]
        """OpenRLHF's engine, with the package where it shares its GPU."""

        async def __init__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]
            self._next_level = 1
            if kwargs["num_gpus"] < 1:
                given = kwargs.get("additional_config") or {}
                kwargs["additional_config"] = {"rl_memory": options, **given}
            await super().__init__(*args, **kwargs)

        async def discard_at_next_sleep(self) -> None:
            """An update will follow the next sleep: it need not preserve the weights."""
            self._next_level = 2

        async def sleep(self, level: int = 1) -> None:
            level, self._next_level = max(level, self._next_level), 1
            await super().sleep(level)

        async def devices(self) -> list[str]:
            return [rank.device for engine in await self.llm.memory_status() for rank in engine.ranks]

        async def post_update(self, body: dict[str, Any]) -> Any:
            return await self.llm.update_weights_from_ipc(**body)

    return RolloutRayActor


def _policy_class(base: Any) -> type:
    class PolicyModelActor(base):  # type: ignore[misc]
        """OpenRLHF's trainer rank, with the update of this package in place of a call for each parameter."""

        _peers: Peers | None = None

        def broadcast_to_vllm(self, weight_version: str | None = None) -> bool:
            """Send all weights to the engines. Every rank of the trainer calls it.

            Args:
                weight_version: The version of the weights.

            Returns: whether the engines would get all their weights again by the next call.

            Raises:
                RLMemoryError: on every rank, if the update failed on one.
            """
            import torch

            from rl_memory_plugins.trainer import ModelSource, Peers, push_from_all

            args = self.strategy.args
            if not _sends_whole_models(args, self.actor):
                super().broadcast_to_vllm()
                return False
            if self._peers is None:
                self._peers = Peers()
            # The engine's ranks are on the GPUs of as many trainer ranks. The first of these controls the engine.
            engine, place = divmod(self._peers.rank, args.vllm.tensor_parallel_size)
            engines = [] if place else [_Engine(self.vllm_engines[engine])]
            model = self.actor.model.module
            source = _GatheredSource(model) if args.ds.zero_stage == 3 else ModelSource(model)
            torch.cuda.empty_cache()  # the engine's memory comes from the driver
            try:
                push_from_all(engines, source, self._peers, weight_version=weight_version)
            finally:
                torch.cuda.empty_cache()
            return True

    return PolicyModelActor


def _trainer_class(base: Any) -> type:
    class PPOTrainer(base):  # type: ignore[misc]
        """OpenRLHF's controller, which passes the step on, and says when a sync follows a rollout."""

        _step = 0  # the number of finished training steps
        _whole = False  # whether syncs carry all weights

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            generator = self.samples_generator
            generate = generator._generate_vllm

            def generate_vllm(dataloader_iter: Any, **options: Any) -> Any:
                experiences, *rest = generate(dataloader_iter, **options)
                trains = dataloader_iter is generator._dataloader_iter and (experiences or generator._sample_buffer)
                if trains and self._whole:
                    self._call_engines("discard_at_next_sleep")
                return experiences, *rest

            generator._generate_vllm = generate_vllm

        def init_checkpoint_states(self) -> Any:
            states = super().init_checkpoint_states()
            self._step = states["global_step"]
            return states

        def train_step(self, rollout_samples: Any, global_step: int) -> Any:
            self._step = global_step + 1
            return super().train_step(rollout_samples, global_step)

        def broadcast_to_vllm(self) -> None:
            import ray

            if self.args.vllm.enable_sleep:
                self._call_engines("wake_up", tags=["weights"])
            version = str(self._step)
            calls = self.actor_model_group.async_run_method("broadcast_to_vllm", weight_version=version)
            self._whole = all(ray.get(calls))

        def _call_engines(self, method: str, **arguments: Any) -> None:
            from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call

            batch_vllm_engine_call(self.vllm_engines, method, **arguments)

    return PPOTrainer


def _sends_whole_models(args: Any, actor: Any) -> bool:
    """Whether OpenRLHF's trainer has all weights as a checkpoint holds them, on the GPUs of the engines."""
    return (
        args.train.colocate_all
        and not args.train.async_enable
        and args.ds.tensor_parallel_size == 1
        and not args.ds.lora.rank
        and not args.ds.load_in_4bit
        and not actor.is_vlm
    )


class _Engine:
    """An engine's actor as an `EngineHandle`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def sleep(self, level: Any = 1, tags: Any = None, mode: Any = "abort", keep: Any = None) -> Any:
        raise NotImplementedError  # OpenRLHF's controller does

    def wake_up(self, tags: Any = None) -> Any:
        raise NotImplementedError

    def devices(self) -> list[str]:
        devices: list[str] = self._result(self._actor.devices.remote())
        return devices

    def post_update(self, body: dict[str, Any]) -> Any:
        return self._result(self._actor.post_update.remote(body))

    def _result(self, call: Any) -> Any:
        """The result of a call. Ray's class for errors has another name than the error that it wraps."""
        import ray
        from ray.exceptions import RayTaskError

        try:
            return ray.get(call)
        except RayTaskError as error:
            raise (error.cause or error) from None


class _GatheredSource:
    """A model of DeepSpeed's ZeRO-3. Each parameter is whole on all ranks while it is sent, as in OpenRLHF's sync."""

    def __init__(self, model: torch.nn.Module) -> None:
        from rl_memory_plugins.weights.source import named_tensors

        self._named = list(named_tensors(model))

    def specs(self) -> list[TensorSpec]:
        from rl_memory_plugins.trainer import TensorSpec
        from rl_memory_plugins.weights.source import name_of

        return [TensorSpec(name, name_of(t.dtype), tuple(getattr(t, "ds_shape", t.shape))) for name, t in self._named]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        import deepspeed

        for name, tensor in self._named:
            with deepspeed.zero.GatheredParameters([tensor]):
                yield name, tensor.detach()


if __name__ == "__main__":
    importlib.import_module("rl_memory_plugins.integrations.openrlhf").main()  # Ray carries no classes of `__main__`
