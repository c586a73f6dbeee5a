"""The vLLM adapter. Its two entry points are here; nothing is imported before one of them is called.

| file       | runs in                | adapts                                                         |
|------------|------------------------|----------------------------------------------------------------|
| switch.py  | every process          | the flag, the configuration, when the hooks are put in         |
| worker.py  | each worker            | regions, the rank's agent, the model's loader                  |
| core.py    | the engine core        | the controller's ranks and engine, native sleep and pause      |
| client.py  | the client or server   | `LLM`, `AsyncLLM`: calls to the cores, refusal before a request |
| server.py  | the HTTP server        | routes, authentication, the 503 gate                           |
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Entry point `vllm.general_plugins`: called once in every process of vLLM."""
    from rl_memory_plugins.engines.vllm import switch

    switch.register()


def endpoint_plugin() -> Any:
    """Entry point `vllm.endpoint_plugins`, for those who list `rl_memory` in `VLLM_PLUGINS`."""
    from rl_memory_plugins.engines.vllm.server import RLMemoryEndpoints

    return RLMemoryEndpoints()
