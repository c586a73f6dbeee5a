"""Health in states where SGLang alone calls the server unhealthy, or has its watchdog end the server."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from integration.engines.base import Launch, Server
from integration.engines.ports import reserve_port
from integration.engines.sglang import Sglang
from integration.waiting import AT_ONCE_S, wait_until
from tests.conformance.test_admission import assert_healthy
from tests.conformance.trainers import broken_update
from tests.sglang.conftest import PROMPT, WATCHDOG_S

LONG = 400
NATIVE_TIMEOUT_S = 20  # the default of SGLANG_HEALTH_CHECK_TIMEOUT


def test_an_update_whose_trainer_is_silent_for_long(server: Server, other_weights: Any) -> None:
    """Stock: 503, and the server calls itself unhealthy; the watchdog would end it if a batch counted as running."""
    with server.generating(PROMPT, LONG) as request:
        with broken_update(server, other_weights, stall=True, mode="keep", after=1) as update:
            silent_until = time.monotonic() + max(NATIVE_TIMEOUT_S, 2 * WATCHDOG_S) + 2
            while time.monotonic() < silent_until:
                for route in server.kind.health_routes:
                    assert_healthy(server, route)
                assert server.http.get("/ping").status_code == 200
                time.sleep(1)
            assert update.runs()
    assert update.error is None
    assert len(server.kind.tokens(request.answer())) == LONG
    assert "Health check failed" not in server.log.read_text()


def test_schedulers_that_wait_for_a_peer(server: Server) -> None:
    """Stock: no answer while the schedulers wait for the trainer to join the group of an update."""
    from sglang.srt.utils import init_custom_process_group

    ports, port = reserve_port()
    body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    body |= {"group_name": "late", "backend": "gloo"}
    answers: list[httpx.Response] = []
    joining = threading.Thread(target=lambda: answers.append(server.http.post("/init_weights_update_group", json=body)))
    joining.start()
    try:
        time.sleep(1)
        assert_healthy(server, "/health")
        assert joining.is_alive()
    finally:
        init_custom_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=2, rank=0, group_name="late")
        joining.join(60)
        ports.close()
    assert answers[0].json()["success"], answers[0].text
    assert server.http.post("/destroy_weights_update_group", json={"group_name": "late"}).status_code == 200


def test_a_closed_server_is_not_ready(server: Server) -> None:
    """Stock: ready while it sleeps, so that routers send it requests."""
    if server.http.get("/ready").status_code == 404:
        pytest.skip("this version has no such route")
    assert server.http.get("/ready").status_code == 200
    server.control.sleep(1)
    assert server.http.get("/ready").status_code == 503
    server.control.wake_up()
    assert server.http.get("/ready").status_code == 200


def schedulers(server: Server) -> list[psutil.Process]:
    """The children of the data-parallel controller. Those that are new interpreters have not always SGLang's title."""
    server_itself, *others = server.processes()
    below = [process for process in others if process.ppid() != server_itself.pid]
    return [process for process in below if "resource_tracker" not in " ".join(process.cmdline())]


@pytest.mark.long
def test_a_dead_scheduler_is_not_called_healthy(model_folder: Path, other_weights: Any, tmp_path: Path) -> None:
    """One of two engines dies in an update. Its board still says that the update runs."""
    launch = Launch(model_folder, dp=2, options={"update_timeout_s": 600}, forked=True)
    with Server(Sglang(), launch, tmp_path / "server.log") as server:
        with broken_update(server, other_weights, stall=True, after=1, timeout_s=None) as update:
            assert server.is_healthy()
            wait_until(lambda: len(schedulers(server)) == 2, "both schedulers are among the processes", AT_ONCE_S)
            schedulers(server)[-1].kill()
            wait_until(lambda: not server.is_healthy(), "the dead engine is not called healthy", AT_ONCE_S)
            assert not server.is_healthy()
        assert update.error is not None  # stock: the caller waits for the dead scheduler without end
        for process in server.processes():
            process.kill()  # it would not end by itself
