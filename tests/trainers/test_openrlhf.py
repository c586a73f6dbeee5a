"""The adapter for OpenRLHF on OpenRLHF's own classes, with toy ranks that take real updates in place of engines.

Stand-ins: Ray's remote calls, which run in this process; the engine below OpenRLHF's engine actor; and of a training
step all but the sync.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

for folder in ("unit/trainer", "unit/weights", "../integration/trainers/openrlhf_on_cpu"):
    sys.path.append(str((Path(__file__).parents[1] / folder).resolve()))

import ray  # noqa: E402
import vllm  # noqa: E402
from models import Tree  # noqa: E402
from openrlhf.trainer import ppo_trainer  # noqa: E402
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator  # noqa: E402
from openrlhf.trainer.ray import ppo_actor, vllm_engine  # noqa: E402
from process_pair import ProcessPair  # noqa: E402
from toy_engine import ToyEngine  # noqa: E402
from toys import checkpoint, loaded  # noqa: E402

from rl_memory_plugins.errors import ManifestError, UnsupportedError, WeightUpdateError  # noqa: E402
from rl_memory_plugins.integrations import openrlhf as integration  # noqa: E402

OWN = {
    "engine": vllm_engine.RolloutRayActor.__ray_actor_class__,
    "policy": ppo_actor.PolicyModelActor.__ray_actor_class__,
    "trainer": ppo_trainer.PPOTrainer.__ray_actor_class__,
}


class Actor:
    """A handle of an actor. Each call runs at once, in this process."""

    def __init__(self, called: Any) -> None:
        self._called = called

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._called, name))


@pytest.fixture(autouse=True)
def calls_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", lambda result: result)


# -- the command -----------------------------------------------------------------------------------------------


def test_openrlhf_s_command_gets_the_adapter_s_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}

    def command(name: str, run_name: str, alter_sys: bool) -> None:
        """The imports of OpenRLHF's command."""
        from openrlhf.trainer.ppo_trainer import PPOTrainer
        from openrlhf.trainer.ray.ppo_actor import PolicyModelActor

        found.update(
            command=(name, run_name),
            policy=PolicyModelActor,
            trainer=PPOTrainer,
            engine=vars(vllm_engine)["RolloutRayActor"],  # as `create_vllm_engines` finds it
        )

    for module, name in (
        (vllm_engine, "RolloutRayActor"),
        (ppo_actor, "PolicyModelActor"),
        (ppo_trainer, "PPOTrainer"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))  # undone at the end
    monkeypatch.setattr(integration.runpy, "run_module", command)
    integration.install.cache_clear()
    integration.main()
    integration.install()  # once more changes nothing
    assert found.pop("command") == ("openrlhf.cli.train_ppo_ray", "__main__")
    assert found["trainer"] is ppo_trainer.PPOTrainer
    for part, actor in found.items():
        made = actor.__ray_actor_class__
        assert made.__base__ is OWN[part]
        assert made.__name__ == OWN[part].__name__


def test_an_openrlhf_without_a_class_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    own = vllm_engine.RolloutRayActor
    monkeypatch.delattr(ppo_trainer, "PPOTrainer")
    integration.install.cache_clear()
    with pytest.raises(UnsupportedError, match=r"ppo_trainer:PPOTrainer.*openrlhf 0\.11"):
        integration.install()
    assert vllm_engine.RolloutRayActor is own


# -- the engine ------------------------------------------------------------------------------------------------


