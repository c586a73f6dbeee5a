"""The vLLM adapter. Its two entry points are here; nothing is imported before one of them is called.

| file                | runs in              | adapts                                                          |
|---------------------|----------------------|-----------------------------------------------------------------|
| switch.py           | every process        | the flag, the configuration, when the hooks are put in          |
| options.py          | every process        | how the options travel                                          |
| modes.py            | every process        | modes that are refused at the start                             |
| install.py          | enabled processes    | all hooks; `hooks.py` knows those that are in place             |
| first_load.py       | each worker          | the models that vLLM makes, and their first load                |
| worker.py           | each worker          | regions, the rank's agent                                       |
| native_allocator.py | each worker          | the regions, where vLLM asks for its own allocator              |
| update_session.py   | each worker          | loads and updates by others                                     |
| reload.py           | each worker          | how transformed layers are loaded again                         |
| capabilities.py     | core and workers     | what the engine can do                                          |
| core.py             | the engine core      | native sleep, pause, updates and RPCs                           |
| core_hooks.py       | the engine core      | the ranks and the scheduler, for the controller                 |
| external.py         | the engine core      | the ranks of an external launcher                               |
| client.py           | the client or server | `LLM`, `AsyncLLM`: calls to the cores, refusal before a request |
| server.py           | the HTTP server      | routes, authentication, the 503 gate                            |
| metrics.py          | the client or server | vLLM's metrics of sleep and of operations                       |
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
