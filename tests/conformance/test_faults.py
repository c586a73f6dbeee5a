"""Clients and memory that fail, and callers that are not allowed."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socket import AF_INET

import httpx
import psutil
import pytest

from integration.engines.base import Server
from integration.waiting import AT_ONCE_S
from rl_memory_plugins.errors import DeviceMemoryError, RLMemoryError, StateConflictError
from tests.conformance.conftest import PROMPT
from tests.conformance.test_sleep_wake import states


def request_head(server: Server, route: str, content_length: int) -> bytes:
    """For clients that do not read the answer."""
    key = f"Authorization: Bearer {server.launch.api_key}\r\n" if server.launch.api_key else ""
    return f"POST {route} HTTP/1.1\r\nHost: localhost\r\n{key}Content-Length: {content_length}\r\n\r\n".encode()


def last(operation: str, server: Server) -> str:
    """The file by which the last of all ranks is asked to fail."""
    return f"{operation}.{server.launch.ranks - 1}"


def assert_names_the_last(error: RLMemoryError, server: Server) -> None:
    rank, engine_rank = server.launch.ranks_of_engine - 1, server.launch.dp - 1
    expected = {"rank": rank, "failed_ranks": [rank], "engine_rank": engine_rank, "failed_engine_ranks": [engine_rank]}
    assert expected.items() <= error.details.items()


def test_a_wake_without_memory_undoes_itself_on_every_rank(
    server: Server, fault_dir: Path, first_tokens: list[int]
) -> None:
    """Stock SGLang: torch_memory_saver ends the process with `exit(1)` when memory runs out in a resume."""
    server.control.sleep(1)
    before = states(server)
    (fault_dir / last("reserve", server)).touch()
    with pytest.raises(DeviceMemoryError) as caught:
        server.control.wake_up()
    assert_names_the_last(caught.value, server)
    assert {"needed_bytes", "free_bytes", "margin_bytes"} <= set(caught.value.details)
    assert states(server) == before
    assert server.post(PROMPT).status_code == 503
    server.control.wake_up()
    assert server.generate(PROMPT) == first_tokens


def test_a_partial_wake_without_memory(server: Server, fault_dir: Path, first_tokens: list[int]) -> None:
    server.control.sleep(1)
    server.control.wake_up(["weights"])
    (fault_dir / last("reserve", server)).touch()
    with pytest.raises(DeviceMemoryError):
        server.control.wake_up(["kv_cache"])
    assert states(server)["weights"] == {"resident"}
    assert states(server)["kv_cache"] == {"discarded"}
    server.control.wake_up()
    assert server.generate(PROMPT) == first_tokens


def test_a_release_that_fails_names_what_it_changed(server: Server, fault_dir: Path, first_tokens: list[int]) -> None:
    (fault_dir / last("release", server)).touch()
    with pytest.raises(DeviceMemoryError) as caught:
        server.control.sleep(1)
    assert_names_the_last(caught.value, server)
    server.control.sleep(1)  # finishes what the first could not
    assert "resident" not in states(server)["weights"] | states(server)["kv_cache"]
    server.control.wake_up()
    assert server.generate(PROMPT) == first_tokens


def test_two_clients_sleep_and_wake_at_once(server: Server, first_tokens: list[int]) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: server.control.sleep(1), range(4)))
        released = [sum(c["bytes_released"] for c in a["report"]["changes"]) for a in answers]
        assert sum(count > 0 for count in released) == 1  # one did it, the others found it done
        list(pool.map(lambda _: server.control.wake_up(), range(4)))
    assert server.generate(PROMPT) == first_tokens


def test_a_client_that_goes_away_and_retries(server: Server, first_tokens: list[int]) -> None:
    """The first call takes effect although its answer is never read; the retry finds it done."""
    for route, admitting in (("/v1/rl_memory/sleep", False), ("/v1/rl_memory/wake_up", True)):
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            raw.sendall(request_head(server, route, content_length=0))
            server.wait_admitting(admitting)
        response = server.http.post(route)
        assert response.status_code == 200
        assert response.json()["report"]["changes"] == []
    assert server.generate(PROMPT) == first_tokens


def test_a_client_that_disconnects_in_the_middle_of_its_body(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(request_head(server, "/v1/rl_memory/sleep", content_length=1000) + b"{")
    assert server.control.memory()["admitting"]


def outside_address() -> str:
    """An address of this machine that is not a loopback one."""
    addresses = [one.address for found in psutil.net_if_addrs().values() for one in found if one.family == AF_INET]
    outside = [address for address in addresses if not address.startswith("127.")]
    if not outside:
        pytest.skip("this machine has loopback addresses only")
    return outside[0]


def test_the_machine_s_own_address_is_local_and_a_key_guards_it_too(server: Server) -> None:
    """Trainers under Ray call it. `tests/unit/server/test_auth_network.py` calls from another machine."""
    url = f"http://{outside_address()}:{server.port}/v1/rl_memory/memory"
    anonymous = httpx.get(url, trust_env=False, timeout=AT_ONCE_S)
    wrong = httpx.get(url, headers={"Authorization": "Bearer wrong"}, trust_env=False, timeout=AT_ONCE_S)
    proxied = httpx.get(url, headers={"X-Forwarded-For": "10.0.0.1"}, trust_env=False, timeout=AT_ONCE_S)
    if server.launch.api_key:
        assert (anonymous.status_code, wrong.status_code, proxied.status_code) == (401, 401, 401)
        right = {"Authorization": f"Bearer {server.launch.api_key}"}
        assert httpx.get(url, headers=right, trust_env=False, timeout=AT_ONCE_S).status_code == 200
    else:
        assert (anonymous.status_code, wrong.status_code, proxied.status_code) == (200, 200, 403)
    assert server.control.memory()["admitting"]


def test_on_this_machine_a_key_is_needed_if_there_is_one(server: Server) -> None:
    expected = 401 if server.launch.api_key else 200
    for route in ("/wake_up", "/v1/rl_memory/wake_up"):
        assert httpx.post(server.url + route, trust_env=False, timeout=AT_ONCE_S).status_code == expected


def test_sleep_and_wake_interleave_from_many_threads(server: Server, first_tokens: list[int]) -> None:
    """A wake that meets a sleep which is still draining is told so; nothing else may be refused."""
    failures: list[Exception] = []

    def churn(number: int) -> None:
        for step in range(5):
            try:
                if (number + step) % 2:
                    server.control.sleep(1, ["kv_cache"] if number % 3 else None)
                else:
                    server.control.wake_up()
            except StateConflictError as error:
                if "waiting" not in error.details:
                    failures.append(error)
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=churn, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not failures
    server.control.wake_up()
    assert server.generate(PROMPT) == first_tokens
