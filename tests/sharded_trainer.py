"""A trainer of two processes with an FSDP2 model, for real engines: it updates when it is told to, and dies or stops.

    python -m tests.sharded_trainer RANK STORE FOLDER DTYPE URL KEY

Rank 0 controls the engine. Each line of the standard input is a command, and each line of the output its answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from integration.engines.base import REPOSITORY, Server

RANKS = 2
ANSWER = "answer: "


class ShardedTrainer:
    """The two processes. A process that a test has killed comes back with `restart`."""

    def __init__(self, server: Server, folder: Path) -> None:
        self._server = server
        self._folder = folder
        self._starts = 0
        self._processes: list[subprocess.Popen[str]] = []
        self.restart()

    def restart(self) -> None:
        self.stop()
        self._starts += 1  # a store knows the processes of one group
        launch = self._server.launch
        for rank in range(RANKS):
            arguments = [rank, self._folder / f"store-{self._starts}", launch.model, launch.dtype, self._server.url]
            command = [sys.executable, "-m", "tests.sharded_trainer", *map(str, arguments), launch.api_key]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            self._processes.append(
                subprocess.Popen(
                    command,
                    cwd=REPOSITORY,
                    env=environment,
                    text=True,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=(self._folder / f"trainer-{rank}.log").open("a"),
                )
            )

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes = []

    def ask(self, rank: int, seed: int, fault: list[Any] | None = None, **options: Any) -> None:
        """Have a process take part in an update.

        Args:
            fault: The name of a message, `before` or `after`, a signal: what the process does to itself there.
        """
        stdin = self._processes[rank].stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.write(json.dumps({"seed": seed, "fault": fault, "options": options}) + "\n")
            stdin.flush()

    def is_faulty(self, rank: int) -> bool:
        """Whether a process has died or stopped."""
        process = self._processes[rank]
        if process.poll() is not None:
            return True
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def answer(self, rank: int) -> dict[str, Any] | None:
        """The answer of a process; `None` if it has died."""
        stdout = self._processes[rank].stdout
        assert stdout is not None
        for line in stdout:
            if line.startswith(ANSWER):
                found: dict[str, Any] = json.loads(line.removeprefix(ANSWER))
                return found
        return None

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


def main(rank: int, store: str, folder: str, dtype: str, url: str, key: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from integration.models import new_model
    from rl_memory_plugins.errors import RLMemoryError
    from rl_memory_plugins.trainer import EngineClient, ModelSource, Peers, push_from_all
    from tests.collectives import counted

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh, peers = init_device_mesh("cpu", (RANKS,)), Peers()
    engines = [EngineClient(url, key or None, timeout_s=120)] if rank == 0 else []
    for line in sys.stdin:
        command = json.loads(line)
        model = new_model(Path(folder), command["seed"], dtype)
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
        print(ANSWER + json.dumps({**answer, "collectives": collectives}, default=str), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
