"""Trainers that misbehave, each as a real peer of the engine."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from integration.engines.base import REPOSITORY, Server
from rl_memory_plugins.errors import RLMemoryError
from rl_memory_plugins.trainer import ModelSource, push_weights
from rl_memory_plugins.weights.manifest import TensorSpec

BUCKET_BYTES = 8 << 20  # small, so that an update has many buckets


class BreakingSource:
    """Gives a module's tensors up to a point, then raises or waits."""

    def __init__(self, module: Any, after: int, release: threading.Event | None = None) -> None:
        self._inner = ModelSource(module)
        self._after = after
        self._release = release
        self.reached = threading.Event()

    def specs(self) -> list[TensorSpec]:
        return self._inner.specs()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(self._inner.tensors()):
            if number == self._after:
                self.reached.set()
                if self._release is None:
                    raise RuntimeError("the trainer broke off")
                self._release.wait(60)
            yield item


class broken_update:
    """An update that breaks off in the middle; with `stall`, a context in which it hangs there.

    Args:
        timeout_s: How long it may hang; `None` leaves that to the engine's option.
    """

    def __init__(
        self,
        server: Server,
        module: Any,
        stall: bool = False,
        *,
        after: int = 30,
        timeout_s: float | None = 60,
        **options: Any,
    ) -> None:
        self._server = server
        self._options = {**options, "timeout_s": timeout_s}
        self._release = threading.Event() if stall else None
        self._source = BreakingSource(module, after=after, release=self._release)
        self.error: RLMemoryError | None = None
        self._thread = threading.Thread(target=self._push)
        self._thread.start()
        if not stall:
            self._thread.join(60)
            assert self.error is not None
            assert self._source.reached.is_set(), f"it broke off before its first bucket: {self.error}"

    def _push(self) -> None:
        try:
            self._server.control.update_weights(
                self._source,
                bucket_bytes=BUCKET_BYTES,
                **self._options,
            )
        except RLMemoryError as error:
            self.error = error

    def runs(self) -> bool:
        return self._thread.is_alive()

    def __enter__(self) -> broken_update:
        assert self._source.reached.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._release is not None
        self._release.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


def push(server: Server, tensors: Mapping[str, torch.Tensor] | Any, **options: Any) -> dict[str, Any]:
    return server.control.update_weights(tensors, bucket_bytes=BUCKET_BYTES, **options)


def push_with_wrong_token(server: Server, module: Any) -> None:
    def post(body: dict[str, Any]) -> Any:
        return server.control.post_update({**body, "token": "not the token"})

    push_weights(post, module, receivers=server.control.devices(), timeout_s=5)


def start_trainer_that_dies(
    server: Server, model: torch.nn.Module, file: Path, when: str, message: str
) -> subprocess.Popen[bytes]:
    """A trainer in its own process, which kills itself `before` or `after` it first sends such a message.

    It gets the model's tensors by `file`: to make a model, it would import `transformers` for seconds.
    """
    launch = server.launch
    save_file({name: tensor.detach() for name, tensor in model.named_parameters()}, file)
    script = f"""
        import os, signal
        from safetensors.torch import load_file
        from rl_memory_plugins.client import EngineClient
        from rl_memory_plugins.weights import wire

        send = wire.Connection.send

        def send_and_die(self, message, *arguments):
            due = type(message).__name__ == {message!r}
            if due and {when == "before"}:
                os.kill(os.getpid(), signal.SIGKILL)
            send(self, message, *arguments)
            if due:
                os.kill(os.getpid(), signal.SIGKILL)

        wire.Connection.send = send_and_die
        tensors = load_file({str(file)!r}, device={launch.device!r})
        client = EngineClient({server.url!r}, {launch.api_key!r})
        client.update_weights(tensors, bucket_bytes={BUCKET_BYTES}, timeout_s=60)
    """
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], cwd=REPOSITORY)
