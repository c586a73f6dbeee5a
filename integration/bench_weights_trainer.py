"""The trainer process of `bench_weights`. It sends a checkpoint's tensors by every route and times each route."""

from __future__ import annotations

import functools
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from integration.gpu_figures import copy_floor, peak_extra_bytes
from integration.models import FP8_BLOCKS, SHAPES, checkpoint_shapes, fp8_checkpoint_names
from rl_memory_plugins.trainer import ModelSource, Offloader, QuantisedSource, push_weights
from rl_memory_plugins.weights.checksums import tensor_checksum
from rl_memory_plugins.weights.cuda_ipc import release_mapped

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
        self.record(f"update_{name}_first_s", [seconds(send)[0]])
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

    def _vllm_route(self, packed: bool) -> Send:
        """vLLM's weight transfer by IPC, with its own trainer's side."""
        from vllm.distributed.weight_transfer import ipc_engine

        call, weights = self._engine.call, self._weights
        largest = max(tensor.nbytes for _, tensor in weights.sent())
        buffer = {"packed": packed, "packed_buffer_size_bytes": max(largest, 1 << 30)}
        if not hasattr(ipc_engine, "IPCTrainerWeightTransferEngine"):  # older vLLM: the trainer's side is a function

            def send() -> None:
                def ship(info: Any) -> None:
                    call("native_update", {key: value for key, value in vars(info).items() if value is not None})

                call("native_start")
                ipc_engine.IPCWeightTransferEngine.trainer_send_weights(weights.sent(), {"send_mode": ship, **buffer})
                call("native_finish")

            call("native_init", {})
            return send

        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

        def metadata(_: Any) -> list[Any]:
            return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.sent()]

        def tensors(_: Any) -> Iterator[tuple[str, torch.Tensor]]:
            return weights.sent()

        newer = hasattr(WeightSource, "iter_full")  # since vLLM 0.33, which wants a property
        members = {"metadata": functools.cached_property(metadata) if newer else metadata}
        source = type("Source", (WeightSource,), {**members, "__iter__": tensors, "iter_full": tensors})()

        class Client:
            def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
                call("native_init", init_info)

            def start_weight_update(self) -> None:
                call("native_start")

            def update_weights(self, update_info: dict[str, Any]) -> None:
                call("native_update", update_info)

            def finish_weight_update(self, weight_version: str | None = None) -> None:
                call("native_finish")

        sender = ipc_engine.IPCTrainerWeightTransferEngine.trainer_init(
            ipc_engine.IPCTrainerInitInfo(rank=0, **buffer), client=Client(), source=source
        )
        return lambda: sender.send_weights()

    def _sglang_route(self, packed: bool) -> Send:
        """SGLang's update from tensors, serialised as its callers do: as they are, or in flattened buckets."""
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        if self._device == "cuda":
            monkey_patch_torch_reductions()
        call, weights = self._engine.call, self._weights
        sessions = call("native_init", {})

        def send() -> None:
            if sessions:
                call("native_start")
            named = list(weights.sent())
            if packed:
                send_buckets(named)
            else:
                call("native_update", MultiprocessingSerializer.serialize(named), None, True)
            if sessions:
                call("native_finish")

        def send_buckets(named: list[tuple[str, torch.Tensor]]) -> None:
            buckets = list(cut(named, 1 << 30))
            for number, bucket in enumerate(buckets):
                flat = FlattenedTensorBucket(named_tensors=bucket)
                content = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
                payload = MultiprocessingSerializer.serialize(content)
                call("native_update", payload, "flattened_bucket", number == len(buckets) - 1)

        return send


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


def cut(named: list[tuple[str, torch.Tensor]], nbytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Lists of at most `nbytes`; a larger tensor has a list of its own."""
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in named:
        if bucket and size + tensor.nbytes > nbytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    yield bucket


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
