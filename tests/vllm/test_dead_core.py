"""An engine core that dies while a call waits for it: vLLM alone would let the call wait for ever."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from integration.engines.base import Launch, Server
from integration.engines.vllm import Vllm
from integration.waiting import AT_ONCE_S, wait_until
from rl_memory_plugins.weights.sender import WeightSender
from tests.vllm.child import Child
from tests.vllm.conftest import engine_options, environment

KILLED_AFTER_S = 2.0  # by then the core waits for the trainer, which says nothing


def make_sync(folder: Path) -> Any:
    from rl_memory_plugins.vllm import LLM

    return LLM(rl_memory={"update_timeout_s": 600}, **engine_options(folder))


async def make_async(folder: Path) -> Any:
    from vllm.v1.engine.async_llm import AsyncLLM

    from rl_memory_plugins.vllm import AsyncEngineArgs

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_options(folder), rl_memory={"update_timeout_s": 600}))


def kill_soon(client: Any) -> None:
    (core,) = client.resources.engine_manager.processes
    threading.Timer(KILLED_AFTER_S, os.kill, (core.pid, signal.SIGKILL)).start()


def sync_update(llm: Any) -> float:
    from vllm.v1.engine.exceptions import EngineDeadError

    start = time.monotonic()
    kill_soon(llm.llm_engine.engine_core)
    with WeightSender(1) as sender, pytest.raises(EngineDeadError):
        llm.update_weights_from_ipc(sender.endpoints, sender.token)
    return time.monotonic() - start


async def async_update(engine: Any) -> float:
    from vllm.v1.engine.exceptions import EngineDeadError

    start = time.monotonic()
    kill_soon(engine.engine_core)
    with WeightSender(1) as sender, pytest.raises(EngineDeadError):
        await engine.update_weights_from_ipc(sender.endpoints, sender.token)
    return time.monotonic() - start


@pytest.mark.long
@pytest.mark.parametrize(("make", "update"), [(make_sync, sync_update), (make_async, async_update)])
def test_an_update_ends_with_the_core(make: Callable[..., Any], update: Callable[..., Any], model_folder: Path) -> None:
    with Child(make, model_folder, environment=environment(model_folder), forked=False) as child:
        assert KILLED_AFTER_S <= child(update) < KILLED_AFTER_S + AT_ONCE_S


@pytest.mark.long
def test_a_server_with_a_dead_core_is_not_called_healthy(model_folder: Path, tmp_path: Path) -> None:
    """Stock: the same. The core dies in an update, when the status board says that the update runs."""
    launch = Launch(model_folder, options={"update_timeout_s": 600})
    with Server(Vllm(), launch, tmp_path / "server.log") as server, ThreadPoolExecutor(1) as pool:
        with WeightSender(1) as sender:
            body = {"endpoints": sender.endpoints, "token": sender.token}
            update = pool.submit(server.http.post, "/v1/rl_memory/update_weights_from_ipc", json=body)
            server.wait_admitting(False)
            assert server.is_healthy()
            cores = [process for process in server.processes() if "EngineCore" in " ".join(process.cmdline())]
            cores[0].kill()
            wait_until(lambda: not server.is_healthy(), "the dead engine is not called healthy", AT_ONCE_S)
            assert not server.is_healthy()
            with contextlib.suppress(httpx.HTTPError):
                assert update.result(60).status_code >= 500
