"""A trainer in its own process: a `transformers` model with its optimiser, training step and weight updates."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from integration.json_process import Child, serve

if TYPE_CHECKING:
    import torch

LEARNING_RATE = 5e-4
BUCKET_BYTES = 64 << 20


class Trainer:
    """The inside of the process. Weights and optimiser are in memory only from `load` to their offloading.

    Both sleep in a `PausableMemory`. On a CPU a copy in host memory would save nothing, so files keep the content.
    """

    def __init__(self, folder: Path, seed: int, threads: int) -> None:
        import torch

        from integration.models import new_model
        from rl_memory_plugins.trainer import PausableMemory

        torch.set_num_threads(threads)
        self._torch = torch
        self._model = new_model(folder, seed)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0
        )
        own = ("gradients", "parameters", "optimizer")
        self._memory = PausableMemory(self._model, self._optimizer, dropped=own, device="cpu")
        self._weights = OnDisk(folder / "weights.bin")
        self._moments = OnDisk(folder / "optimiser.bin")
        self.offload_weights()

    def load(self) -> None:
        """Take the weights and the optimiser's moments back into memory."""
        self._memory.wake()
        self._weights.load()
        self._moments.load()

    def offload_optimizer(self) -> None:
        """Write the optimiser's state to disk and free its memory."""
        states = self._optimizer.state.values()
        self._moments.save([tensor for state in states for tensor in state.values()])
        self._memory.sleep(["gradients", "optimizer"])
        _trim()

    def offload_weights(self) -> None:
        """Write the weights and buffers to disk and free their memory."""
        self._weights.save([*self._model.parameters(), *self._model.buffers()])
        self._memory.sleep(["parameters"])
        _trim()

    def train(self, prompts: list[list[int]], answers: list[list[int]], target: int, steps: int) -> float:
        """REINFORCE with a baseline: tokens that are `target` get reward 1, others 0. Returns the mean reward."""
        torch = self._torch
        ids = torch.tensor([[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)])
        start = len(prompts[0])
        rewards = (ids[:, start:] == target).float()
        advantages = rewards - rewards.mean()
        model = self._model.train()
        for _ in range(steps):
            logits = model(ids, use_cache=False).logits[:, start - 1 : -1]
            chosen = torch.log_softmax(logits, -1).gather(-1, ids[:, start:, None]).squeeze(-1)
            loss = -(advantages * chosen).sum() / rewards.sum().clamp(min=1)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        model.eval()
        return float(rewards.mean())

    def greedy(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """The model's own greedy answers to prompts of one length."""
        torch = self._torch
        ids = torch.tensor(prompts)
        with torch.no_grad():
            for _ in range(tokens):
                ids = torch.cat([ids, self._model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        return ids[:, len(prompts[0]) :].tolist()

    def push(self, url: str, version: str) -> int:
        """Stream the weights into the engine. Returns: the bytes of the weights."""
        from rl_memory_plugins.client import EngineClient

        with EngineClient(url) as engine:
            report = engine.update_weights(self._model, weight_version=version, bucket_bytes=BUCKET_BYTES)
        return int(report["bytes"])

    def checksums(self) -> dict[str, str]:
        from rl_memory_plugins.weights.checksums import tensor_checksum

        return {name: tensor_checksum(tensor) for name, tensor in self._model.named_parameters()}

    def calls(self) -> dict[str, Callable[..., Any]]:
        names = ("load", "offload_optimizer", "offload_weights", "train", "greedy", "push", "checksums")
        return {name: getattr(self, name) for name in names}


class OnDisk:
    """The content of tensors in a file, while their memory sleeps."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._away: list[torch.Tensor] = []

    def save(self, tensors: list[torch.Tensor]) -> None:
        with self._file.open("wb") as file:
            for tensor in tensors:
                tensor.detach().numpy().tofile(file)
        self._away = tensors

    def load(self) -> None:
        """Read the content into the tensors, which are awake."""
        if self._away:
            with self._file.open("rb", buffering=0) as file:
                for tensor in self._away:
                    file.readinto(tensor.detach().numpy().reshape(-1).view("uint8"))
        self._away = []


def _trim() -> None:
    """Make the C library return freed memory to the system; it keeps the memory of small tensors otherwise."""
    import ctypes

    ctypes.CDLL(None).malloc_trim(0)


def start(folder: Path, seed: int, threads: int = 2) -> Child:
    """A process with a `Trainer`, ready for calls of the methods that `Trainer.calls` names."""
    # Spinning threads would take the engine's cores. torch reads the variable at its import.
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    return Child("integration.trainer_process", str(folder), str(seed), str(threads), environment=environment)


if __name__ == "__main__":
    serve(lambda: Trainer(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])).calls())
