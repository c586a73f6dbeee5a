"""The weight stream between two processes on one GPU, without an engine.

    python -m integration.bench_wire --model 7b --out results.json

A trainer process holds a checkpoint's tensors and sends them by every transport. A receiver process holds parameters in
the layout of an engine, fused and in pausable memory. The sender measures the seconds, from making the `WeightSender`
to the end of `send`.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from integration.gpu_figures import copy_floor, peak_extra_bytes
from integration.json_process import Child, serve
from integration.models import SHAPES, checkpoint_shapes
from integration.records import Records
from integration.subjects import add_commit, described
from rl_memory_plugins.memory.arena import PagedArena
from rl_memory_plugins.memory.manager import MemoryManager
from rl_memory_plugins.tags import Tag
from rl_memory_plugins.trainer import release_mapped
from rl_memory_plugins.trainer.sources.model import as_source
from rl_memory_plugins.weights.model_loader import ModelLoader
from rl_memory_plugins.weights.receiver import WeightReceiver
from rl_memory_plugins.weights.sender import WeightSender

MiB = 1 << 20
MODELS = [name for name in SHAPES if name != "tiny-moe"]

#: By fused parameter: its shape, and by tensor of the checkpoint the tensor's first row in it and its shape.
Layout = dict[str, tuple[tuple[int, ...], dict[str, tuple[int, tuple[int, ...]]]]]
FUSED = {
    r"experts\.\d+\.(gate|up)_proj": "experts.w13",
    r"experts\.\d+\.down_proj": "experts.w2",
    r"[qkv]_proj": "qkv_proj",
    r"(gate|up)_proj": "gate_up_proj",
}
"""How an engine fuses tensors: patterns of their names, and the names of the fused parameters."""


def layout(model: str) -> Layout:
    """The fused parameters of a model; of a model with experts, only the experts."""
    shape = SHAPES[model]
    found: Layout = {}
    for name, size in checkpoint_shapes(shape).items():
        if shape.experts and ".experts." not in name:
            continue
        parameter = next((new for old in FUSED if (new := re.sub(old, FUSED[old], name)) != name), name)
        (start, *_), parts = found.get(parameter, ((0,), {}))
        parts[name] = (start, size)
        found[parameter] = ((start + size[0], *size[1:]), parts)
    return found


def checkpoint(model: str, device: str = "cuda") -> dict[str, torch.Tensor]:
    """The model's tensors, with numbers in them. `device` is a torch device, or `pinned` for page-locked memory."""
    shapes = {name: shape for _, parts in layout(model).values() for name, (_, shape) in parts.items()}
    place = "cpu" if device == "pinned" else device
    return {
        name: torch.empty(shape, dtype=torch.bfloat16, device=place, pin_memory=device == "pinned").fill_(
            0.001 * (number % 997 + 1)
        )
        for number, (name, shape) in enumerate(shapes.items())
    }


class Rank:
    """A stand-in for an engine's worker: parameters, their loader, a manager and a receiver."""

    def __init__(self, model: str) -> None:
        from rl_memory_plugins.memory.cuda_vmm import CudaVmmAllocator

        allocator = CudaVmmAllocator(0)
        self._places: dict[str, tuple[str, int]] = {}
        self.parameters: dict[str, torch.Tensor] = {}
        with allocator.region(Tag.WEIGHTS):
            for name, (shape, parts) in layout(model).items():
                self.parameters[name] = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
                self._places |= {part: (name, start) for part, (start, _) in parts.items()}
        self.manager = MemoryManager(0, allocator, PagedArena(), lambda tag: [])
        self.receiver = WeightReceiver(self.manager, ModelLoader(self.load_weights, lambda: self.parameters))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            parameter, start = self._places[name]
            self.parameters[parameter].narrow(0, start, tensor.shape[0]).copy_(tensor)

    def receive(self, **arguments: Any) -> dict[str, Any]:
        complete = False
        try:
            report = self.receiver.receive(**arguments)
            complete = True
            return report
        finally:
            self.manager.finish_writing(complete)

    def state(self) -> dict[str, Any]:
        return {
            "content": str(self.manager.content),
            "device": self.manager.device.name,
            "descriptors": len(list(Path("/proc/self/fd").iterdir())),
            "mapped": len(self.receiver._mappings._open),
            "reserved": torch.cuda.memory_reserved(),
        }

    def calls(self) -> dict[str, Callable[..., Any]]:
        return {"receive": self.receive, "checksums": self.receiver.checksums, "state": self.state}