def started(monkeypatch: pytest.MonkeyPatch, **kwargs: Any) -> tuple[Any, dict[str, Any], list[Any]]:
    """An engine's actor, the arguments of its engine, and the sleeps of its engine."""
    arguments: dict[str, Any] = {}
    sleeps: list[Any] = []

    class Engine:
        async def is_sleeping(self) -> bool:
            return False

        async def sleep(self, level: int) -> None:
            sleeps.append(level)

    monkeypatch.setenv("RAY_ADDRESS", "none")
    monkeypatch.setattr(vllm, "AsyncEngineArgs", lambda **given: arguments.update(given))
    monkeypatch.setattr(vllm.AsyncLLMEngine, "from_engine_args", lambda _: Engine())
    made = integration._engine_class(OWN["engine"])
    actor = made.__new__(made)
    asyncio.run(actor.__init__(model="m", distributed_executor_backend="uni", bundle_indices=None, **kwargs))
    return actor, arguments, sleeps


def test_an_engine_that_shares_its_gpu_has_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert started(monkeypatch, num_gpus=0.2)[1]["additional_config"] == {"rl_memory": {}}
    options = {"rl_memory": {"poison": True}, "other": 1}
    assert started(monkeypatch, num_gpus=0.2, additional_config=options)[1]["additional_config"] == options
    monkeypatch.setenv("RL_MEMORY", "poison=true")
    assert started(monkeypatch, num_gpus=0.2)[1]["additional_config"] == {"rl_memory": {"poison": True}}
    assert "additional_config" not in started(monkeypatch, num_gpus=1)[1]


def test_one_sleep_after_the_announcement_discards_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    actor, _, sleeps = started(monkeypatch, num_gpus=0.2)

    async def calls() -> None:
        await actor.sleep()
        await actor.discard_at_next_sleep()
        await actor.sleep()
        await actor.sleep()
        await actor.sleep(level=2)

    asyncio.run(calls())
    assert sleeps == [1, 2, 1, 2]


# -- the controller --------------------------------------------------------------------------------------------


