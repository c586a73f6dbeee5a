"""A tensor-parallel engine and an FSDP2 trainer on the same two GPUs, through whole training steps.

    python -m integration.fsdp_handoff --engine vllm --device cuda
    python -m integration.fsdp_handoff --quick                     # on the CPU, over Gloo

Each cycle is a `RolloutHandoff` on both trainer processes: the engine sleeps at level 2, both ranks train, the engine's
weights wake, each trainer process sends to the engine's rank on its own GPU while both gather, and the KV cache wakes.
The last cycle sends from host memory. Then the trainer's weights are saved as a checkpoint, and a fresh engine that
loads it must give the same tokens and the same checksums. Writes a JSON record; exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from integration.engines import ENGINES
from integration.engines.base import Launch, Server
from integration.models import SHAPES, new_model, write_model

RANKS = 2
SEED = 5
PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12], [100, 200, 300, 400], [17, 3, 950, 21]]
TOKENS = 32
TRAINER_TIMEOUT_S = 180


class Trainer:
    """One rank."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self._torch, self._dist = torch, dist
        self._rank = int(os.environ["RANK"])
        if arguments.device == "cuda":
            torch.cuda.set_device(self._rank)
        else:
            torch.set_num_threads(1)
        dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo")
        mesh = init_device_mesh(arguments.device, (RANKS,))
        self._device = torch.device(arguments.device)
        self.model = new_model(arguments.model, SEED)
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.model.to(self._device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._dtype = getattr(torch, arguments.dtype)
        self._url = arguments.url

    def run(self, cycles: int) -> dict[str, Any]:
        from rl_memory_plugins.trainer import EngineClient, ModelSource, Offloader, RolloutHandoff

        everything: dict[str, Any] = {"moves": lambda tensor: True} if self._device.type == "cpu" else {}
        parts = {
            "weights": [Offloader(self.model, **everything)],
            "others": [Offloader(self.optimizer, **everything)],
        }
        engines = [EngineClient(self._url, timeout_s=120)] if self._rank == 0 else []
        source = ModelSource(self.model, dtype=self._dtype)
        from_device = RolloutHandoff(engines, source, **parts)
        from_host = RolloutHandoff(engines, source, from_host=True, **parts)
        found = []
        for cycle in range(1, cycles + 1):
            handoff = from_host if cycle == cycles else from_device
            with handoff.training(str(cycle)) as report:
                loss = self._train(cycle)
            found.append(
                {
                    "from_host": handoff is from_host,
                    "loss": loss,
                    "seconds": report.seconds,
                    "moved_bytes": report.moved_bytes,
                    "update": {key: report.update.get(key) for key in ("bytes", "buckets", "transport", "fallbacks")},
                    "served": [receiver["rank"] for receiver in report.update["receivers"]],
                }
            )
        from_device.release()  # loads the weights
        return {"rank": self._rank, "cycles": found}

    def _train(self, cycle: int) -> float:
        torch = self._torch
        torch.manual_seed(100 * cycle + self._rank)
        ids = torch.randint(2, 900, (4, 64), device=self._device)
        logits = self.model(ids, use_cache=False).logits[:, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss)

    def save(self, folder: Path) -> dict[str, str]:
        """Write a checkpoint in the engine's dtype. Returns its checksums; all ranks call it."""
        from safetensors.torch import save_file

        from rl_memory_plugins.weights.checksums import tensor_checksum

        whole = {
            name: parameter.detach().full_tensor().to(self._dtype).cpu().contiguous()
            for name, parameter in self.model.named_parameters()
        }
        if self._rank == 0:
            save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
        self._dist.barrier()
        return {name: tensor_checksum(tensor) for name, tensor in whole.items()}


def train(arguments: argparse.Namespace) -> None:
    """What each process of torchrun does."""
    trainer = Trainer(arguments)
    found = trainer.run(arguments.cycles)
    found["checksums"] = trainer.save(arguments.model)
    (arguments.scratch / f"rank-{found['rank']}.json").write_text(json.dumps(found))
    trainer._dist.destroy_process_group()


def run_trainer(arguments: argparse.Namespace, launch: Launch, url: str, scratch: Path) -> list[dict[str, Any]]:
    """All ranks' results."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += ["-m", "integration.fsdp_handoff", "--trainer", "--device", launch.device, "--dtype", launch.dtype]
    command += ["--model", str(launch.model), "--url", url, "--scratch", str(scratch), "--cycles", str(arguments.cycles)]
    subprocess.run(command, check=True, timeout=TRAINER_TIMEOUT_S)
    return [json.loads((scratch / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]


def answers(server: Server) -> dict[str, Any]:
    return {
        "tokens": [server.generate(prompt, TOKENS) for prompt in PROMPTS],
        "checksums": server.control.checksums()["tensors"],
        "version": server.control.weight_version(),
    }


def run(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    kind = ENGINES[arguments.engine]()
    shape = SHAPES["tiny" if arguments.quick else arguments.shape]
    launch = Launch(
        scratch / "model",
        tp=RANKS,
        device=arguments.device,
        dummy_weights=True,
        kv_bytes=arguments.kv_gib << 30 if arguments.device == "cuda" else 64 << 20,
    )
    write_model(launch.model, shape, dtype=launch.dtype)
    server = Server(kind, launch, arguments.out / f"fsdp-{arguments.engine}.log")
    try:
        server.wait_ready()
        begun = answers(server)
        trained = run_trainer(arguments, launch, server.url, scratch)
        # The trainer left the engine asleep: its weights are there to be saved. Nothing has changed since the last
        # update, so waking at level 2's end needs one more.
        checks = {"asleep while the trainer has the devices": not server.control.memory()["admitting"]}
    finally:
        server.stop()
    return {"begun": begun, "trained": trained, "checks": checks}


def main() -> int:
    raise NotImplementedError
