"""One update of two servers, one of which is killed on the way and started again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.engines.base import Launch, Server
from integration.engines.vllm import Vllm
from integration.models import new_model
from rl_memory_plugins.errors import StateConflictError
from rl_memory_plugins.trainer import ModelSource, push_from_all
from tests.conformance.trainers import BUCKET_BYTES
from tests.vllm.calls import OTHER_SEED, PROMPT, SEED
from tests.vllm.conftest import greedy

OPTIONS: dict[str, Any] = {"on_failure": "continue", "timeout_s": 30.0, "bucket_bytes": BUCKET_BYTES}


class Killing:
    """A source that kills a server after some tensors."""

    def __init__(self, model: torch.nn.Module, server: Server, after: int) -> None:
        self._source = ModelSource(model)
        self._server = server
        self._after = after

    def specs(self):  # type: ignore[no-untyped-def]
        return self._source.specs()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(self._source.tensors()):
            if number == self._after:
                for process in self._server.processes():
                    os.kill(process.pid, signal.SIGKILL)
            yield item


@pytest.mark.long
def test_an_engine_that_dies_and_comes_back(model_folder: Path, tmp_path: Path) -> None:
    launch = Launch(model_folder, forked=True)
    first, other = (new_model(model_folder, seed) for seed in (SEED, OTHER_SEED))
    with ExitStack() as servers:

        def start(name: str) -> Server:
            server = Server(Vllm(), launch, tmp_path / f"{name}.log")
            servers.callback(server.stop)
            return server

        stays, dies = start("stays"), start("dies")
        stays.wait_ready()
        dies.wait_ready()

        source = Killing(other, dies, after=len(ModelSource(other).specs()) // 2)
        report = push_from_all([dies.control, stays.control], source, weight_version="1", **OPTIONS)
        [failure] = report["failed"]
        assert failure.engine == 0 and failure.state is None
        assert stays.generate(PROMPT) == greedy(other)

        restarted = start("restarted")
        report = push_from_all([dies.control, stays.control], first, weight_version="2", **OPTIONS)
        [failure] = report["failed"]
        assert failure.engine == 0 and "cannot reach" in failure.error.message
        assert stays.generate(PROMPT) == greedy(first)

        restarted.wait_ready()
        engines = [restarted.control, stays.control]
        part = {"model.norm.weight": other.state_dict()["model.norm.weight"]}
        report = push_from_all(engines, part, partial=True, weight_version="3", base_version="2", **OPTIONS)
        [failure] = report["failed"]
        assert failure.engine == 0 and isinstance(failure.error, StateConflictError)
        assert failure.state == {"content": "valid", "weight_version": "default", "admitting": True, "reason": None}
        assert stays.control.weight_version() == "3"

        report = push_from_all(engines, other, weight_version="4", **OPTIONS)
        assert report["failed"] == []
        for server in (restarted, stays):
            assert server.generate(PROMPT) == greedy(other)
            assert server.control.weight_version() == "4"