class Engine(Child):
    """The receiver process."""

    def __init__(self, model: str, **environment: str) -> None:
        words = ("--serve", "--model", model)
        super().__init__("integration.bench_wire", *words, environment={**os.environ, **environment})
        self.device = str(self.call("state")["device"])

    def update(self, source: Any, *, timeout_s: float = 60.0, **options: Any) -> tuple[dict[str, Any], Any]:
        """One update: the sender's report with its `total` seconds, and the receiver's error if it had one."""
        failures: list[Exception] = []

        def receive(sender: WeightSender) -> None:
            try:
                self.call("receive", endpoints=sender.endpoints, token=sender.token, timeout_s=timeout_s)
            except Exception as error:
                failures.append(error)

        start = time.perf_counter()
        with WeightSender([self.device], timeout_s=timeout_s, **options) as sender:
            thread = threading.Thread(target=receive, args=(sender,), daemon=True)
            thread.start()
            try:
                report = sender.send(as_source(source))
                report["seconds"]["total"] = time.perf_counter() - start
            finally:
                thread.join(timeout_s)
        return report, failures[0] if failures else None


# -- the benchmark ------------------------------------------------------------------------------------------


def measure(model: str, repeats: int, records: Records) -> None:
    """Record all figures of one model; prints the steps of the last update of each metric."""
    engine = Engine(model)

    def peak(metric: str, source: Any, **options: Any) -> None:
        nbytes, _ = peak_extra_bytes(lambda: engine.update(source, **options))
        records.add(metric, [nbytes / MiB], "MiB")

    def updates(metric: str, source: Any, count: int, **options: Any) -> None:
        for _ in range(count):
            report, error = engine.update(source, **options)
            if error is not None:
                raise error
            records.add(metric, [report["seconds"]["total"]], "s")
        steps = ", ".join(f"{step} {1000 * seconds:.1f}" for step, seconds in report["seconds"].items())
        print(f"{metric}, steps of the last update: {steps} ms", flush=True)

    try:
        tensors = checkpoint(model)
        updates("update_first_s", tensors, 1, transport="cuda_ipc")  # traces the loader, makes contexts
        records.add("copy_floor_s", list(copy_floor(tensors, repeats)), "s")
        torch.cuda.empty_cache()
        kept = {"transport": "cuda_direct", "keep_mapped": True}
        updates("update_direct_first_s", tensors, 1, **kept)
        updates("update_direct_s", tensors, repeats, **kept)
        peak("peak_extra_mib_direct", tensors, **kept)
        start = time.perf_counter()
        release_mapped()
        records.add("release_mapped_s", [time.perf_counter() - start], "s")
        updates("update_direct_unkept_s", tensors, repeats, transport="cuda_direct")
        for bucket in (256, 512, 1024, 2048):
            options = {"transport": "cuda_ipc", "bucket_bytes": bucket * MiB}
            updates(f"update_staged_{bucket}mib_s", tensors, repeats, **options)
            peak(f"peak_extra_mib_staged_{bucket}mib", tensors, **options)
        updates("update_shm_pinned_s", tensors, 2, transport="shm_pinned")
        tensors.clear()
        torch.cuda.empty_cache()
        for place in ("pinned", "cpu"):
            tensors = checkpoint(model, place)
            for transport in ("cuda_ipc", "shm_pinned"):
                updates(f"update_{place}_{transport}_s", tensors, 3, transport=transport)
            tensors.clear()
    finally:
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="7b")
    parser.add_argument("--repeats", type=int, default=7, help="updates per metric")
    parser.add_argument("--out", type=Path, default=Path("bench_wire.json"), help="JSON file for the records")
    add_commit(parser)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(lambda: Rank(arguments.model).calls())
        return
    words = ["--model", arguments.model]
    common = described("bench_wire", "none", arguments.model, "plugin", arguments.commit, words=words)
    nbytes = 2 * sum(math.prod(shape) for shape, _ in layout(arguments.model).values())
    measure(arguments.model, arguments.repeats, Records(arguments.out, {**common, "bytes": nbytes}))


if __name__ == "__main__":
    main()
