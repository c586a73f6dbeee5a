"""The trainer of `bench_step`: a model with AdamW on one GPU, and the ways to hand the GPU over."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from integration.engines.native import NativeControl
from integration.models import new_model
from rl_memory_plugins.trainer import EngineClient, ModelSource, Offloader, PausableMemory, RolloutHandoff

SEED = 5
BATCH = (4, 64)


class Trainer:
    """Parameters and AdamW's state in float32; the computation is in bfloat16, as FSDP's mixed precision has it."""

    def __init__(self, folder: Path, device: str) -> None:
        torch.use_deterministic_algorithms(True, warn_only=True)  # the losses of all subjects must be equal
        self.device = device
        with torch.device(device):
            self.model = new_model(folder, SEED)
        self.model.config._attn_implementation = "eager"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device == "cuda")

    def train(self, step: int) -> float:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(2, 900, BATCH, generator=generator).to(self.device)
        with torch.autocast(self.device, torch.bfloat16):
            logits = self.model(ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


class Way(ABC):
    """One subject's way between a rollout and the training, both directions."""

    @abstractmethod
    def release(self) -> dict[str, float]:
        """From the last token to the trainer's computation. Returns: seconds by step, where they are known."""

    @abstractmethod
    def back(self) -> dict[str, float]:
        """From the end of the training to an engine that admits requests."""

    def trainer_bytes(self) -> int:
        """The trainer's bytes on the GPU."""
        return torch.cuda.memory_reserved()


class Native(Way):
    """The engine's own sleep and update; parameters and states move as verl moves those of FSDP2."""

    def __init__(self, trainer: Trainer, engine: str, url: str, dtype: torch.dtype) -> None:
        self._trainer = trainer
        self._control = NativeControl(engine, url, self._sent)
        self._dtype = dtype

    def _sent(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._trainer.model.named_parameters():
            yield name, parameter.detach().to(self._dtype)

    def release(self) -> dict[str, float]:
        self._control.sleep()
        self._trainer.model.to(self._trainer.device)
        self._move_states(self._trainer.device)
        return {}

    def back(self) -> dict[str, float]:
        self._move_states("cpu")
        _empty_cache()
        self._control.wake_weights()
        self._control.update()
        self._trainer.model.to("cpu")
        _empty_cache()
        self._control.wake_rest()
        return {}

    def _move_states(self, device: str) -> None:
        for state in self._trainer.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[name] = value.to(device, non_blocking=True)
        torch.cuda.synchronize()


class Handoff(Way):
    """A `RolloutHandoff`, with an `Offloader` or with a `PausableMemory`."""

    def __init__(self, trainer: Trainer, url: str, *, pausable: bool) -> None:
        self._memory: PausableMemory | None = None
        if pausable:
            self._memory = PausableMemory(trainer.model, trainer.optimizer, device=trainer.device)
            weights: list[Any] = [self._memory.part("parameters")]
            others: list[Any] = [self._memory.part("gradients", "optimizer")]
        else:
            moves: dict[str, Any] = {"moves": lambda tensor: True} if trainer.device == "cpu" else {}
            weights, others = [Offloader(trainer.model, **moves)], [Offloader(trainer.optimizer, **moves)]
        source = ModelSource(trainer.model, dtype="engine")
        self._handoff = RolloutHandoff(EngineClient(url), source, weights=weights, others=others)

    def release(self) -> dict[str, float]:
        return self._handoff.release().seconds

    def back(self) -> dict[str, float]:
        return self._handoff.sync().seconds

    def trainer_bytes(self) -> int:
        asleep = 0
        if self._memory is not None:
            asleep = sum(one.bytes for one in self._memory.status().values() if one.state != "resident")
        return super().trainer_bytes() - asleep


def way(subject: str, trainer: Trainer, engine: str, url: str, dtype: str) -> Way:
    if subject == "native":
        return Native(trainer, engine, url, getattr(torch, dtype))
    return Handoff(trainer, url, pausable=subject == "pausable")


def _empty_cache() -> None:
    gc.collect()
    torch.cuda.empty_cache()
