"""A trainer in a process of its own: a transformers model, a policy gradient step, and weight updates of the engine."""

from __future__ import annotations

import multiprocessing as mp
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil


class Trainer:
    """The process's inside. Its model lies in memory only between `load` and `offload`."""

    def __init__(self, folder: Path, seed: int, threads: int) -> None:
        import torch

        from integration.models import new_model

        torch.set_num_threads(threads)
        self._torch = torch
        self._folder = folder
        self._file = folder / "trainer.pt"
        self._model = new_model(folder, seed)
        self.offload()

    def load(self) -> None:
        """Take the parameters back into memory."""
        for name, tensor in self._torch.load(self._file).items():
            self._model.get_parameter(name).data = tensor

    def offload(self) -> None:
        """Write the parameters to disk and free their memory."""
        self._torch.save(dict(self._model.named_parameters()), self._file)
        for parameter in self._model.parameters():
            parameter.data = parameter.new_empty(0)

    def train(self, prompts: list[list[int]], answers: list[list[int]], target: int, lr: float, steps: int) -> float:
        """REINFORCE with a baseline: tokens that are `target` get reward 1, others 0. Returns the mean reward."""
        torch = self._torch
        ids = torch.tensor([[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)])
        start = len(prompts[0])
        rewards = (ids[:, start:] == target).float()
        advantages = rewards - rewards.mean()
        model = self._model.train()
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        for _ in range(steps):
            logits = model(ids).logits[:, start - 1 : -1]
            chosen = torch.log_softmax(logits, -1).gather(-1, ids[:, start:, None]).squeeze(-1)
            loss = -(advantages * chosen).sum() / rewards.sum().clamp(min=1)
            model.zero_grad()
            loss.backward()
            norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= lr * parameter.grad / (norm + 1e-8)
        model.zero_grad(set_to_none=True)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        model.eval()
        return float(rewards.mean())

    def greedy(self, prompt: list[int], tokens: int) -> list[int]:
        """The model's own greedy answer."""
        torch = self._torch
        ids = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(tokens):
                ids = torch.cat([ids, self._model(ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        return [int(token) for token in ids[0, len(prompt) :]]

    def push(self, url: str, version: str) -> dict[str, Any]:
        """Stream the weights into the engine."""
        from rl_memory_plugins.client import EngineClient

        with EngineClient(url) as engine:
            return engine.update_weights(self._model, weight_version=version, bucket_bytes=64 << 20)

    def checksums(self) -> dict[str, str]:
        from rl_memory_plugins.weights.checksums import tensor_checksum

        return {name: tensor_checksum(tensor) for name, tensor in self._model.named_parameters()}


class TrainerProcess:
    """Starts a `Trainer` and calls its methods; an error there is raised here."""

    def __init__(self, folder: Path, seed: int, threads: int = 2) -> None:
        context = mp.get_context("spawn")
        self._pipe, inside = context.Pipe()
        self._process = context.Process(target=_serve, args=(inside, folder, seed, threads), daemon=True)
        self._process.start()
        self._receive()

    def call(self, method: str, *arguments: Any) -> Any:
        self._pipe.send((method, arguments))
        return self._receive()

    def resident_bytes(self) -> int:
        try:
            return int(psutil.Process(self._process.pid).memory_info().rss)
        except psutil.NoSuchProcess:
            return 0

    def stop(self) -> None:
        self._process.terminate()
        self._process.join(10)

    def _receive(self) -> Any:
        result, error = self._pipe.recv()
        if error:
            raise RuntimeError(f"the trainer failed:\n{error}")
        return result


def _serve(pipe: Connection, folder: Path, seed: int, threads: int) -> None:
    try:
        trainer = Trainer(folder, seed, threads)
        pipe.send((None, ""))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
        raise
    while True:
        method, arguments = pipe.recv()
        try:
            pipe.send((getattr(trainer, method)(*arguments), ""))
        except Exception:
            pipe.send((None, traceback.format_exc()))
