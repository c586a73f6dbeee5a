"""Both directions of the link at a time: an engine comes back from level 1 while a trainer leaves the same GPU.

    python -m integration.bench_link --engine vllm --model 7b --out results.json
    python -m integration.bench_link --device cpu --model tiny --out cpu.json

The engine is a server with dummy weights, whose copies in host memory are as large as what the trainer has in a
`PausableMemory`, in this process. Each round puts the engine to sleep and lets it wake, lets the trainer sleep and
wake, and then lets the engine wake while the trainer falls asleep.

    link_gb_s           one large copy to the GPU, and one back
    link_both_gb_s      both copies at a time, of as many bytes each, by one process
    wake_s, sleep_s     the engine's wake and the trainer's sleep, each alone, as their callers see them
    both_s              until both are done, if they begin together
    wake_gb_s, sleep_gb_s, both_gb_s
                        the bytes that were copied, over these seconds
    both_of_link        both_gb_s over link_both_gb_s
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from integration.bench_step import LINK_BYTES, link
from integration.bench_turns import copied
from integration.engines import ENGINES
from integration.engines.base import Launch, Server
from integration.models import SHAPES, weight_bytes, write_model
from integration.records import Records, read
from integration.subjects import add_commit, described
from rl_memory_plugins.trainer import PausableMemory

BLOCK_BYTES = 256 << 20


def both_ways(device: str) -> float:
    """Bytes per second of two large copies at a time, one to the device and one back, between page-locked memory."""
    if device != "cuda":
        return min(link(device))
    there = [torch.zeros(LINK_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    here = [torch.zeros(LINK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    best = float("inf")
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for stream, target, source in zip(streams, (there[0], here[1]), (here[0], there[1]), strict=True):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    del there, target, source
    torch.cuda.empty_cache()
    return 2 * LINK_BYTES / best


class Trainer:
    """Parameters in a `PausableMemory`."""

    def __init__(self, nbytes: int, device: str) -> None:
        sizes = [min(BLOCK_BYTES, nbytes - start) for start in range(0, nbytes, BLOCK_BYTES)]
        self._parameters = torch.nn.ParameterList(
            torch.nn.Parameter(torch.zeros(size // 2, dtype=torch.bfloat16, device=device)) for size in sizes
        )
        self.memory = PausableMemory(self._parameters, device=device)

    def train(self) -> None:
        """Change all values: the next sleep copies all of them."""
        with torch.no_grad():
            for parameter in self._parameters:
                parameter.add_(1)
        self.memory.synchronize()

    def sleep(self) -> int:
        """Returns: the bytes that were copied."""
        return sum(change.bytes_copied for change in self.memory.sleep().changes)


def timed(call: Callable[[], int]) -> tuple[float, int]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def run(server: Server, nbytes: int, arguments: argparse.Namespace, figures: Records) -> None:
    into, out_of = link(arguments.device)
    figures.add("link_gb_s", [into / 1e9, out_of / 1e9], "GB/s, to the GPU and back")
    limit = both_ways(arguments.device)
    figures.add("link_both_gb_s", [limit / 1e9], "GB/s")
    trainer = Trainer(nbytes, arguments.device)
    engine = server.control
    time.sleep(arguments.settle_s)
    rates = []
    for number in range(arguments.repeats + 1):
        trainer.train()
        engine.sleep(1)
        alone = {"wake": timed(lambda: copied(engine.wake_up(["weights"]))), "sleep": timed(trainer.sleep)}
        trainer.memory.wake()
        trainer.train()
        engine.wake_up()
        engine.sleep(1)
        with ThreadPoolExecutor(1) as beside:
            start = time.perf_counter()
            waking = beside.submit(engine.wake_up, ["weights"])
            moved = trainer.sleep() + copied(waking.result())
            both = time.perf_counter() - start
        trainer.memory.wake()
        engine.wake_up()
        if not number:  # the first copies of all make host memory
            continue
        for name, (seconds, count) in alone.items():
            figures.add(f"{name}_s", [seconds], "s", {"bytes": count})
            figures.add(f"{name}_gb_s", [count / seconds / 1e9], "GB/s")
        rates.append(moved / both)
        figures.add("both_s", [both], "s", {"bytes": moved})
        figures.add("both_gb_s", [moved / both / 1e9], "GB/s")
    figures.add("both_of_link", [statistics.median(rates) / limit], "of both directions of the link")
    trainer.memory.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=sorted(ENGINES), default="vllm")
    parser.add_argument("--model", choices=sorted(SHAPES), default="7b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is only for trying the script")
    parser.add_argument("--repeats", type=int, default=5, help="rounds, after one that is not measured")
    parser.add_argument("--settle-s", type=float, default=10, help="seconds in which host memory is prepared")
    add_commit(parser)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the records")
    arguments = parser.parse_args()
    gpu = None if arguments.device == "cuda" else "none"
    with tempfile.TemporaryDirectory() as scratch:
        launch = Launch(
            Path(scratch, arguments.model),
            dummy_weights=True,
            device=arguments.device,
            kv_bytes=int((2 if arguments.device == "cuda" else 0.06) * 2**30),
            compiled=False,  # the engine's own speed does not matter here, and it starts sooner
        )
        write_model(launch.model, SHAPES[arguments.model], dtype=launch.dtype)
        common = described("bench_link", arguments.engine, arguments.model, "plugin", arguments.commit, gpu=gpu)
        figures = Records(arguments.out, common)
        with Server(ENGINES[arguments.engine](), launch, Path(scratch, "server.log")) as server:
            nbytes = weight_bytes(arguments.model) * (1 if arguments.device == "cuda" else 2)  # float32 on a CPU
            run(server, nbytes, arguments, figures)
    for record in read(arguments.out):
        print(f"{record['metric']}: {record['median']:.3f} {record['unit']}", flush=True)


if __name__ == "__main__":
    main()
