"""SGLang's health routes, which tell a busy engine from a dead one.

SGLang asks its schedulers for a token and looks for the answer once a second. A scheduler that holds an update or a
long transition answers nothing meanwhile. SGLang would call such a scheduler unhealthy after
`SGLANG_HEALTH_CHECK_TIMEOUT`, and a monitor would restart the engine in the middle of the update.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request, Response

from rl_memory_plugins.engines.sglang.client import SglangApi

ROUTES = ("/health", "/health_generate")
POLL_S = 0.01
_asking: set[asyncio.Future[Any]] = set()  # strong references: the event loop holds its tasks only weakly


def health_routes(app: Any, api: SglangApi) -> list[Any]:
    """Routes in place of SGLang's own health routes.

    Args:
        app: SGLang's app, with its own routes.
    """
    router = APIRouter()
    for native in list(app.router.routes):
        if getattr(native, "path", "") in ROUTES:
            router.add_api_route(native.path, _answering(api, native.endpoint), include_in_schema=False)
    return list(router.routes)


def _answering(api: SglangApi, native: Callable[[Request], Any]) -> Callable[[Request], Any]:
    async def health(request: Request) -> Response:
        """Answer 200 as soon as the schedulers answer, and while they are busy and live."""
        tokenizer = api.tokenizer
        if tokenizer.gracefully_exit or tokenizer.server_status.name == "Starting":
            return await native(request)  # type: ignore[no-any-return]
        begin, asking = time.time(), None
        while api.lives():
            if api.is_busy():
                tokenizer.last_receive_tstamp = time.time()  # else a question under way would end as a failure
            elif asking is None:
                asking = asyncio.ensure_future(native(request))
                _asking.add(asking)  # it ends by itself, at most a second after the answer, and forgets its request
                asking.add_done_callback(_asking.discard)
            if tokenizer.last_receive_tstamp > begin:
                return Response(status_code=200)
            if asking is not None and (await asyncio.wait([asking], timeout=POLL_S))[0]:
                return asking.result()  # type: ignore[no-any-return]
        return Response(status_code=503)

    return health