class Controller:
    """The adapter's controller in OpenRLHF's own loop.

    Args:
        rollouts: By rollout, the number of its samples; 0 if all are filtered out.
        step: The step of the checkpoint that the run resumes.
        whole: Whether the trainer's syncs carry all weights.

    Attributes:
        log: Calls to the engine and to the trainer's ranks.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        rollouts: list[int],
        *,
        step: int = 0,
        whole: bool = True,
        every: int = 99,
    ) -> None:
        self.log: list[Any] = []
        left = iter(rollouts)
        log = self.log

        class Engine:
            def sleep(self, level: int = 1) -> None:
                log.append("sleep")

            def discard_at_next_sleep(self) -> None:
                log.append("discard")

            def wake_up(self, tags: Any = None) -> None:
                log.append(("wake", *(tags or ())))

        class Group:
            def async_run_method(self, name: str, weight_version: str) -> list[bool]:
                log.append((name, weight_version))
                return [True, whole]

        class Loader(list[int]):
            state_dict = load_state_dict = lambda *_: {}

        def generate(self: Any, dataloader_iter: Any, **_: Any) -> Any:
            if dataloader_iter is getattr(self, "_eval_dataloader_iter", None):
                log.append("evaluate")
                return [object()], 1, True
            log.append("generate")
            made = next(left)
            return [object()] * made, 1, not left.__length_hint__()

        def init(self: Any) -> None:
            n = SimpleNamespace
            self.args = n(
                vllm=n(enable_sleep=True),
                rollout=n(batch_size=2, n_samples_per_prompt=1),
                algo=n(dynamic_filtering_enable=True),
                train=n(num_episodes=1),
                eval=n(steps=every, temperature=1.0, n_samples_per_prompt=1),
                ckpt=n(path="/nowhere", load_enable=False),
            )
            self.vllm_engines = [Actor(Engine())]
            self.actor_model_group = Group()
            self.prompts_dataloader, self.eval_dataloader = Loader([1]), Loader([1])
            self.samples_generator = SamplesGenerator(n(args=self.args), [1], [1], None, self.vllm_engines)
            self.generate_kwargs = {}
            self.wandb_logger = self.tensorboard_logger = None

        base = ppo_trainer.BasePPOTrainer

        def train(self: Any, samples: Any, global_step: int) -> Any:
            self.broadcast_to_vllm()
            return {}, global_step + 1

        states = {"episode": 0, "global_step": step, "total_consumed_prompts": 0, "data_loader_state_dict": {}}
        monkeypatch.setattr(OWN["trainer"], "__init__", init)
        monkeypatch.setattr(SamplesGenerator, "_generate_vllm", generate)
        monkeypatch.setattr(base, "train_step", train)
        monkeypatch.setattr(base, "init_checkpoint_states", lambda _: states)
        monkeypatch.setattr(base, "restore_best_checkpoint_state", lambda *_: None)
        monkeypatch.setattr(base, "save_logs_and_checkpoints", lambda *_: None)
        monkeypatch.setattr(base, "save_best_checkpoint", lambda *_: None)
        monkeypatch.setattr(ppo_trainer, "compute_eval_metrics", lambda *_: {})
        integration._trainer_class(OWN["trainer"])().fit()


def sync(step: int) -> list[Any]:
    return [("wake", "weights"), ("broadcast_to_vllm", str(step))]


ROLLOUT: list[Any] = [("wake",), "generate"]


def test_sleeps_before_a_sync_discard_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Controller(monkeypatch, [2, 2, 2])
    later = [*ROLLOUT, "discard", "sleep"]
    assert made.log == [*ROLLOUT, "sleep", *sync(1), *later, *sync(2), *later, *sync(3)]


def test_sleeps_before_another_rollout_keep_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Controller(monkeypatch, [0, 2, 0, 1, 0], every=2)
    empty = [*ROLLOUT, "sleep"]
    evaluation = [("wake",), "evaluate", "sleep"]
    assert made.log == [
        *empty, *ROLLOUT, "sleep", *sync(1), *empty, *ROLLOUT, "discard", "sleep", *sync(2), *evaluation, *empty,
    ]  # fmt: skip


def test_a_resumed_run_sends_the_step_of_its_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Controller(monkeypatch, [2], step=7)
    assert made.log == [*sync(7), *ROLLOUT, "discard", "sleep", *sync(8)]


def test_syncs_of_a_part_of_the_weights_keep_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "discard" not in Controller(monkeypatch, [2, 2, 2], whole=False).log


# -- a rank of the trainer -------------------------------------------------------------------------------------


def policy(module: torch.nn.Module, engines: list[Any], *, stage: int = 2, tp: int = 1, **changes: Any) -> Any:
    """The adapter's rank of a trainer with these arguments."""
    made = integration._policy_class(OWN["policy"])
    rank = made.__new__(made)
    n = SimpleNamespace
    rank.strategy = n(
        args=n(
            train=n(colocate_all=changes.get("colocated", True), async_enable=changes.get("asynchronous", False)),
            ds=n(
                tensor_parallel_size=changes.get("deepspeed_tp", 1),
                lora=n(rank=changes.get("lora", 0)),
                load_in_4bit=changes.get("in_4bit", False),
                zero_stage=stage,
            ),
            vllm=n(tensor_parallel_size=tp),
        )
    )
    rank.actor = n(is_vlm=changes.get("images", False), model=n(module=module))
    rank.vllm_engines = [Actor(engine) for engine in engines]
    return rank


def assert_holds(engine: ToyEngine, tensors: dict[str, torch.Tensor]) -> None:
    for index, rank in enumerate(engine.ranks):
        rank.model.assert_unchanged(loaded(tensors, index, len(engine.ranks)))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_sync_is_one_update(stage: int) -> None:
    engine = ToyEngine()
    for step in range(2):
        assert policy(Tree(checkpoint(step)), [engine], stage=stage).broadcast_to_vllm(weight_version=str(step)) is True
        assert_holds(engine, checkpoint(step))
        assert engine.version == str(step)
    assert [call for call, *_ in engine.log] == ["post_update"] * 2


