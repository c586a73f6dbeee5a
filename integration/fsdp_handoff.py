"""A tensor-parallel engine and an FSDP2 trainer on the same two GPUs, through whole training steps.

    python -m integration.fsdp_handoff --engine vllm --device cuda
    python -m integration.fsdp_handoff --engine vllm               # on the CPU, over Gloo, with a tiny model

Each cycle is a `RolloutHandoff` on both trainer processes. The engine sleeps at level 2; both processes train; the
engine's weights wake; each process gathers with the other and sends to the engine's rank on its own GPU; the KV cache
wakes; the engine answers. The last cycle sends from host memory. The trainer saves its last weights as a checkpoint. A
fresh engine that loads the checkpoint must give the same tokens. The script writes a JSON record, and exits with code 1
if a check fails.

    python -m integration.fsdp_handoff --engine vllm --shards --transport gloo
    python -m integration.fsdp_handoff --engine vllm --device cuda --apart --shards --transport nccl   # four GPUs

With `--shards` nobody gathers: each process sends what its shards have of the slices that each rank needs. The record
says how many bytes each rank received, and `received_share` what part these are of all tensors for all ranks. With
`--apart` the trainer has GPUs of its own, the two after the engine's.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from integration.engines import ENGINES
from integration.engines.base import Launch, Server
from integration.models import SHAPES, new_model, write_model
from integration.subjects import add_commit, engine_version, gpu_name
from tests.run_report import command_of

RANKS = 2
SEED = 5
PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12], [100, 200, 300, 400], [17, 3, 950, 21]]
TOKENS = 32
TRAINER_TIMEOUT_S = 200
UPDATE = ("bytes", "buckets", "transport", "fallbacks", "seconds")  # fields of the sender's report


class Trainer:
    """One process of torchrun."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self._torch = torch
        self._arguments = arguments
        self.rank = int(os.environ["RANK"])
        self._device = arguments.device
        if self._device == "cuda":
            torch.cuda.set_device(self.rank + (RANKS if arguments.apart else 0))
        else:
            torch.set_num_threads(1)
        dist.init_process_group("nccl" if self._device == "cuda" else "gloo")
        mesh = init_device_mesh(self._device, (RANKS,))
        self._model = new_model(arguments.model, SEED)
        for layer in self._model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self._model, mesh=mesh)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._dtype = getattr(torch, arguments.dtype)

    def run(self) -> list[dict[str, Any]]:
        """The figures of every cycle."""
        from rl_memory_plugins.trainer import EngineClient, ModelSource, Offloader, RolloutHandoff

        # By default an `Offloader` moves no tensor of the CPU. Here it must, to run the same code as on a GPU.
        everything: dict[str, Any] = {"moves": lambda tensor: True} if self._device == "cpu" else {}
        weights, others = Offloader(self._model, **everything), Offloader(self._optimizer, **everything)
        engines = [EngineClient(self._arguments.url, timeout_s=120)] if self.rank == 0 else []
        source = ModelSource(self._model, dtype=self._dtype)
        sending = {"transport": self._arguments.transport, "shards": self._arguments.shards}
        handoffs = [
            RolloutHandoff(engines, source, weights=[weights], others=[others], from_host=from_host, **sending)
            for from_host in (False, not self._arguments.shards)
        ]
        found = []
        for cycle in range(1, self._arguments.cycles + 1):
            last = cycle == self._arguments.cycles
            with handoffs[last].training(str(cycle)) as report:
                loss = self._train(cycle)
                if last:
                    self._save(self._arguments.model)
            figures = {
                "from_host": last and not self._arguments.shards,
                "loss": loss,
                "seconds": report.seconds,
                "moved_bytes": report.moved_bytes,
                "update": {key: report.update.get(key) for key in UPDATE},
                "served_ranks": sorted(receiver["rank"] for receiver in report.update["receivers"]),
                "received_bytes": sum(receiver["bytes"] for receiver in report.update["receivers"]),
            }
            found.append({**figures, "tokens": self._ask()} if engines else figures)
        return found

    def _train(self, cycle: int) -> float:
        torch = self._torch
        torch.manual_seed(100 * cycle + self.rank)
        ids = torch.randint(2, 900, (8, 64), device=self._device)
        logits = self._model(ids, use_cache=False).logits[:, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def _save(self, folder: Path) -> None:
        """Write a checkpoint in the engine's dtype, and its checksums; all ranks together."""
        from safetensors.torch import save_file

        from rl_memory_plugins.weights.checksums import tensor_checksum

        whole = {}
        for name, parameter in self._model.named_parameters():
            tensor = parameter.detach().full_tensor().to(self._dtype)
            if self.rank == 0:
                whole[name] = tensor.cpu().contiguous()
        if self.rank == 0:
            save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
            checksums = {name: tensor_checksum(tensor) for name, tensor in whole.items()}
            (folder / "checksums.json").write_text(json.dumps(checksums))

    def _ask(self) -> list[list[int]]:
        kind = ENGINES[self._arguments.engine]()
        with httpx.Client(base_url=self._arguments.url, timeout=120, trust_env=False) as http:
            responses = [http.post(kind.generation_route, json=kind.request(prompt, TOKENS)) for prompt in PROMPTS]
        return [kind.tokens(response.raise_for_status().json()) for response in responses]


def train(arguments: argparse.Namespace) -> None:
    """The program of each process of torchrun."""
    import torch.distributed as dist

    trainer = Trainer(arguments)
    found = trainer.run()
    (arguments.model / f"rank-{trainer.rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def run_trainer(arguments: argparse.Namespace, launch: Launch, url: str) -> list[list[dict[str, Any]]]:
    """The cycles of every rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += ["-m", "integration.fsdp_handoff", "--trainer", "--engine", arguments.engine]
    command += ["--device", launch.device, "--dtype", launch.dtype, "--cycles", str(arguments.cycles)]
    command += ["--model", str(launch.model), "--url", url, "--transport", arguments.transport]
    command += [f"--{flag}" for flag in ("shards", "apart") if getattr(arguments, flag)]
    process = subprocess.Popen(command, process_group=0)
    try:
        code = process.wait(TRAINER_TIMEOUT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code != 0:
        raise RuntimeError(f"the trainer exited with {code}")
    return [json.loads((launch.model / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]


def ask(server: Server) -> list[list[int]]:
    return [server.generate(prompt, TOKENS) for prompt in PROMPTS]


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The record; `checks` in it says what passed."""
    kind = ENGINES[arguments.engine]()
    cuda = arguments.device == "cuda"
    launch = Launch(folder, tp=RANKS, device=arguments.device, dummy_weights=True)
    launch.kv_bytes = arguments.kv_gib << 30 if cuda else 64 << 20
    write_model(folder, SHAPES[arguments.shape], dtype=launch.dtype)
    seconds, start = {}, time.monotonic()
    with Server(kind, launch, arguments.out.with_suffix(".engine.log")) as server:
        seconds["engine start"] = time.monotonic() - start
        ranks = run_trainer(arguments, launch, server.url)
        seconds["trainer"] = time.monotonic() - start - seconds["engine start"]
        server.control.sleep(1)
        server.control.wake_up()  # the caches are empty, as in a fresh engine: cached prompts give other rounding
        trained = ask(server)
        checksums = server.control.checksums()["tensors"]
        served_version = server.control.weight_version()
    launch.dummy_weights = False
    with Server(kind, launch, arguments.out.with_suffix(".fresh.log")) as server:
        fresh = ask(server)
    seconds["total"] = time.monotonic() - start
    own = json.loads((folder / "checksums.json").read_text())
    served = [[rank for cycle in cycles for rank in cycle["served_ranks"]] for cycles in ranks]
    # On the same GPUs each process serves its neighbour; otherwise the first serves all.
    beside = cuda and not arguments.shards and not arguments.apart
    expected = [[0] * arguments.cycles, [1] * arguments.cycles] if beside else [[0, 1] * arguments.cycles, []]
    answers = [cycle["tokens"] for cycle in ranks[0]]
    return {
        "engine": arguments.engine,
        "engine_version": engine_version(arguments.engine),
        "torch": version("torch"),
        "gpu": f"{RANKS * (1 + arguments.apart)} x {gpu_name()}" if cuda else "none",
        "device": arguments.device,
        "shape": arguments.shape,
        "commit": arguments.commit,
        "command": command_of("integration.fsdp_handoff"),
        "seconds": seconds,
        "checks": {
            "tokens equal a fresh engine's": trained == answers[-1] == fresh,
            "checksums equal the trainer's": checksums == own,
            "every cycle's answers differ": all(a != b for a, b in pairwise(answers)),
            "the version is the last cycle's": served_version == str(arguments.cycles),
            "each rank was served by the process on its device": served == expected,
        },
        "received_share": _received_share(ranks),
        "served_ranks": served,
        "ranks": ranks,
    }


def _received_share(ranks: list[list[dict[str, Any]]]) -> list[float]:
    """For each cycle, what part of all tensors for all ranks of the engine travelled to them."""
    return [
        sum(process["received_bytes"] for process in cycle) / (RANKS * cycle[0]["update"]["bytes"])
        for cycle in zip(*ranks, strict=True)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=sorted(ENGINES), default="vllm")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=sorted(SHAPES), default=None, help="by default 0.5b, and tiny on the CPU")
    parser.add_argument("--kv-gib", type=int, default=90, help="GiB of KV cache on each GPU")
    parser.add_argument("--cycles", type=int, default=3, help="training steps")
    parser.add_argument("--transport", default="auto", help="as `push_from_all` takes it")
    parser.add_argument("--shards", action="store_true", help="each process sends its shards, and nobody gathers")
    parser.add_argument("--apart", action="store_true", help="the trainer has two GPUs of its own")
    add_commit(parser)
    parser.add_argument("--out", type=Path, help="JSON file for the record; the engine's logs lie beside it")
    inside = parser.add_argument_group("for the trainer's processes only")
    inside.add_argument("--trainer", action="store_true")
    inside.add_argument("--dtype")
    inside.add_argument("--model", type=Path)
    inside.add_argument("--url")
    arguments = parser.parse_args()
    if arguments.trainer:
        train(arguments)
        return 0
    arguments.shape = arguments.shape or {"cpu": "tiny", "cuda": "0.5b"}[arguments.device]
    arguments.out = arguments.out or Path("demo-out", f"fsdp-{arguments.engine}-{arguments.device}.json")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rl-memory-fsdp-") as scratch:
        found = run(arguments, Path(scratch, "model"))
    arguments.out.write_text(json.dumps(found, indent=1))
    for check, passed in found["checks"].items():
        print(f"{'passed' if passed else 'FAILED'}: {check}")
    return 0 if all(found["checks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
