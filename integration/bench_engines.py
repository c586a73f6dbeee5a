"""One update of several engines over TCP, each behind a link of its own, or all behind one.

    python -m integration.bench_engines --out results.json

Needs Linux, root, and the commands `ip` and `tc`; neither an engine nor a GPU. Each engine is a stand-in with one rank,
in a network namespace. Over each link the trainer sends at most `--mbit` megabits per second.

    update_s     from making the `WeightSender` to the end of `send`; with the number of engines, whether they share a
                 link, and whether with TLS
    of_one       the median over that of one engine
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import torch

from integration.records import Records
from integration.subjects import add_commit, described
from integration.two_hosts import TwoHosts
from rl_memory_plugins.memory.arena import PagedArena
from rl_memory_plugins.memory.fake import FakeAllocator, FakeDevice
from rl_memory_plugins.memory.manager import MemoryManager
from rl_memory_plugins.trainer import ModelSource
from rl_memory_plugins.weights.model_loader import ModelLoader
from rl_memory_plugins.weights.receiver import WeightReceiver
from rl_memory_plugins.weights.sender import WeightSender
from rl_memory_plugins.weights.update_hosts import UpdateHosts

TENSORS, TENSOR_BYTES = 8, 32 << 20
ENGINES = (1, 2, 4)
TIMEOUT_S = 60.0
ANYWHERE = UpdateHosts("0.0.0.0/0")


class Engine:
    """One rank with parameters in host memory."""

    def __init__(self, number: int) -> None:
        self.parameters = {
            f"layers.{index}.weight": torch.zeros(TENSOR_BYTES // 2, dtype=torch.bfloat16) for index in range(TENSORS)
        }
        self._manager = MemoryManager(number, FakeAllocator(FakeDevice(f"fake:{number}")), PagedArena(), lambda tag: [])
        self._receiver = WeightReceiver(self._manager, ModelLoader(self._load, lambda: self.parameters), hosts=ANYWHERE)

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.parameters[name].copy_(tensor)

    def receive(self, sender: WeightSender, place: str, host: TwoHosts) -> None:
        host.enter()
        self._receiver.receive({"*": place}, sender.token, TIMEOUT_S)
        self._manager.finish_writing(True)


def update(engines: Sequence[Engine], hosts: Sequence[TwoHosts], value: float, *, tls: bool) -> float:
    """The seconds of one update, which fills all parameters with `value`."""
    tensors = {name: torch.full_like(tensor, value) for name, tensor in engines[0].parameters.items()}
    start = time.perf_counter()
    advertise = list(dict.fromkeys(host.addresses[0] for host in hosts))
    with WeightSender(len(engines), timeout_s=TIMEOUT_S, transport="tcp", advertise=advertise, tls=tls) as sender:
        places = sender.endpoints["*"]
        places = [places] * len(engines) if isinstance(places, str) else places
        receiving = [
            threading.Thread(target=engine.receive, args=(sender, *where), daemon=True)
            for engine, *where in zip(engines, places, hosts, strict=True)
        ]
        for thread in receiving:
            thread.start()
        sender.send(ModelSource(tensors))
        seconds = time.perf_counter() - start
    for thread in receiving:
        thread.join()
    for engine in engines:
        if not all(torch.equal(engine.parameters[name], tensor) for name, tensor in tensors.items()):
            raise RuntimeError("an engine has other weights than the trainer has sent")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, default=1000, help="of each link, per second")
    parser.add_argument("--repeats", type=int, default=3)
    add_commit(parser)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the records")
    arguments = parser.parse_args()
    common = described("bench_engines", "none", "256 MiB", "plugin", arguments.commit, gpu="none")
    common |= {"mbit_s": arguments.mbit}
    with ExitStack() as stack:
        hosts = [stack.enter_context(TwoHosts(number)) for number in range(max(ENGINES))]
        for host in hosts:
            host.limit(arguments.mbit)
        engines = [Engine(number) for number in range(max(ENGINES))]
        for shared, tls in product((False, True), repeat=2):
            alone = 0.0
            for count in ENGINES:
                figures = Records(arguments.out, {**common, "engines": count, "shared": shared, "tls": tls})
                seconds = [
                    update(engines[:count], [hosts[0]] * count if shared else hosts[:count], repeat + 1, tls=tls)
                    for repeat in range(arguments.repeats)
                ]
                figures.add("update_s", seconds, "s")
                alone = alone or statistics.median(seconds)
                figures.add("of_one", [statistics.median(seconds) / alone], "of one engine")


if __name__ == "__main__":
    main()