def test_persistent_buffers_are_sent() -> None:
    """An engine loads them from the checkpoint, so after level 2 nothing else would bring them back."""
    tensors = checkpoint(1)
    name = list(tensors)[-1]
    module = Tree({key: tensor for key, tensor in tensors.items() if key != name})
    *path, attribute = name.split(".")
    owner = module
    for part in path:
        if part not in owner._modules:
            owner.add_module(part, torch.nn.Module())
        owner = owner._modules[part]
    owner.register_buffer(attribute, tensors[name])
    engine = ToyEngine()
    policy(module, [engine]).broadcast_to_vllm(weight_version="1")
    assert_holds(engine, tensors)


def test_missing_tensors_are_an_error_and_the_next_sync_mends_it() -> None:
    engine = ToyEngine()
    tensors = checkpoint(2)
    short = dict(list(tensors.items())[:-1])
    with pytest.raises(ManifestError):
        policy(Tree(short), [engine]).broadcast_to_vllm(weight_version="1")
    assert engine.valid and engine.version is None  # it has refused them before the first byte
    policy(Tree(tensors), [engine]).broadcast_to_vllm(weight_version="1")
    assert_holds(engine, tensors)
    assert engine.valid


@pytest.mark.parametrize("change", ["asynchronous", "lora", "in_4bit", "images", "deepspeed_tp", "colocated"])
def test_other_syncs_stay_openrlhf_s_own(change: str) -> None:
    engine = ToyEngine()
    own: list[str] = []
    value = {"lora": 8, "deepspeed_tp": 2, "colocated": False}.get(change, True)
    rank = policy(Tree(checkpoint()), [engine], **{change: value})
    rank.trainer = SimpleNamespace(broadcast_to_vllm=lambda: own.append(change))
    assert rank.broadcast_to_vllm(weight_version="1") is False
    assert rank.broadcast_to_vllm() is False  # as asynchronous training calls it
    assert own == [change] * 2
    assert engine.log == []


# -- DeepSpeed's ZeRO-3 on two ranks ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> Iterator[ProcessPair]:
    with ProcessPair() as pair:
        yield pair


def partitioned(seed: int) -> torch.nn.Module:
    """A model of which each rank has a part."""
    import deepspeed

    os.environ["LOCAL_RANK"] = "0"  # as OpenRLHF's actor sets it
    # Ranks that compile it wait for ever for the lock of a process that was killed in its compilation.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = Tree(checkpoint(seed))
    deepspeed.zero.Init(module=model, config_dict_or_path={"train_batch_size": 2, "zero_optimization": {"stage": 3}})
    assert any(parameter.ds_tensor.numel() < parameter.ds_numel for parameter in model.parameters())
    return model


def sync_as_rank(rank: int, tp: int, fails: bool = False) -> None:
    ray.get = lambda result: result
    engines = [ToyEngine(tp=tp, first_device=index * tp) for index in range(2 // tp)]
    sender = rank % tp == 0
    own = engines[rank // tp]
    for seed in (1, 2):
        made = policy(partitioned(seed), engines, stage=3, tp=tp)
        if fails:
            if rank == 0:
                own.fail["post_update"] = WeightUpdateError("the engine is out of memory")
            with pytest.raises(WeightUpdateError, match="out of memory"):
                made.broadcast_to_vllm(weight_version=str(seed))
        made.broadcast_to_vllm(weight_version=str(seed))
        if sender:
            assert_holds(own, checkpoint(seed))
            assert own.version == str(seed)
        else:
            assert own.log == []
        assert all(not parameter.data.numel() for parameter in made.actor.model.module.parameters())


@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_of_zero_3_gather_in_step(pair: ProcessPair, tp: int) -> None:
    pair.run(sync_as_rank, tp, timeout_s=120)


def test_ranks_of_zero_3_fail_together(pair: ProcessPair) -> None:
    pair.run(sync_as_rank, 1, True, timeout_s=120)
