"""The trainer of `bench_step` on several GPUs: FSDP2 on one process for each GPU, driven by the benchmark's process."""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from integration.engines.ports import reserve_port
from integration.json_process import Child, serve
from integration.step_trainer import Trainer, way
from integration.timeline import SAMPLE_EVERY_S


class ShardedTrainer(Trainer):
    """One process of the trainer. FSDP2 shards each layer, and gathers and reduces in float32."""

    def __init__(self, folder: Path, device: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if device == "cuda":
            torch.cuda.set_device(self.rank)
        else:
            torch.set_num_threads(1)
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        super().__init__(folder, device)
        mesh = init_device_mesh(device, (self.ranks,))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = self._optimizer()
        if device == "cuda":
            torch.cuda.empty_cache()

    def meet(self) -> None:
        dist.barrier()

    def gather(self, text: str) -> list[str]:
        texts = [""] * self.ranks
        dist.all_gather_object(texts, text)
        return texts


class Rank:
    """The inside of one process. The benchmark's process calls the methods that `calls` names.

    Args:
        board: A file with one number for each rank, the bytes of its trainer on its GPU. After `sample` a thread keeps
            it up to date, because the process answers no call during another.
    """

    def __init__(self, folder: Path, device: str, subject: str, engine: str, url: str, dtype: str, board: Path) -> None:
        self._trainer = ShardedTrainer(folder, device)
        self._arguments = (subject, self._trainer, engine, url, dtype)
        self._board = board_of(board, self._trainer.ranks)

    def link(self) -> list[float]:
        """See `bench_step.link`; all ranks copy at the same time."""
        from integration.bench_step import link

        return list(link(self._trainer.device, self._trainer.meet))

    def begin(self) -> None:
        self._way = way(*self._arguments)

    def sample(self) -> None:
        """Write to the board from now on. The thread takes time from the others of this process."""
        if self._trainer.device == "cuda":
            threading.Thread(target=self._publish, daemon=True).start()

    def _publish(self) -> None:
        torch.cuda.set_device(self._trainer.rank)  # each thread has a current device of its own
        while True:
            self._board[self._trainer.rank] = self._way.trainer_bytes()
            time.sleep(SAMPLE_EVERY_S / 2)

    def release(self) -> dict[str, float]:
        return self._way.release()

    def back(self) -> dict[str, float]:
        return self._way.back()

    def train(self, step: int) -> float:
        loss = self._trainer.train(step)
        if self._trainer.device == "cuda":
            torch.cuda.synchronize()
        return loss

    def moved_bytes(self) -> int:
        from integration.bench_step import moved_bytes

        return moved_bytes(self._trainer)

    def left(self) -> dict[str, int]:
        return self._way.left()

    def calls(self) -> dict[str, Callable[..., Any]]:
        names = ("link", "begin", "sample", "release", "back", "train", "moved_bytes", "left")
        return {name: getattr(self, name) for name in names}


class Ranks:
    """All processes of the trainer, as the benchmark's process sees them. `with` ends them."""

    def __init__(
        self, count: int, folder: Path, device: str, subject: str, engine: str, url: str, dtype: str, board: Path
    ) -> None:
        board.write_bytes(bytes(8 * count))
        self._board = board_of(board, count)
        self._pool = ThreadPoolExecutor(count)
        words = (str(folder), device, subject, engine, url, dtype, str(board))
        self._reservation, port = reserve_port()
        shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
        shared |= {"OMP_WAIT_POLICY": "passive", "GLOO_SOCKET_IFNAME": "lo"}

        def start(rank: int) -> Child:
            return Child("integration.step_ranks", *words, environment={**shared, "RANK": str(rank)})

        self._children = list(self._pool.map(start, range(count)))

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            for child in self._children:
                stack.callback(child.close)
        self._pool.shutdown()
        self._reservation.close()

    def begin(self) -> list[tuple[float, float]]:
        """Measure the link of each GPU, and make the memories. Returns: bytes per second to each GPU and back."""
        links = [(into, out_of) for into, out_of in self._all("link")]
        self._all("begin")
        return links

    def sample(self) -> None:
        """Begin to read the trainer's bytes, for `trainer_bytes`."""
        self._all("sample")

    def release(self) -> dict[str, float]:
        return self._slowest("release")

    def back(self) -> dict[str, float]:
        return self._slowest("back")

    def train(self, step: int) -> float:
        """One step. Returns: the mean of the ranks' losses."""
        return statistics.fmean(self._all("train", step=step))

    def moved_bytes(self) -> list[int]:
        return self._all("moved_bytes")

    def left(self) -> list[dict[str, int]]:
        return self._all("left")

    def trainer_bytes(self) -> int:
        """The trainer's bytes on the first GPU."""
        return int(self._board[0])

    def _slowest(self, name: str) -> dict[str, float]:
        seconds = self._all(name)
        return {step: max(one.get(step, 0.0) for one in seconds) for step in dict.fromkeys(chain(*seconds))}

    def _all(self, name: str, **arguments: Any) -> list[Any]:
        """Call all ranks at the same time. Returns: their answers, by rank. If one fails, all processes end."""
        answers = [self._pool.submit(child.call, name, **arguments) for child in self._children]
        failures = []
        for answer in as_completed(answers):
            if answer.exception() is not None:
                failures.append(answer.exception())
                for child in self._children:
                    child.process.kill()
        if failures:
            raise failures[0]  # the others have ended because of it
        return [answer.result() for answer in answers]


def board_of(file: Path, ranks: int) -> torch.Tensor:
    return torch.from_file(str(file), shared=True, size=ranks, dtype=torch.int64)


if __name__ == "__main__":
    folder, device, subject, engine, url, dtype, board = sys.argv[1:]
    serve(lambda: Rank(Path(folder), device, subject, engine, url, dtype, Path(board)).calls())
