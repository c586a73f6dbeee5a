"""The trainer process of `bench_remote`, on one GPU. It sends a checkpoint's tensors to an engine on another."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from integration import native_updates
from integration.bench_weights_trainer import OTHER_SEED, Bench, Engine, MiB, Send, Weights, empty_cache
from rl_memory_plugins.trainer import push_weights

SIDES = ("trainer", "engine")
"""The sides by the number of their GPU."""

SAMPLE_EVERY_S = 0.002
TIMEOUT_S = 40.0
"""The longest silence in an update by the plugin, which makes its communicator within a third of it."""


class RemoteBench(Bench):
    """Each row is a subject of the records: a first update, timed ones, a check, and one with the memory watched."""

    def __init__(self, engine: Engine, weights: Weights, repeats: int, device: str) -> None:
        super().__init__(engine, weights, repeats, device)
        self._gpus = range(len(SIDES)) if device == "cuda" else range(0)
        self._row = ""
        self._transport = ""
        self._before: list[int] = []

    def row(self, name: str, transport: str, make: Callable[[], Send]) -> None:
        """Measure one subject. After a failure the others still run.

        Args:
            name: Of the subject.
            transport: Of the subject, if the updates report none.
            make: Makes what sends one update. Memory that this takes counts.
        """
        self._row, self._transport = name, transport
        empty_cache(self._device)
        self._before = self._used()

        def noted() -> dict[str, Any] | None:
            nonlocal send
            send = send or make()
            report = send()
            if report is not None:
                self._transport = report["transport"]
            elif self._gpus:
                torch.cuda.synchronize()  # SGLang answers once the work of its GPU is enqueued
            return report

        send: Send | None = None
        self.route(name, noted)

    def record(self, metric: str, values: list[float], unit: str = "s", **details: Any) -> None:
        metric = metric.replace(f"_{self._row}", "").removeprefix("engine_")
        details["transport"] = self._transport
        self._engine.call("record", self._row, metric, values, unit, details)
        if metric == "update_s":
            self.record("gb_per_s", [self._weights.nbytes / 1e9 / seconds for seconds in values], "GB/s")

    def _measure_memory(self, name: str, send: Send) -> None:
        if not self._gpus:
            return
        empty_cache(self._device)
        highest, over = self._used(), threading.Event()

        def watch() -> None:
            while not over.wait(SAMPLE_EVERY_S):
                highest[:] = map(max, highest, self._used())

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            send()
        finally:
            over.set()
            thread.join()
        empty_cache(self._device)
        for side, before, most, after in zip(SIDES, self._before, highest, self._used(), strict=True):
            self.record(f"peak_extra_mib_{side}", [(most - before) / MiB], "MiB")
            self.record(f"kept_extra_mib_{side}", [(after - before) / MiB], "MiB")

    def _used(self) -> list[int]:
        """The bytes in use on each GPU, of all processes."""
        return [torch.cuda.device_memory_used(gpu) for gpu in self._gpus]

    def rows_of_plugin(self) -> None:
        """What `auto` takes, and then the communicator, whose first use of a machine may fail in more ways."""
        receivers = self._engine.call("devices")

        def sending(transport: str) -> Callable[[], Send]:
            return lambda: (
                lambda: push_weights(
                    lambda body: self._engine.call("update", body),
                    self._weights.tensors,
                    receivers=receivers,
                    transport=transport,
                    timeout_s=TIMEOUT_S,
                )
            )

        communicator = "nccl" if self._gpus else "gloo"
        self.row("plugin_auto", "auto", sending("auto"))
        self.row("plugin", communicator, sending(communicator))

    def row_of_engine(self, engine: str, port: int) -> None:
        backend = "nccl" if self._gpus else "gloo"
        make = {"vllm": self._vllm, "sglang": self._sglang}[engine]
        self.row("native", backend, lambda: make(port, backend))

    def _vllm(self, port: int, backend: str) -> Send:
        return native_updates.vllm_nccl(self.vllm_client(), self._weights.sent, port=port)

    def _sglang(self, port: int, backend: str) -> Send:
        call = self._engine.call
        return native_updates.sglang_nccl(
            lambda arguments: call("join", arguments),
            lambda arguments: call("native_update", arguments),
            self._weights.sent,
            port=port,
            backend=backend,
            begin=lambda: call("native_start"),
            end=lambda: call("native_finish"),
        )


def main(pipe: Connection, engine: str, subject: str, model: str, device: str, repeats: int, port: int) -> None:
    """The program of the trainer process. Its last message is `done`, with the rows that failed.

    Args:
        pipe: To the engine's process, whose first message says that the engine has started.
        port: A free port of this host, for the engine's own route.
    """
    try:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        weights = Weights(model, device, dtype, fp8=False)
        weights.fill(OTHER_SEED)
        pipe.recv()
        proxy = Engine(pipe)
        proxy.call("about", {"bytes": weights.nbytes, "tensors": len(weights.tensors)})
        proxy.call("tokens")  # the memory that the first answers take is no update's
        bench = RemoteBench(proxy, weights, repeats, device)
        if subject == "plugin":
            bench.rows_of_plugin()
        else:
            bench.row_of_engine(engine, port)
        failed = bench.failed
    except Exception:
        traceback.print_exc()
        failed = ["all"]
    pipe.send(("done", (failed,)))
