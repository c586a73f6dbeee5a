"""The trainer process of `bench_weights`. It sends a checkpoint's tensors by every route and times each route."""

from __future__ import annotations

import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from integration import native_updates
from integration.gpu_figures import copy_floor, peak_extra_bytes
from integration.models import FP8_BLOCKS, SHAPES, checkpoint_shapes, fp8_checkpoint_names
from rl_memory_plugins.trainer import ModelSource, Offloader, QuantisedSource, push_weights
from rl_memory_plugins.weights.checksums import tensor_checksum
from rl_memory_plugins.weights.open_allocations import release_mapped

MiB = 1 << 20
SEED, OTHER_SEED = 1, 2
CALL_TIMEOUT_S = 120.0

Send = Callable[[], "dict[str, Any] | None"]


class Engine:
    """The engine's process, as the trainer sees it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def call(self, method: str, *arguments: Any) -> Any:
        """
        Raises:
            RuntimeError: the engine's error as text, or no answer came within `CALL_TIMEOUT_S`.
        """
        self._pipe.send((method, arguments))
        if not self._pipe.poll(CALL_TIMEOUT_S):
            raise RuntimeError(f"the engine did not answer {method} within {CALL_TIMEOUT_S:g} s")
        result, error = self._pipe.recv()
        if error:
            raise RuntimeError(f"{method}: {error}")
        return result


class Weights:
    """A checkpoint's tensors, on the device or offloaded to page-locked host memory."""

    def __init__(self, model: str, device: str, dtype: torch.dtype, fp8: bool) -> None:
        self.fp8 = fp8
        self.tensors = {
            name: torch.empty(shape, dtype=dtype, device=device)
            for name, shape in checkpoint_shapes(SHAPES[model]).items()
        }
        self._device = device
        self._offloader = Offloader(self.tensors, moves=lambda tensor: True)
        self._on_host = False
        self._quantised = QuantisedSource(self.tensors, FP8_BLOCKS, fp8_checkpoint_names(SHAPES[model]))
        self.checksums: dict[str, str] = {}  # of the numbers that `fill` wrote last

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def fill(self, seed: int) -> None:
        """Fill the tensors in place with random numbers, the same for a seed on host and device."""
        self._offloader.load()
        generator = torch.Generator(self._device).manual_seed(seed)
        for name, tensor in self.tensors.items():
            tensor.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.02, generator=generator)
        self.checksums = {name: tensor_checksum(tensor) for name, tensor in self.tensors.items()}
        if self._on_host:
            self._offloader.offload()
            empty_cache(self._device)

    def move_to_host(self) -> None:
        """Keep the tensors in host memory from the next `fill` on."""
        self._on_host = True

    def source(self) -> ModelSource | QuantisedSource | dict[str, torch.Tensor]:
        if self.fp8:
            return self._quantised
        return ModelSource(self.tensors) if self._on_host else self.tensors

    def sent(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that the engine's own route gets."""
        source = self.source()
        return iter(source.items()) if isinstance(source, dict) else source.tensors()


class Bench:
    """Measures routes: a warm-up update, several timed ones, a check of what arrived, one with the memory watched."""

    def __init__(self, engine: Engine, weights: Weights, repeats: int, device: str) -> None:
        self._engine = engine
        self._weights = weights
        self._repeats = repeats
        self._device = device
        self._tokens: list[list[int]] | None = None
        self._figures: dict[str, list[float]] = {}
        self.failed: list[str] = []

    def record(self, metric: str, values: list[float], unit: str = "s", **details: Any) -> None:
        self._figures[metric] = values
        self._engine.call("record", metric, values, unit, details)

    def route(self, name: str, send: Send) -> None:
        """Record `update_{name}_s` and the figures that belong to it. After a failure the other routes still run."""
        try:
            self._measure(name, send)
            self._measure_memory(name, send)
        except Exception:
            self.failed.append(name)
            print(f"the route {name} failed:\n{traceback.format_exc()}", flush=True)

    def _measure(self, name: str, send: Send) -> None:
        self._weights.fill(OTHER_SEED)
        took, first = seconds(send)
        self.record(f"update_{name}_first_s", [took])
        if first is not None:
            self.record(f"validate_{name}_first_s", [first["engine"]["seconds"]["validate"]])
        other = self._engine.call("tokens")
        self._weights.fill(SEED)
        self._engine.call("closed")  # forget the earlier updates
        times, report = [], None
        for _ in range(self._repeats):
            took, report = seconds(send)
            times.append(took)
        self.record(f"update_{name}_s", times, steps=steps(report))
        closed = self._engine.call("closed")
        if closed:
            self.record(f"engine_closed_{name}_s", closed)
        self._verify(name, other)

    def _verify(self, name: str, other: list[list[int]]) -> None:
        """Check that the engine has the last numbers and answers with them."""
        found = None if self._weights.fp8 else self._engine.call("checksums")
        if found is not None:
            if found["layout"] != "checkpoint" or found["partial"]:
                raise RuntimeError(f"after {name} the engine knows no checksums of the checkpoint")
            compared = found["tensors"]
            wrong = [one for one, value in compared.items() if value != self._weights.checksums[one]]
            if wrong or len(compared) + len(found["opaque"]) < len(self._weights.checksums):
                raise RuntimeError(f"after {name} {len(wrong)} of {len(compared)} checksums differ: {wrong[:3]}")
            self.record(f"checksums_{name}", [len(compared)], "tensors")
        tokens = self._engine.call("tokens")
        self._tokens = self._tokens or tokens
        if tokens == other or tokens != self._tokens:
            raise RuntimeError(f"after {name} the engine answers {tokens}, not {self._tokens}; other weights: {other}")
        self.record(f"answers_{name}", [zlib.crc32(repr(tokens).encode())], "crc32")

    def _measure_memory(self, name: str, send: Send) -> None:
        if self._device != "cuda":
            return
        empty_cache(self._device)
        torch.cuda.reset_peak_memory_stats()
        reserved = torch.cuda.memory_reserved()
        total, report = peak_extra_bytes(send)
        mine = torch.cuda.max_memory_reserved() - reserved
        if report is not None:
            mine += report["staging_bytes"]  # torch's allocator does not count the staging buffer
        self.record(f"peak_extra_mib_trainer_{name}", [mine / MiB], "MiB")
        self.record(f"peak_extra_mib_engine_{name}", [max(total - mine, 0) / MiB], "MiB")

    def summarise(self) -> None:
        """Record the figures for all routes: how long the best route closes the engine, and the highest peaks."""
        if "engine_closed_direct_s" in self._figures:
            self.record("engine_closed_s", self._figures["engine_closed_direct_s"])
        for whose in ("peak_extra_mib_engine", "peak_extra_mib_trainer"):
            peaks = [values[0] for metric, values in self._figures.items() if metric.startswith(whose)]
            if peaks:
                self.record(whose, [max(peaks)], "MiB")

    def plugin(self, bucket_bytes: int) -> None:
        weights, receivers = self._weights, self._engine.call("devices")

        def sending(**options: Any) -> Send:
            def send() -> dict[str, Any]:
                return push_weights(
                    lambda body: self._engine.call("update", body),
                    weights.source(),
                    receivers=receivers,
                    bucket_bytes=bucket_bytes,
                    **options,
                )

            return send

        if self._device != "cuda":
            self.route("staged", sending())
            weights.move_to_host()
            self.route("cpu", sending())
            return
        self.record("copy_floor_s", list(copy_floor(weights.tensors, self._repeats)))
        self.route("staged", sending(transport="cuda_ipc"))
        if weights.fp8:  # what is sent is made as it is sent: nobody can open it before
            return
        self.route("direct", sending(transport="cuda_direct", keep_mapped=True))
        release_mapped()
        self.route("direct_unkept", sending(transport="cuda_direct"))
        weights.move_to_host()
        self.route("cpu", sending(transport="cuda_ipc"))

    def native(self, engine: str) -> None:
        send = {"vllm": self._vllm_route, "sglang": self._sglang_route}[engine]
        self.route("native", send(packed=False))
        self.route("native_packed", send(packed=True))

    def vllm_client(self) -> Any:
        """What vLLM's trainer's halves take for an engine."""
        call = self._engine.call

        class Client:
            def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
                call("native_init", init_info)

            def start_weight_update(self) -> None:
                call("native_start")

            def update_weights(self, update_info: dict[str, Any]) -> None:
                call("native_update", update_info)

            def finish_weight_update(self, weight_version: str | None = None) -> None:
                call("native_finish")

        return Client()

    def _vllm_route(self, packed: bool) -> Send:
        return native_updates.vllm(self.vllm_client(), self._weights.sent, packed=packed)

    def _sglang_route(self, packed: bool) -> Send:
        call = self._engine.call
        sessions = call("native_init", {})
        return native_updates.sglang(
            lambda payload, load_format, last: call("native_update", payload, load_format, last),
            self._weights.sent,
            packed=packed,
            begin=(lambda: call("native_start")) if sessions else None,
            end=(lambda: call("native_finish")) if sessions else None,
        )


def seconds(send: Send) -> tuple[float, dict[str, Any] | None]:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    start = time.perf_counter()
    report = send()
    return time.perf_counter() - start, report


def steps(report: dict[str, Any] | None) -> dict[str, Any]:
    """Milliseconds of the last update's steps, at the sender and in the engine."""
    if report is None:
        return {}
    engine = report["engine"]["seconds"]
    return {
        "transport": report["transport"],
        "sender": {step: round(1000 * value, 2) for step, value in report["seconds"].items()},
        "engine": {step: round(1000 * value, 2) for step, value in engine.items()},
    }


def empty_cache(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def main(
    pipe: Connection,
    engine: str,
    subject: str,
    model: str,
    device: str,
    repeats: int,
    bucket_bytes: int,
    fp8: bool = False,
) -> None:
    """The program of the trainer process. Its last message is `done`, with the routes that failed."""
    proxy = Engine(pipe)
    try:
        weights = Weights(model, device, torch.bfloat16 if device == "cuda" else torch.float32, fp8)
        bench = Bench(proxy, weights, repeats, device)
        proxy.call("about", {"bytes": weights.nbytes, "tensors": len(weights.tensors)})
        print(f"{model}: {len(weights.tensors)} tensors, {weights.nbytes / 1e9:.2f} GB", flush=True)
        if subject == "plugin":
            bench.plugin(bucket_bytes)
        else:
            bench.native(engine)
        bench.summarise()
        failed = bench.failed
    except Exception:
        traceback.print_exc()
        failed = ["all"]
    pipe.send(("done", (failed,)))
