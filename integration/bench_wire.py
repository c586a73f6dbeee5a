"""The weight stream between two processes on one GPU, without an engine.

    python -m integration.bench_wire --model 7b --out results.json

A trainer process holds a checkpoint's tensors and sends them by every transport. A receiver process holds parameters in
the layout of an engine, fused and in pausable memory. The sender measures the seconds, from making the `WeightSender`
to the end of `send`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from integration.models import SHAPES, Shape
from rl_memory_plugins.errors import RLMemoryError, from_record
from rl_memory_plugins.memory.backup import PagedArena
from rl_memory_plugins.memory.manager import MemoryManager
from rl_memory_plugins.tags import Tag
from rl_memory_plugins.trainer import release_mapped
from rl_memory_plugins.trainer.sources.model import as_source
from rl_memory_plugins.weights.model_loader import ModelLoader
from rl_memory_plugins.weights.receiver import WeightReceiver
from rl_memory_plugins.weights.sender import WeightSender

MiB = 1 << 20
MODELS = [name for name, shape in SHAPES.items() if name == "moe" or not shape.experts]

#: Per model, the fused parameters: their shapes, and the row at which each tensor of the checkpoint begins.
Layout = dict[str, tuple[tuple[int, ...], dict[str, tuple[int, tuple[int, ...]]]]]


def layout(model: str) -> Layout:
    """Of a model with experts, only these."""
    shape = SHAPES[model]
    return _experts(shape) if shape.experts else _dense(shape)


def _dense(shape: Shape) -> Layout:
    hidden, head = shape.hidden, shape.hidden // shape.heads
    q, kv = shape.heads * head, shape.kv_heads * head
    found: Layout = {}

    def add(name: str, columns: tuple[int, ...], **rows: int) -> None:
        parts, start = {}, 0
        for part, count in rows.items():
            parts[name.replace("*", part)] = (start, (count, *columns))
            start += count
        found[name] = ((start, *columns), parts)

    add("*.weight", (hidden,), embed_tokens=shape.vocabulary)
    for layer in range(shape.layers):
        add(f"layers.{layer}.*_proj.weight", (hidden,), q=q, k=kv, v=kv)
        add(f"layers.{layer}.*_proj.bias", (), q=q, k=kv, v=kv)
        add(f"layers.{layer}.*_proj.output", (q,), o=hidden)
        add(f"layers.{layer}.*_proj.mlp", (hidden,), gate=shape.intermediate, up=shape.intermediate)
        add(f"layers.{layer}.*_proj.down", (shape.intermediate,), down=hidden)
        add(f"layers.{layer}.*_layernorm", (), input=hidden)
        add(f"layers.{layer}.*_norm", (), post_attention=hidden)
    add("*.norm", (), final=hidden)
    if not shape.tied:
        add("*.head", (hidden,), lm=shape.vocabulary)
    return found


def _experts(shape: Shape) -> Layout:
    found: Layout = {}
    rows, hidden = shape.expert_intermediate, shape.hidden
    for layer in range(shape.layers):
        up, down = {}, {}
        for expert in range(shape.experts):
            prefix = f"layers.{layer}.experts.{expert}"
            up[f"{prefix}.gate"] = (2 * rows * expert, (rows, hidden))
            up[f"{prefix}.up"] = (2 * rows * expert + rows, (rows, hidden))
            down[f"{prefix}.down"] = (hidden * expert, (hidden, rows))
        found[f"layers.{layer}.w13"] = ((2 * rows * shape.experts, hidden), up)
        found[f"layers.{layer}.w2"] = ((hidden * shape.experts, rows), down)
    return found


def checkpoint(model: str, device: str = "cuda") -> dict[str, torch.Tensor]:
    """The model's tensors with numbers in them; `pinned` and `cpu` are host memory."""
    shapes = {name: shape for _, parts in layout(model).values() for name, (_, shape) in parts.items()}
    place = "cpu" if device == "pinned" else device
    return {
        name: torch.empty(shape, dtype=torch.bfloat16, device=place, pin_memory=device == "pinned").fill_(
            0.001 * (number % 997 + 1)
        )
        for number, (name, shape) in enumerate(shapes.items())
    }


class Rank:
    """What an engine's worker is to the weight stream: parameters, their loader, a manager and a receiver."""

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
            "mapped": len(self.receiver._mappings),
            "reserved": torch.cuda.memory_reserved(),
        }


def serve(model: str) -> None:
    """The engine's process: a call a line on its input, an answer a line on its output."""
    rank = Rank(model)
    calls: dict[str, Callable[..., Any]] = {
        "receive": rank.receive,
        "checksums": rank.receiver.checksums,
        "state": rank.state,
    }
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints
    print(json.dumps({"answer": rank.state()}), file=answers, flush=True)
    for line in sys.stdin:
        call = json.loads(line)
        try:
            answer = {"answer": calls[call.pop("call")](**call)}
        except RLMemoryError as error:
            answer = {"error": error.to_record()}
        print(json.dumps(answer), file=answers, flush=True)


