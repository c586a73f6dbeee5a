"""A trainer of two processes with an FSDP2 model, for real engines: it updates when it is told to, and dies or stops.

Its processes are forks of one that has imported PyTorch and transformers, which takes seconds each time. Rank 0
controls the engine.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import sys
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from integration.engines.base import Server

RANKS = 2

_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "torch.distributed.fsdp",
        "transformers.models.qwen2.modeling_qwen2",
        "integration.models",
        "rl_memory_plugins.trainer",
        "tests.collectives",
    ]
)


class ShardedTrainer:
    """The two processes. A process that a test has killed comes back with `restart`."""

    def __init__(self, server: Server, folder: Path) -> None:
        self._server = server
        self._folder = folder
        self._starts = 0
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self.restart()

    def restart(self) -> None:
        self.stop()
        self._starts += 1  # a store knows the processes of one group
        launch = self._server.launch
        for rank in range(RANKS):
            pipe, inside = _CONTEXT.Pipe()
            store, log = self._folder / f"store-{self._starts}", self._folder / f"trainer-{rank}.log"
            arguments = (inside, log, rank, store, launch.model, launch.dtype, self._server.url, launch.api_key)
            process = _CONTEXT.Process(target=main, args=arguments, daemon=True)
            process.start()
            inside.close()
            self._processes.append(process)
            self._pipes.append(pipe)

    def stop(self) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        self._processes, self._pipes = [], []

    def ask(self, rank: int, seed: int, fault: list[Any] | None = None, **options: Any) -> None:
        """Have a process take part in an update.

        Args:
            fault: The name of a message, `before` or `after`, a signal: what the process does to itself there.
        """
        with contextlib.suppress(BrokenPipeError):
            self._pipes[rank].send({"seed": seed, "fault": fault, "options": options})

    def is_faulty(self, rank: int) -> bool:
        """Whether a process has died or stopped."""
        process = self._processes[rank]
        if not process.is_alive():
            return True
        try:
            return psutil.Process(process.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:  # it has ended meanwhile
            return True

    def answer(self, rank: int) -> dict[str, Any] | None:
        """The answer of a process; `None` if it has died."""
        try:
            found: dict[str, Any] = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            return None
        return found

    def update(self, seed: int, **options: Any) -> list[dict[str, Any]]:
        """An update that both processes survive."""
        for rank in range(RANKS):
            self.ask(rank, seed, **options)
        answers = [self.answer(rank) for rank in range(RANKS)]
        assert None not in answers, [
            (self._folder / f"trainer-{rank}.log").read_text()[-3000:] for rank in range(RANKS)
        ]
        assert not any("error" in answer for answer in answers if answer), answers
        return answers  # type: ignore[return-value]


def signal_at(message: str, when: str, number: int) -> None:
    """Send this process a signal before or after it sends such a message."""
    from rl_memory_plugins.weights import wire

    send = wire.Connection.send

    def watched(self: Any, sent: Any, *arguments: Any) -> None:
        is_due = type(sent).__name__ == message
        if is_due and when == "before":
            os.kill(os.getpid(), number)
        send(self, sent, *arguments)
        if is_due and when == "after":
            os.kill(os.getpid(), number)

    wire.Connection.send = watched  # type: ignore[method-assign]


def main(pipe: Connection, log: Path, rank: int, store: Path, folder: Path, dtype: str, url: str, key: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from integration.models import new_model
    from rl_memory_plugins.errors import RLMemoryError
    from rl_memory_plugins.trainer import EngineClient, ModelSource, Peers, push_from_all
    from tests.collectives import counted

    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), sys.stderr.fileno())
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh, peers = init_device_mesh("cpu", (RANKS,)), Peers()
    engines = [EngineClient(url, key or None, timeout_s=120)] if rank == 0 else []
    while True:
        command = pipe.recv()
        model = new_model(folder, command["seed"], dtype)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if command["fault"]:
            message, when, name = command["fault"]
            signal_at(message, when, signal.Signals[name])
        answer: dict[str, Any] = {}
        with counted(peers) as collectives:
            try:
                report = push_from_all(engines, ModelSource(model), peers, **command["options"])
                answer = {name: report[name] for name in ("sent_from_shards", "gathered", "receivers", "bytes")}
            except RLMemoryError as error:
                answer = {"error": error.to_record()}
        pipe.send({**answer, "collectives": collectives})
