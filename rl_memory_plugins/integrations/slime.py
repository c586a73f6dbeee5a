"""The adapter for colocated engines of slime and of its fork miles. One argument of the trainer enables it:

    --custom-megatron-init-path rl_memory_plugins.integrations.slime.enable

slime calls the named function in every process of its trainer, before it makes the object that sends the weights. With
the adapter a sync is one update of this package, in which every trainer rank sends to the engine rank on its GPU:
complete, or an error. The version of the weights is slime's own.

The engines need the package too: `RL_MEMORY=1` in the environment of Ray's job. slime then sleeps at level 2 by itself.

slime's iterator converts Megatron's shards in step on all ranks, and does not list its tensors in advance. The first
sync therefore converts twice: once for names, dtypes and shapes, and once to send.

Syncs that are not whole models as a checkpoint holds them stay slime's own: quantised models, LoRA adapters, trained or
served draft models, prefill and decode engines, and engines that the package does not serve or that have other GPUs
than the trainer or more than one node's.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rl_memory_plugins.hooking import Hooks
from rl_memory_plugins.integrations.engine_dtypes import EngineDtypes, cast_stream

if TYPE_CHECKING:
    import torch

    from rl_memory_plugins.trainer import TensorSpec

    Updater = Any  # slime's or miles' `UpdateWeightFromTensor`

__all__ = ["enable"]

UPDATER = "backends.megatron_utils.update_weight.update_weight_from_tensor:UpdateWeightFromTensor"
#: Arguments of models that no engine holds whole, and of engines that the package does not serve.
OTHERS = ("indep_dp", "mtp_num_layers", "prefill_num_servers", "sglang_speculative_algorithm")

hooks = Hooks("slime", "miles")


def enable(args: Any = None) -> None:
    """Replace the sync of the trainer whose process this is. A function of your own for the same argument may call it.

    Args:
        args: The trainer's arguments. Not used: slime passes them.

    Raises:
        UnsupportedError: the trainer has no `UpdateWeightFromTensor`.
    """
    trainer = next((name for name in ("slime", "miles") if f"{name}.backends.megatron_utils" in sys.modules), "slime")
    hooks.wrap(f"{trainer}.{UPDATER}.update_weights", _replaced)


def _replaced(original: Callable[[Updater], None]) -> Callable[[Updater], None]:
    syncs: weakref.WeakKeyDictionary[Updater, _Sync] = weakref.WeakKeyDictionary()

    def update_weights(self: Updater) -> None:
        import torch

        if not _is_whole(self):
            original(self)
            return
        if self not in syncs:
            syncs[self] = _Sync()
        self.weight_version += 1
        with torch.no_grad():
            syncs[self].send(self)

    return update_weights


def _is_whole(updater: Updater) -> bool:
    """Whether a sync carries all weights of engines that have the package, as a checkpoint holds them."""
    args = updater.args
    return (
        not updater.use_distribute  # engines on other GPUs
        and updater.quantization_config is None
        and not getattr(updater, "is_lora", False)
        and getattr(updater, "_mm_tower_named_tensors", lambda: None)() is None  # miles adds tensors to its iterator's
        and args.offload_rollout  # else SGLang has no memory saver
        and args.sglang_pp_size == 1
        and args.rollout_num_gpus_per_engine <= args.num_gpus_per_node
        and not any(getattr(args, name, None) for name in OTHERS)
    )


class _Sync:
    """The updates by one of slime's objects. All ranks of the trainer make and call it together."""

    def __init__(self) -> None:
        from rl_memory_plugins.trainer import Peers

        self._peers = Peers()  # kept: slime destroys its process groups while it sleeps, and makes the same ones anew
        self._specs: list[TensorSpec] = []
        self._dtypes = EngineDtypes()

    def send(self, updater: Updater) -> None:
        """Send all weights.

        Raises:
            RLMemoryError: on every rank, if the update failed on one.
        """
        from rl_memory_plugins.trainer import EngineClient, aggressive_empty_cache
        from rl_memory_plugins.weights.source import spec_of

        urls = self._peers.agree(lambda: _urls(updater, self._peers.rank))[self._peers.rank]
        engines = [EngineClient(url) for url in urls]
        if not self._specs:
            self._specs = [spec_of(name, tensor) for name, tensor in _tensors(updater)]
        paused = getattr(updater.args, "pause_generation_mode", "abort")  # miles' argument; slime aborts
        options: dict[str, Any] = {
            "weight_version": str(updater.weight_version),
            "mode": "abort" if paused == "abort" else "keep",
        }
        try:
            self._dtypes.push(
                engines, lambda dtypes: cast_stream(self._specs, _tensors(updater), dtypes), self._peers, **options
            )
        finally:
            aggressive_empty_cache(max_rounds=0)  # the gathers' memory, before the engine takes its KV cache's
            for engine in engines:
                engine.close()


def _tensors(updater: Updater) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of the checkpoint, whole, by slime's iterator. Every rank must read all of them."""
    for chunk in updater._hf_weight_iterator.get_hf_weight_chunks(updater.weights_getter()):
        yield from chunk


def _urls(updater: Updater, rank: int) -> list[str]:
    """The addresses of the engines that a trainer rank controls: the engine whose first GPU is the rank's, or none."""
    import ray

    if updater._ipc_engine is None or updater._ipc_gather_src != rank:
        return []
    asked = getattr(updater._ipc_engine, "get_url", None) or updater._ipc_engine.get_topology_info  # miles' method
    answer = ray.get(asked.remote())
    return [answer if isinstance(answer, str) else answer["url"]]
