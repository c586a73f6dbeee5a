"""Two machines, made of network namespaces: the engine's own address is local on its machine, and no other one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

HERE, THERE = "10.201.77.1", "10.201.77.2"
SERVER = """
    import sys
    import uvicorn
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse
    from rl_memory_plugins.errors import RLMemoryError
    from rl_memory_plugins.server.auth import ControlAuth

    app, auth = FastAPI(), ControlAuth(sys.argv[1:])

    @app.get("/memory")
    def memory(request: Request):
        try:
            auth.check(request)
        except RLMemoryError as error:
            return JSONResponse(type(error).__name__, 403)
        return "admitted"

    uvicorn.run(app, host="0.0.0.0", port=8000, log_level="error")
"""
CLIENT = """
    import json, sys, time
    import httpx

    def ask(address, key):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        for _ in range(600):
            try:
                return httpx.get(f"http://{address}:8000/memory", headers=headers, trust_env=False, timeout=5).json()
            except httpx.ConnectError:
                time.sleep(0.1)
        return "no answer"

    print(json.dumps([ask(address, sys.argv[1]) for address in sys.argv[2:]]))
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    """The names of two namespaces with a link between them."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need iproute2 and root")
    names = (f"rlm{os.getpid()}a", f"rlm{os.getpid()}b")
    try:
        for name in names:
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"this machine makes no network namespaces: {error.stderr.decode()}")
        links = [f"{name}0" for name in names]
        ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for name, link, address in zip(names, links, (HERE, THERE), strict=True):
            ip("link", "set", link, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def on(name: str, script: str, *arguments: str) -> list[str]:
    return ["ip", "netns", "exec", name, sys.executable, "-c", textwrap.dedent(script), *arguments]


def answers(name: str, key: str, *addresses: str) -> list[str]:
    done = subprocess.run(on(name, CLIENT, key, *addresses), check=True, capture_output=True, text=True, timeout=180)
    return json.loads(done.stdout)


@pytest.mark.parametrize("key", ["", "k"])
def test_the_machine_s_own_address_is_local_and_a_neighbour_s_is_not(machines: tuple[str, str], key: str) -> None:
    here, there = machines
    server = subprocess.Popen(on(here, SERVER, *([key] if key else [])))
    try:
        without = "AuthenticationError" if key else "admitted"
        assert answers(here, "", HERE, "127.0.0.1") == [without, without]
        assert answers(there, "", HERE) == ["AuthenticationError" if key else "PermissionDeniedError"]
        assert answers(there, "k", HERE) == ["admitted" if key else "PermissionDeniedError"]
    finally:
        server.kill()
        server.wait()
