"""The trainer of `bench_step`: a model with AdamW on one GPU, and the ways to hand the GPU over."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from integration.engines.native import NativeControl
from integration.models import new_model
from rl_memory_plugins.trainer import EngineClient, ModelSource, Offloader, PausableMemory, RolloutHandoff

SEED = 5
BATCH = (4, 64)


class Trainer:
    """Parameters and AdamW's state in float32; the computation is in bfloat16, as FSDP's mixed precision has it.

    Attributes:
        rank, ranks: The position of this process in the trainer, and the number of its processes.
    """

    rank, ranks = 0, 1

    def __init__(self, folder: Path, device: str) -> None:
        torch.use_deterministic_algorithms(True, warn_only=True)  # the losses of all subjects must be equal
        # That also fills every new tensor, in host memory too, which would count as time of the transitions.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        self.device = device
        with torch.device(device):
            self.model = new_model(folder, SEED)
        self.model.config._attn_implementation = "eager"
        self.optimizer = self._optimizer()

    def _optimizer(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=self.device == "cuda")

    def meet(self) -> None:
        """Wait for all processes of the trainer."""

    def gather(self, text: str) -> list[str]:
        """The texts of all processes, by rank."""
        return [text]

    def train(self, step: int) -> float:
        """One step. Returns: the loss of this process's batch."""
        generator = torch.Generator().manual_seed(step * self.ranks + self.rank)
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

    def left(self) -> dict[str, int]:
        """The bytes by cause that a trainer which sleeps leaves on its GPU; empty if it cannot tell."""
        return {}


class Native(Way):
    """The engine's own sleep and update; parameters and states move as verl 0.9.1 moves those of FSDP2.

    verl offloads both when the training ends, and its update takes each parameter from host memory.
    """

    def __init__(self, trainer: Trainer, engine: str, url: str, dtype: torch.dtype) -> None:
        self._trainer = trainer
        self._dtype = dtype
        self._control = NativeControl(engine, url, self._sent, trainer.rank, trainer.gather)
        self._control.connect()

    def _sent(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._trainer.model.named_parameters():
            there = parameter.detach().to(self._trainer.device, non_blocking=True)
            yield name, (there.full_tensor() if isinstance(there, DTensor) else there).to(self._dtype)

    def release(self) -> dict[str, float]:
        self._on_engine(self._control.sleep)
        self._move(self._trainer.device)
        torch.cuda.synchronize()
        return {}

    def back(self) -> dict[str, float]:
        self._move("cpu")
        torch.cuda.empty_cache()
        self._on_engine(self._control.wake_weights)
        self._control.update()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self._on_engine(self._control.wake_rest)
        return {}

    def _on_engine(self, call: Callable[[], None]) -> None:
        """Rank 0 calls the engine, once all ranks are here; the others wait for the end of the call."""
        self._trainer.meet()
        if self._trainer.rank == 0:
            call()
        self._trainer.meet()

    def _move(self, device: str) -> None:
        # To the CPU, torch allocates page-locked memory for copies that do not block.
        self._trainer.model.to(device, non_blocking=True)
        for state in self._trainer.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[name] = value.to(device, non_blocking=True)


class Handoff(Way):
    """A `RolloutHandoff`, with an `Offloader` or with a `PausableMemory`."""

    def __init__(self, trainer: Trainer, url: str, *, pausable: bool, overlap: bool) -> None:
        self._memory: PausableMemory | None = None
        if pausable:
            self._memory = PausableMemory(trainer.model, trainer.optimizer, device=trainer.device)
            weights: list[Any] = [self._memory.part("parameters")]
            others: list[Any] = [self._memory.part("gradients", "optimizer")]
        else:
            moves: dict[str, Any] = {"moves": lambda tensor: True} if trainer.device == "cpu" else {}
            weights, others = [Offloader(trainer.model, **moves)], [Offloader(trainer.optimizer, **moves)]
        source = ModelSource(trainer.model, dtype="engine")
        engines = [EngineClient(url)] if trainer.rank == 0 else []
        self._handoff = RolloutHandoff(engines, source, weights=weights, others=others, overlap=overlap)

    def release(self) -> dict[str, float]:
        return self._handoff.release().seconds

    def back(self) -> dict[str, float]:
        report = self._handoff.sync()
        parts = {f"sync_{name}": one for name, one in report.update["seconds"].items()}
        for rank in report.update["receivers"]:
            for name, one in rank["seconds"].items():
                parts[f"sync_rank_{name}"] = max(one, parts.get(f"sync_rank_{name}", 0.0))
        return report.seconds | parts

    def left(self) -> dict[str, int]:
        return {} if self._memory is None else self._memory.left()

    def trainer_bytes(self) -> int:
        asleep = 0
        if self._memory is not None:
            asleep = sum(one.bytes for one in self._memory.status().values() if one.state != "resident")
        return super().trainer_bytes() - asleep


def way(subject: str, trainer: Trainer, engine: str, url: str, dtype: str) -> Way:
    if subject == "native":
        return Native(trainer, engine, url, getattr(torch, dtype))
    return Handoff(trainer, url, pausable=subject != "offloader", overlap=subject == "pausable_overlap")
