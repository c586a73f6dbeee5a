"""Runs the port and the engines behind it, until a signal ends both."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.extras import needs
from rl_memory_plugins.serve.configuration import ServeFile
from rl_memory_plugins.serve.engine import ServedEngine
from rl_memory_plugins.serve.front import build_front
from rl_memory_plugins.serve.passing import proxying_client
from rl_memory_plugins.serve.supervisor import Supervisor
from rl_memory_plugins.server.auth import ControlAuth

with needs("serve"):
    import uvicorn

logger = logging.getLogger(__name__)

CLOSE_S = 5
"""How long requests may take to end after a signal."""

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The terminal's end too: the engines are in groups of their own, and would outlive it."""


class _Server(uvicorn.Server):  # type: ignore[misc]  # mypy does not read uvicorn
    """Leaves signals to `run`: uvicorn would end the process before the engines have stopped."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def run(file: ServeFile, host: str, port: int, api_key: str) -> None:
    """Serve until a signal of `ENDING`. Then no process of an engine is left.

    Raises:
        InvalidRequestError: the port is taken.
    """
    with _listening(host, port) as listener:
        for entry, taken in zip(file.models, file.ports(port), strict=True):
            with _listening("127.0.0.1", taken, f" of model {entry.name!r}"):
                pass
        async with proxying_client() as http:
            engines = [
                ServedEngine(entry, own_port, file.options(entry), api_key, http)
                for entry, own_port in zip(file.models, file.ports(port), strict=True)
            ]
            app = build_front(engines, ControlAuth([api_key]), http)
            server = _Server(
                uvicorn.Config(
                    app,
                    log_level="warning",
                    lifespan="off",
                    date_header=False,  # the engines' answers have these
                    server_header=False,
                    timeout_graceful_shutdown=CLOSE_S,
                )
            )
            loop = asyncio.get_running_loop()
            for number in ENDING:
                # Under nohup SIGHUP is ignored. A shell's job in the background ignores SIGINT, but may be sent one.
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                    loop.add_signal_handler(number, setattr, server, "should_exit", True)
            logger.info("listening at http://%s:%d; the models: %s", host, port, ", ".join(e.name for e in engines))
            async with Supervisor(engines):
                await server.serve(sockets=[listener])
                logger.info("the engines stop")


@contextmanager
def _listening(host: str, port: int, whose: str = "") -> Iterator[socket.socket]:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise InvalidRequestError(f"cannot listen on port {port}{whose}: {error}", port=port) from None
    with listener:
        yield listener
