"""The port of `rl-memory serve`: OpenAI's routes of all models, and the state of the engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from rl_memory_plugins.errors import AuthenticationError
from rl_memory_plugins.extras import needs
from rl_memory_plugins.serve.engine import ServedEngine
from rl_memory_plugins.serve.metrics import CONTENT_TYPE, exposition
from rl_memory_plugins.serve.passing import Passage
from rl_memory_plugins.serve.routes import PASSED_ON
from rl_memory_plugins.server.auth import ControlAuth
from rl_memory_plugins.server.responses import error_response, json_response

with needs("serve"):
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
    from starlette.routing import Route

if TYPE_CHECKING:
    import httpx
    from starlette.types import Receive, Scope, Send


T = TypeVar("T")


class _Asked(msgspec.Struct):
    model: str | None = None


def build_front(engines: Sequence[ServedEngine], auth: ControlAuth, http: httpx.AsyncClient) -> Starlette:
    """The app. With a key its callers must show it; `/health` and `/metrics` need none, as at the engines themselves.

    Args:
        engines: In the order of the models.
        auth: The key of the engines, if they have one.
        http: Carries what is passed on; see `proxying_client`.
    """
    by_name = {engine.name: engine for engine in engines}
    passages = {engine.name: Passage(engine, http) for engine in engines}

    async def models(request: Request) -> Response:
        return await _checked(auth, request) or json_response({"object": "list", "data": await _listed(engines)})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        refused = await _checked(auth, request)
        if refused is not None:
            return refused
        if name not in by_name:
            return unknown_model(name, by_name)
        [found] = await _listed([by_name[name]])
        return json_response(found)

    async def health(request: Request) -> Response:
        healthy, states = await asyncio.gather(_healthy(engines), _states(engines))
        body = {"status": "ok" if all(healthy.values()) else "unavailable", "models": states}
        return json_response(body, 200 if all(healthy.values()) else 503)

    async def metrics(request: Request) -> Response:
        healthy, scrapes = await asyncio.gather(
            _healthy(engines), _of_each(engines, (engine.metrics() for engine in engines))
        )
        restarts = {engine.name: engine.restarts for engine in engines}
        text = await asyncio.to_thread(exposition, scrapes, healthy, restarts)
        return Response(text, media_type=CONTENT_TYPE)

    class PassedOn:
        """An ASGI app, so that the client's leaving can be seen while the engine answers."""

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            request = Request(scope, receive)
            refused = await _checked(auth, request)
            if refused is None:
                try:
                    body = await request.body()
                except ClientDisconnect:
                    return
                asked = _model_of(body)
                if isinstance(asked, Response):
                    refused = asked
                elif asked not in by_name:
                    refused = unknown_model(asked, by_name)
                else:
                    refusal = by_name[asked].refusal()
                    if refusal is None:
                        await passages[asked](scope, body, receive, send)
                        return
                    refused = error_response(refusal)
            await refused(scope, receive, send)

    return Starlette(
        routes=[
            Route("/v1/models", models, methods=["GET"]),
            Route("/v1/models/{name:path}", model, methods=["GET"]),
            Route("/health", health, methods=["GET"]),
            Route("/metrics", metrics, methods=["GET"]),
            *(Route(path, PassedOn(), methods=["POST"]) for path in PASSED_ON),
        ],
        exception_handlers={404: _no_route},
    )


def unknown_model(name: str, known: Sequence[str] | dict[str, Any]) -> Response:
    """OpenAI's own error, with the names that there are."""
    message = f"The model `{name}` does not exist. The models are {', '.join(f'`{one}`' for one in known)}."
    return _openai_error(404, message, "model", "model_not_found")


async def _checked(auth: ControlAuth, request: Request) -> Response | None:
    """The answer to a request without the key; `None` if it may go on. The engines check it too."""
    if auth.has_key:
        try:
            auth.check(request)
        except AuthenticationError as error:
            return error_response(error)
    return None


def _model_of(body: bytes) -> str | Response:
    try:
        asked = msgspec.json.decode(body, type=_Asked).model
    except msgspec.MsgspecError as error:
        return _openai_error(400, f"The body must be a JSON object with a `model`: {error}", None, None)
    return asked or _openai_error(400, "you must provide a model parameter", "model", "missing_required_parameter")


def _openai_error(status: int, message: str, param: str | None, code: str | None) -> Response:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return json_response({"error": error}, status)


async def _no_route(request: Request, error: Exception) -> Response:
    message = f"{request.url.path} is not served here. Control routes are at each engine's own address: GET /v1/models."
    return _openai_error(404, message, None, "unknown_url")


async def _states(engines: Sequence[ServedEngine]) -> dict[str, str]:
    return await _of_each(engines, (engine.state() for engine in engines))


async def _healthy(engines: Sequence[ServedEngine]) -> dict[str, bool]:
    return await _of_each(engines, (engine.is_healthy() for engine in engines))


async def _of_each(engines: Sequence[ServedEngine], questions: Iterable[Awaitable[T]]) -> dict[str, T]:
    """The answers to one question, asked at once, by the model's name."""
    answers = await asyncio.gather(*questions)
    return {engine.name: answer for engine, answer in zip(engines, answers, strict=True)}


async def _listed(engines: Sequence[ServedEngine]) -> list[dict[str, Any]]:
    """OpenAI's list of models, with more fields."""
    states = await _states(engines)
    return [
        {
            "id": engine.name,
            "object": "model",
            "created": engine.created,
            "owned_by": "rl_memory",
            "state": states[engine.name],
            "engine": engine.kind,
            "url": engine.url,
            "restarts": engine.restarts,
        }
        for engine in engines
    ]