class Engine:
    """The other process, from here."""

    def __init__(self, model: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "integration.bench_wire", "--serve", "--model", model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
            env={**os.environ, **environment},
        )
        self.device = str(self._answer()["device"])

    def call(self, name: str, **arguments: Any) -> Any:
        """Raises the other process's own error."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"call": name, **arguments}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine's process has ended: {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise from_record(answer["error"])
        return answer["answer"]

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

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


# -- the benchmark ------------------------------------------------------------------------------------------


def copy_floor(tensors: dict[str, torch.Tensor], repeats: int) -> Iterator[float]:
    """Seconds to copy all the bytes on the GPU, and nothing else."""
    copies = [torch.empty_like(tensor) for tensor in tensors.values()]
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for copy, tensor in zip(copies, tensors.values(), strict=True):
            copy.copy_(tensor)
        torch.cuda.synchronize()
        yield time.perf_counter() - start


def peak_extra_mib(run: Callable[[], Any]) -> float:
    """GPU memory that both processes together take beyond what they hold, at its highest."""
    before = torch.cuda.mem_get_info()[0]
    lowest, over = [before], threading.Event()

    def watch() -> None:
        while not over.wait(0.0005):
            lowest.append(torch.cuda.mem_get_info()[0])

    thread = threading.Thread(target=watch)
    thread.start()
    run()
    over.set()
    thread.join()
    return (before - min(lowest)) / MiB


def measure(model: str, repeats: int) -> dict[str, list[float]]:
    """Figures by metric; prints the steps of the last update of each."""
    figures: dict[str, list[float]] = {}
    engine = Engine(model)

    def updates(metric: str, source: Any, count: int, **options: Any) -> None:
        for _ in range(count):
            report, error = engine.update(source, **options)
            if error is not None:
                raise error
            figures.setdefault(metric, []).append(report["seconds"]["total"])
        steps = ", ".join(f"{step} {1000 * seconds:.1f}" for step, seconds in report["seconds"].items())
        print(f"{metric:40} {statistics.median(figures[metric]):.4f} s; the last: {steps} ms", flush=True)

    try:
        tensors = checkpoint(model)
        updates("update_first_s", tensors, 1, transport="cuda_ipc")  # traces the loader, makes contexts
        figures["copy_floor_s"] = list(copy_floor(tensors, repeats))[1:]
        torch.cuda.empty_cache()
        kept = {"transport": "cuda_direct", "keep_mapped": True}
        updates("update_direct_first_s", tensors, 1, **kept)
        updates("update_direct_s", tensors, repeats, **kept)
        figures["peak_extra_mib_direct"] = [peak_extra_mib(lambda: engine.update(tensors, **kept))]
        start = time.perf_counter()
        release_mapped()
        figures["release_mapped_s"] = [time.perf_counter() - start]
        updates("update_direct_unkept_s", tensors, repeats, transport="cuda_direct")
        for bucket in (256, 512, 1024, 2048):
            options = {"transport": "cuda_ipc", "bucket_bytes": bucket * MiB}
            updates(f"update_staged_{bucket}mib_s", tensors, repeats, **options)
            figures[f"peak_extra_mib_staged_{bucket}mib"] = [
                peak_extra_mib(lambda options=options: engine.update(tensors, **options))
            ]
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
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="7b")
    parser.add_argument("--repeats", type=int, default=7, help="updates per metric")
    parser.add_argument("--out", type=Path, help="JSON file for the records; a temporary file by default")
    parser.add_argument("--commit", default="unknown", help="commit of this repository, for the record")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.model)
        return
    figures = measure(arguments.model, arguments.repeats)
    nbytes = 2 * sum(math.prod(shape) for shape, _ in layout(arguments.model).values())
    records = [
        {
            "engine": "none",
            "engine_version": "",
            "torch": torch.__version__,
            "gpu": torch.cuda.get_device_name(0),
            "model": arguments.model,
            "bytes": nbytes,
            "subject": "plugin",
            "metric": metric,
            "unit": "MiB" if "_mib_" in metric and metric.startswith("peak") else "s",
            "median": statistics.median(values),
            "min": min(values),
            "max": max(values),
            "n": len(values),
            "commit": arguments.commit,
            "command": f"python -m integration.bench_wire --model {arguments.model}",
        }
        for metric, values in figures.items()
    ]
    out = arguments.out or Path(tempfile.gettempdir()) / "bench_wire.json"
    out.write_text(json.dumps(records, indent=1))
    for record in records:
        print(f"{record['metric']:40} {record['median']:10.4f} {record['unit']}")


if __name__ == "__main__":
    main()
