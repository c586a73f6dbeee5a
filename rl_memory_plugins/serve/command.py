"""The command `rl-memory serve FILE.yaml`."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from pathlib import Path
from typing import Annotated

from rl_memory_plugins.errors import UnsupportedError
from rl_memory_plugins.extras import needs

with needs("cli"):
    import typer

NEEDED = ("prometheus_client", "psutil", "pydantic_settings", "starlette", "uvicorn", "yaml")


def serve_file(
    context: typer.Context,
    host: Annotated[str, typer.Option(help="The address on which the port listens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The one port of all models.", min=1, max=65535)] = 8000,
    api_key: Annotated[
        str, typer.Option(envvar="RL_MEMORY_API_KEY", help="The key that callers must show, also at the engines.")
    ] = "",
) -> None:
    """Start several models on one GPU, all asleep but one, behind one port.

    FILE.yaml lists the models: see docs/several-models.md. A request wakes the engine of its `model`.
    """
    missing = [module for module in NEEDED if importlib.util.find_spec(module) is None]
    if missing:
        raise UnsupportedError(f"{', '.join(missing)} not installed: pip install 'rl_memory_plugins[serve]'")
    from rl_memory_plugins.api_keys import usable_key
    from rl_memory_plugins.serve.configuration import read
    from rl_memory_plugins.serve.running import run

    found, key = read(Path(str(context.info_name)), port), usable_key(api_key)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s rl-memory serve: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # says each request
    asyncio.run(run(found, host, port, key))
