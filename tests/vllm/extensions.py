"""Worker extensions of the shapes that trainers bring; vLLM refuses one that shares a name with the worker."""

from __future__ import annotations

from typing import Any

SKIPPED = ("k_proj", "v_proj")


class TrainerExtension:
    """Method names of verl and checkpoint-engine, SkyRL, OpenRLHF and NeMo-RL, over one way of loading: the
    model's own `load_weights`, from checkpoint-named tensors that are made here from a seed."""

    def update_weights_from_ipc(self, folder: str, seed: int) -> int:
        """All in one call (verl, checkpoint-engine)."""
        return self._load(list(self._tensors(folder, seed)))

    def update_weights_ipc(self, folder: str, seed: int, start: int, count: int) -> int:
        """One bucket (SkyRL)."""
        return self._load(list(self._tensors(folder, seed))[start : start + count])

    def update_weight_cuda_ipc(self, folder: str, seed: int, name: str) -> int:
        """One parameter (OpenRLHF)."""
        return self._load([(name, dict(self._tensors(folder, seed))[name])])

    def update_weights_via_ipc_zmq(self, folder: str, seed: int) -> int:
        """Everything but parts of fused parameters: what a broken trainer may do."""
        tensors = self._tensors(folder, seed)
        return self._load([(name, tensor) for name, tensor in tensors if not any(part in name for part in SKIPPED)])

    def prepare_refit_info(self, folder: str, seed: int) -> list[str]:
        return [name for name, _ in self._tensors(folder, seed)]

    def skyrl_start_weight_update(self) -> None:
        self.started = True

    def fail_on_rank_0(self) -> str:
        if self.rank == 0:
            raise ValueError("rank 0 cannot")
        return "rank 1 can"

    def rank_of_worker(self) -> int:
        return self.rank

    def sleep_by_myself(self, level: int) -> None:
        """What ROLL's worker does."""
        self.sleep(level)

    def connect(self) -> None:
        """vLLM's transfer engines need GPUs."""
        self.weight_transfer_engine = Transfer(self)

    def _load(self, tensors: list[tuple[str, Any]]) -> int:
        self.model_runner.model.load_weights(iter(tensors))
        return len(tensors)

    def _tensors(self, folder: str, seed: int) -> Any:
        from pathlib import Path

        from integration.models import new_model

        return new_model(Path(folder), seed).state_dict().items()


class Transfer:
    """A transfer engine as vLLM's are for NCCL and CUDA IPC: its updates go through the layer-wise reload."""

    supports_draft_weight_update = True

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.reset_weight_update_target()

    def set_weight_update_target(self, model: Any, config: Any) -> None:
        self._target = model, config

    def reset_weight_update_target(self) -> None:
        self._target = self._worker.model_runner.model, self._worker.model_config

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self._target[0])

    def update_weights(self, info: dict[str, Any]) -> None:
        if "fail" in info:
            raise ConnectionError("the trainer is gone")
        tensors = list(self._worker._tensors(info["folder"], info["seed"]))
        self._target[0].load_weights(iter(tensors[info["start"] : info["start"] + info["count"]]))

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(*self._target)

    def shutdown(self) -> None:
        pass
