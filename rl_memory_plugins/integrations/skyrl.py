"""The adapter for SkyRL's colocated trainers. SkyRL's own entry point takes it from the command line:

    python -m skyrl.train.entrypoints.main_base trainer.override_entrypoint=rl_memory_plugins.integrations.skyrl ...

An entry point of your own adds one line:

    experiment = MyExperiment(cfg)  # a `BasePPOExp`
    use(experiment)
    experiment.run()

With the adapter

- SkyRL's engines have the package enabled;
- a sync is one update of this package, in which every trainer rank sends to the engine rank on its GPU: complete, or an
  error;
- the version of the weights is SkyRL's global step.

SkyRL sleeps at level 2 by itself. `reason_against` lists the experiments that stay SkyRL's own.

Trainer ranks are Ray actors. Ray has copied the methods of their class before this module can replace them. SkyRL hands
its client to every rank with every sync, so the client carries the adapter there: see `_Version`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rl_memory_plugins.hooking import Hooks
from rl_memory_plugins.integrations.engine_dtypes import EngineDtypes, cast_stream

if TYPE_CHECKING:
    from rl_memory_plugins.trainer import EngineClient, Peers

__all__ = ["main", "reason_against", "use"]

SYNC = "skyrl.backends.skyrl_train.weight_sync"
SERVERS = "skyrl.backends.skyrl_train.inference_servers"
ENTRYPOINT = "trainer.override_entrypoint="

hooks = Hooks("skyrl")
logger = logging.getLogger(__name__)


def main() -> None:
    """SkyRL's entry point with the adapter. Reads SkyRL's overrides from the command line."""
    import ray
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.utils import validate_cfg
    from skyrl.train.utils.utils import initialize_ray

    cfg = SkyRLTrainConfig.from_cli_overrides([one for one in sys.argv[1:] if not one.startswith(ENTRYPOINT)])
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(ray.remote(num_cpus=1)(_run).remote(cfg))


def _run(cfg: Any) -> None:
    from skyrl.train.entrypoints.main_base import BasePPOExp

    experiment = BasePPOExp(cfg)
    use(experiment)
    experiment.run()


def use(experiment: Any) -> None:
    """Let an experiment use this package. Call it before `run`.

    Experiments with a `reason_against` stay as they are, and the log names the reason.

    Args:
        experiment: SkyRL's `BasePPOExp`, or a subclass.

    Raises:
        UnsupportedError: names every symbol that the installed SkyRL does not have.
    """
    hooks.install(_install)
    reason = reason_against(experiment.cfg)
    if reason is not None:
        logger.warning("SkyRL's own weight sync stays: %s", reason)
        return
    kwargs = experiment.cfg.generator.inference_engine.engine_init_kwargs
    kwargs["additional_config"] = {"rl_memory": {}, **(kwargs.get("additional_config") or {})}
    make = experiment.get_inference_client

    def get_inference_client() -> Any:
        client = make()
        client.rl_memory = _Version(experiment)
        return client

    experiment.get_inference_client = get_inference_client


def reason_against(cfg: Any) -> str | None:
    """Why the weights of an experiment cannot travel in one update; `None` if they can.

    Args:
        cfg: SkyRL's `SkyRLTrainConfig`.
    """
    uses_lora = hooks.require(f"{SERVERS}.utils:_uses_lora_weight_sync")
    strategy = hooks.require(f"{SYNC}:get_transfer_strategy")
    engine, placement = cfg.generator.inference_engine, cfg.trainer.placement
    kwargs = engine.engine_init_kwargs
    reasons = [
        (strategy(engine.weight_sync_backend, placement.colocate_all) != "ipc", "the engines are on other GPUs"),
        (placement.policy_num_nodes > 1, "engines on other nodes ask for a key, which SkyRL's client cannot show"),
        (uses_lora(cfg), "SkyRL sends LoRA adapters"),
        (engine.data_parallel_size > 1, "each data-parallel engine has a server of its own"),
        (engine.enable_pd, "prefill and decode have engines of their own"),
        (engine.speculative_config or kwargs.get("speculative_config"), "the engines have a draft model"),
        (kwargs.get("quantization"), "the engines quantise the weights"),
    ]
    return next((reason for applies, reason in reasons if applies), None)


# -- from the experiment to the trainer's ranks ----------------------------------------------------------------

#: What the last client to arrive in this process has brought.
_arrived = SimpleNamespace(version=None)


class _Version:
    """The version of the weights as an attribute of SkyRL's client.

    Pickled, it is the trainer's global step at that time. Unpickled in another process, it installs the adapter there.
    """

    def __init__(self, experiment: Any) -> None:
        self._experiment = experiment

    def __reduce__(self) -> tuple[Any, ...]:
        step = getattr(getattr(self._experiment, "trainer", None), "global_step", None)
        return _arrive, (None if step is None else str(step),)


def _arrive(version: str | None) -> str | None:
    hooks.install(_install)
    _arrived.version = version
    return version


def _install(hooks: Hooks) -> None:
    hooks.wrap(f"{SYNC}:get_transfer_strategy_cls", _with_update)


def _with_update(original: Callable[..., type]) -> Callable[..., type]:
    """Give a rank that would send CUDA IPC handles the update of this package."""
    cuda_ipc = hooks.require(f"{SYNC}:CudaIpcTransferStrategy")

    def get_transfer_strategy_cls(*args: Any, **kwargs: Any) -> type:
        found: Any = original(*args, **kwargs)
        if found is not cuda_ipc:
            return found  # type: ignore[no-any-return]

        class Strategy(found):  # type: ignore[misc]
            """SkyRL's strategy for engines on the trainer's GPUs, with the update of this package.

            For a strategy that is not its own, SkyRL's FSDP trainer gathers parameters one by one, in the order in
            which it lists them. For its own it would hold a gigabyte of them.
            """

            @staticmethod
            def create_sender(init_info: Any, inference_client: Any) -> Sender:
                return Sender(inference_client.server_urls)

        return Strategy

    return get_transfer_strategy_cls


class Sender:
    """A `WeightTransferSender` of SkyRL's that sends all weights in one update.

    Args:
        urls: The addresses of all engines, in the order of their GPUs.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        self._engines: list[EngineClient] = []  # those whose first rank is on this trainer rank's GPU
        self._peers: Peers | None = None
        self._dtypes = EngineDtypes()

    async def send_chunks(self, chunks: Iterable[Any], weight_metadata: Mapping[str, Any]) -> None:
        """Send all weights. Every rank of the trainer calls it.

        Args:
            chunks: Whole tensors in the order of `weight_metadata`, the same on every rank.
            weight_metadata: Lists of `names`, `dtype_names` and `shapes`.

        Raises:
            RLMemoryError: on every rank, if the update failed on one.
        """
        from rl_memory_plugins.trainer import TensorSpec

        described = zip(*(weight_metadata[name] for name in ("names", "dtype_names", "shapes")), strict=True)
        specs = [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in described]
        tensors = (one for chunk in chunks for one in zip(chunk.names, chunk.tensors, strict=True))
        self._dtypes.push(
            self._engines,
            lambda dtypes: cast_stream(specs, tensors, dtypes),
            self._peers or self._meet(),
            weight_version=_arrived.version,
        )

    def teardown(self) -> None:
        for engine in self._engines:
            engine.close()

    def _meet(self) -> Peers:
        from rl_memory_plugins.trainer import EngineClient, Peers

        peers = self._peers = Peers()
        count = len(self._urls)
        self._engines += [
            EngineClient(url) for index, url in enumerate(self._urls) if index * peers.size // count == peers.rank
        ]
        return peers
