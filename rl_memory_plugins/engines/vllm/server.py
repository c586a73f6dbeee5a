"""The HTTP server's side: routes, authentication and the gate, through vLLM's own endpoint plugins.

vLLM loads an endpoint plugin only if `VLLM_PLUGINS` names it. Here the flag is the opt-in: the function that
loads them is wrapped, so that an enabled server has the routes without an environment variable.

vLLM 0.25 and earlier have no endpoint plugins. There the endpoints attach when vLLM registers the first routes of its
app, before its own middleware as in later versions, and meet the engine when the app begins to serve.

A framework may build the app before it makes an engine, when no hook is there yet. The endpoints of an enabled engine
then attach when the app begins to serve.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from rl_memory_plugins.engines.vllm.client import AsyncApi, api_of
from rl_memory_plugins.engines.vllm.generation import GENERATION
from rl_memory_plugins.engines.vllm.metrics import FreshAtScrape
from rl_memory_plugins.engines.vllm.options import may_serve
from rl_memory_plugins.engines.vllm.served_adapters import ServedAdapters
from rl_memory_plugins.errors import EngineAsleepError, UnsupportedError
from rl_memory_plugins.hooking import Hooks
from rl_memory_plugins.records import EngineStatus
from rl_memory_plugins.server.late import attach_late


def install(hooks: Hooks) -> None:
    from vllm import plugins

    if hasattr(plugins, "load_endpoint_plugins"):
        hooks.wrap("vllm.plugins:load_endpoint_plugins", _load_endpoint_plugins)
    else:
        hooks.wrap("vllm.entrypoints.serve:register_vllm_serve_api_routers", _register_routers)
    hooks.wrap("vllm.entrypoints.openai.models.serving:OpenAIServingModels.__init__", _serve_adapters)
    attach_late(hooks, _attach_late, serves_enabled=_serves_enabled)


def _serve_adapters(original: Callable[..., None]) -> Callable[..., None]:
    """Serve adapters by their names."""

    def __init__(self: Any, engine_client: Any, *args: Any, **kwargs: Any) -> None:
        original(self, engine_client, *args, **kwargs)
        api = _api_of(engine_client)
        if api is not None:
            self.lora_requests = ServedAdapters(self.lora_requests, api)

    return __init__


def _load_endpoint_plugins(original: Callable[..., Any]) -> Callable[..., Any]:
    def load_endpoint_plugins(*args: Any, **kwargs: Any) -> list[Any]:
        plugins = [plugin for plugin in original(*args, **kwargs) if plugin.name != RLMemoryEndpoints.name]
        return [*plugins, RLMemoryEndpoints()]

    return load_endpoint_plugins


def _register_routers(original: Callable[[Any], None]) -> Callable[[Any], None]:
    def register_routers(app: Any) -> None:
        original(app)
        endpoints = RLMemoryEndpoints()
        endpoints.attach_router(app)
        _meet_engine_at_start(app, endpoints)

    return register_routers


def _attach_late(app: Any) -> None:
    endpoints = RLMemoryEndpoints()
    endpoints.attach(app)
    _meet_engine_at_start(app, endpoints)


def _serves_enabled(app: Any) -> bool:
    return _api_of(getattr(app.state, "engine_client", None)) is not None


def _api_of(engine: Any) -> AsyncApi | None:
    from vllm.v1.engine.async_llm import AsyncLLM

    return api_of(engine, AsyncApi) if isinstance(engine, AsyncLLM) else None


def _meet_engine_at_start(app: Any, endpoints: RLMemoryEndpoints) -> None:
    serve = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[Any]:
        await endpoints.init_state(app.state.engine_client, app.state, None)
        async with serve(app) as state:
            yield state

    app.router.lifespan_context = lifespan


class RLMemoryEndpoints:
    """A `vllm.plugins.endpoint_plugins.interface.EndpointPlugin`.

    Whoever lists it in `VLLM_PLUGINS` gets it on every server; one whose engine is not enabled stays as it is.
    """

    name = "rl_memory"
    required_tasks = None

    def __init__(self) -> None:
        self._api: AsyncApi | None = None  # the engine exists only after the routes do
        self._plain = False  # it exists, and is not enabled

    def attach_router(self, app: Any) -> None:
        if may_serve(app.state.args):
            self.attach(app)

    def attach(self, app: Any) -> None:
        """Attach to an app whose engine is enabled, or may be."""
        from rl_memory_plugins.server.attach import attach

        keys = _keys(getattr(app.state, "args", None))
        app.add_middleware(FreshAtScrape, refresh=self._refresh_metrics)
        attach(app, self._ready, self._status, keys=keys, generation=GENERATION)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace | None) -> None:
        if engine_client is not None:
            api: AsyncApi | None = api_of(engine_client, AsyncApi)
            self._plain = api is None
            if api is not None:
                from rl_memory_plugins.server.event_metrics import event_metrics

                await api.run(api.status())
                api.observer = event_metrics()
                directory = os.environ.get("PROMETHEUS_MULTIPROC_DIR")  # where vLLM may run several servers
                if directory:
                    api.share_timeline(directory)
                self._api = api

    def _status(self) -> list[EngineStatus]:
        return [] if self._plain else self._ready().status_now()

    def _refresh_metrics(self) -> None:
        if self._api is not None:
            self._api.record_sleep_state()

    def _ready(self) -> AsyncApi:
        if self._plain:
            raise UnsupportedError("this engine was started without rl_memory")
        if self._api is None:
            raise EngineAsleepError("the server is still starting", reason="starting", retry_after_s=1)
        return self._api


def _keys(args: Any) -> list[str]:
    """The keys vLLM itself asks for: its flag's, else its variable's."""
    keys = getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")]
    return [key for key in keys if key]
