"""The port of `rl-memory serve`: real servers, and a stand-in for the engine behind."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from helpers import until

from rl_memory_plugins.errors import EngineLostError, RLMemoryError
from rl_memory_plugins.serve.front import build_front
from rl_memory_plugins.serve.passing import proxying_client
from rl_memory_plugins.serve.routes import PASSED_ON
from rl_memory_plugins.server.auth import ControlAuth

CHAT = "/v1/chat/completions"


class Engine:
    """An engine's server: an app that tells what it has been asked, and whether its clients stay."""

    def __init__(self, name: str) -> None:
        self.name, self.kind, self.url, self.created, self.restarts = name, "vllm", "", 1, 0
        self.refused: RLMemoryError | None = None
        self.healthy = True
        self.asked: list[tuple[str, bytes, dict[bytes, bytes], bytes]] = []
        self.left = 0
        self.go = asyncio.Event()  # ends an answer, or sends its next part
        self.breaks = False
        self.headers: list[tuple[bytes, bytes]] = []  # more ones of its answers
        self.together: Callable[[], Coroutine[Any, Any, None]] | None = None  # of questions that must be asked at once

    def refusal(self) -> RLMemoryError | None:
        return self.refused

    def lost(self, why: str) -> EngineLostError:
        return EngineLostError(f"model {self.name!r}: {why}", engine=self.name)

    async def _meet(self) -> None:
        if self.together is not None:
            await self.together()

    async def state(self) -> str:
        await self._meet()
        return "down" if self.refused else "asleep"

    async def is_healthy(self) -> bool:
        await self._meet()
        return self.healthy

    async def metrics(self) -> str:
        await self._meet()
        return "# TYPE x gauge\nx 1.0\n"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.asked.append((scope["path"], body, dict(scope["headers"]), scope["query_string"]))
        leaving = asyncio.ensure_future(receive())
        try:
            if b'"stream"' in body:
                await self._start(send, b"text/event-stream")
                for part in range(4):
                    await send({"type": "http.response.body", "body": b"data: %d\n\n" % part, "more_body": True})
                    if not await self._may_go(leaving):
                        return
            elif b'"wait"' in body and not await self._may_go(leaving):
                return
            else:
                await self._start(send, b"application/json")
            await send({"type": "http.response.body", "body": b"{}"})
        finally:
            leaving.cancel()

    async def _start(self, send: Any, kind: bytes) -> None:
        headers = [(b"content-type", kind), (b"x-weight-version", b"step-1"), *self.headers]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _may_go(self, leaving: asyncio.Future[Any]) -> bool:
        """Whether the client is still there when the test lets the answer go on."""
        going = asyncio.ensure_future(self.go.wait())
        await asyncio.wait({leaving, going}, return_when=asyncio.FIRST_COMPLETED)
        going.cancel()
        self.go.clear()
        if leaving.done():
            self.left += 1
        if self.breaks:
            raise RuntimeError("the engine breaks off")
        return not leaving.done()


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    config = uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        await task


def run(scenario: Callable[..., Coroutine[Any, Any, None]], key: str = "") -> None:
    async def main() -> None:
        engines = [Engine(name) for name in ("a", "b")]
        async with AsyncExitStack() as stack:
            for engine in engines:
                engine.url = await stack.enter_async_context(serving(engine))
            http = await stack.enter_async_context(proxying_client())
            app = build_front(engines, ControlAuth([key]), http)  # type: ignore[arg-type]
            url = await stack.enter_async_context(serving(app))
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, trust_env=False, timeout=60))
            await asyncio.wait_for(scenario(client, *engines), 60)

    asyncio.run(main())


def test_a_request_reaches_the_engine_of_its_model_as_it_is() -> None:
    async def scenario(client: httpx.AsyncClient, a: Engine, b: Engine) -> None:
        body = b'{"model":  "b", "x": "\xc3\xa4"}'
        answer = await client.post(CHAT + "?q=1&q=2", content=body, headers={"authorization": "Bearer k", "x-own": "1"})
        assert (answer.status_code, answer.content, answer.headers["x-weight-version"]) == (200, b"{}", "step-1")
        assert a.asked == []
        [(path, sent, headers, query)] = b.asked
        assert (path, sent, query) == (CHAT, body, b"q=1&q=2")
        assert (headers[b"authorization"], headers[b"x-own"]) == (b"Bearer k", b"1")
        assert headers[b"x-forwarded-for"] == b"127.0.0.1"  # control routes see that a proxy has sent it

    run(scenario)


def test_headers_of_the_request_that_are_of_one_connection_are_not_passed_on() -> None:
    async def scenario(client: httpx.AsyncClient, a: Engine, b: Engine) -> None:
        given = {"connection": "keep-alive, X-Once", "x-once": "1", "keep-alive": "5", "te": "trailers", "x-own": "1"}
        answer = await client.post(CHAT, content=b'{"model": "a"}', headers={**given, "accept-encoding": "identity"})
        assert answer.status_code == 200
        [(_, _, headers, _)] = a.asked
        assert not {b"x-once", b"keep-alive", b"te"} & {*headers} and headers[b"x-own"] == b"1"
        assert headers[b"host"] == a.url.removeprefix("http://").encode()
        assert (headers[b"accept-encoding"], headers[b"content-length"]) == (b"identity", b"14")

    run(scenario)


def test_a_request_gets_no_headers_that_its_client_has_not_sent() -> None:
    async def scenario(client: httpx.AsyncClient, a: Engine, b: Engine) -> None:
        for name in ("accept-encoding", "user-agent", "accept"):
            del client.headers[name]
        assert (await client.post(CHAT, json={"model": "a"})).status_code == 200
        [(_, _, headers, _)] = a.asked
        assert not {b"accept-encoding", b"user-agent", b"accept"} & {*headers}

    run(scenario)


def test_headers_of_the_answer_pass_as_they_are_but_for_those_of_one_connection() -> None:
    async def scenario(client: httpx.AsyncClient, a: Engine, b: Engine) -> None:
        a.headers = [
            *((b"set-cookie", b"a=1"), (b"set-cookie", b"b=2"), (b"x-name", "Zoë 東".encode())),
            *((b"connection", b"x-once"), (b"x-once", b"1"), (b"keep-alive", b"timeout=5"), (b"upgrade", b"h2c")),
        ]
        for _ in range(3):
            answer = await client.post(CHAT, json={"model": "a"})
            assert (answer.status_code, answer.content) == (200, b"{}")
            raw = [(name.lower(), value) for name, value in answer.headers.raw]
            assert [value for name, value in raw if name == b"set-cookie"] == [b"a=1", b"b=2"]
            assert (b"x-name", "Zoë 東".encode()) in raw
            assert not {b"x-once", b"keep-alive", b"upgrade"} & {name for name, _ in raw}

    run(scenario)


def test_an_answer_keeps_its_length_and_its_encoding() -> None:
    async def scenario(client: httpx.AsyncClient, a: Engine, b: Engine) -> None:
        a.headers = [(b"content-length", b"2"), (b"content-encoding", b"own")]
        answer = await client.post(CHAT, json={"model": "a"})
        assert (answer.headers["content-length"], answer.headers["content-encoding"]) == ("2", "own")
        assert answer.content == b"{}"

    run(scenario)


def test_a_stream_passes_as_it_comes() -> None:
    async def scenario(client: httpx.AsyncClient, a: Engine, b: Engine) -> None:
        async with client.stream("POST", CHAT, json={"model": "a", "stream": True}) as answer:
            assert answer.headers["content-type"] == "text/event-stream"
            parts = answer.aiter_raw()
            for part in range(4):  # the engine sends the next one only after this one has arrived
                assert await parts.__anext__() == b"data: %d\n\n" % part
                a.go.set()

    run(scenario)


@pytest.mark.parametrize("what", ["wait", "stream"])
def test_a_client_that_leaves_leaves_the_engine_too(what: str) -> None:
    async def scenario(client: httpx.AsyncClient, a: Engine, b: Engine) -> None:
        asking = asyncio.ensure_future(client.post(CHAT, json={"model": "a", what: True}))
        await until(lambda: len(a.asked) == 1)
        asking.cancel()
        await until(lambda: a.left == 1)

    run(scenario)


def test_a_stream_that_the_engine_breaks_off_has_no_end() -> None:
    async def scenario(client: httpx.AsyncClient, a: Engine, b: Engine) -> None:
        a.breaks = True
        asking = asyncio.ensure_future(client.post(CHAT, json={"model": "a", "stream": True}))
        await until(lambda: len(a.asked) == 1)
        a.go.set()
        with pytest.raises(httpx.RemoteProtocolError):  # no end of the stream
            await asking

    run(scenario)


def test_an_engine_that_is_not_there_is_a_503_that_names_it() -> None:
    async def scenario(client: httpx.AsyncClient, a: Engine, b: Engine) -> None:
        a.refused = EngineLostError("the engine of model 'a' ended by SIGKILL", engine="a", retry_after_s=4)
        answer = await client.post(CHAT, json={"model": "a"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["details"]["engine"]) == (503, "EngineLostError", "a")
        assert answer.headers["retry-after"] == "4"
        assert (await client.post(CHAT, json={"model": "b"})).status_code == 200
        assert a.asked == []

    run(scenario)


def test_an_engine_that_does_not_listen_is_a_503_that_names_it() -> None:
    async def main() -> None:
        engine = Engine("a")
        engine.url = "http://127.0.0.1:1"
        async with proxying_client() as http:
            app = build_front([engine], ControlAuth(), http)  # type: ignore[list-item]
            async with serving(app) as url, httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
                answer = await client.post(CHAT, json={"model": "a"})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "EngineLostError" and "'a'" in answer.json()["error"]["message"]

    asyncio.run(main())


@pytest.mark.parametrize(
    "body, status, code, said",
    [
        ('{"model": "c"}', 404, "model_not_found", "The models are `a`, `b`"),
        ("{}", 400, "missing_required_parameter", "model"),
        ('{"model": 1}', 400, None, "Expected `str"),
        ("[]", 400, None, "JSON object"),
        ("", 400, None, "JSON object"),
    ],
)
def test_a_body_without_a_known_model_is_openais_error(body: str, status: int, code: str | None, said: str) -> None:
    async def scenario(client: httpx.AsyncClient, a: Engine, b: Engine) -> None:
        answer = await client.post(CHAT, content=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["type"]) == (status, code, "invalid_request_error")
        assert said in error["message"]
        assert a.asked == b.asked == []

    run(scenario)


def test_models_are_listed_with_their_states() -> None:
    async def scenario(client: httpx.AsyncClient, a: Engine, b: Engine) -> None:
        b.refused = EngineLostError("gone")
        listed = (await client.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [(one["id"], one["object"], one["state"]) for one in listed["data"]] == [
            ("a", "model", "asleep"),
            ("b", "model", "down"),
        ]
        assert (await client.get("/v1/models/a")).json() == listed["data"][0]
        assert (await client.get("/v1/models/c")).status_code == 404

    run(scenario)


def test_health_is_true_of_all_engines() -> None:
    async def scenario(client: httpx.AsyncClient, a: Engine, b: Engine) -> None:
        answer = await client.get("/health")
        assert (answer.status_code, answer.json()["models"]) == (200, {"a": "asleep", "b": "asleep"})
        b.healthy = False
        assert (await client.get("/health")).status_code == 503

    run(scenario)


def test_metrics_have_all_models() -> None:
    async def scenario(client: httpx.AsyncClient, a: Engine, b: Engine) -> None:
        answer = await client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        assert {'x{model="a"} 1.0', 'x{model="b"} 1.0'} <= set(answer.text.splitlines())

    run(scenario)


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_all_questions_to_the_engines_are_asked_at_once(path: str) -> None:
    async def scenario(client: httpx.AsyncClient, a: Engine, b: Engine) -> None:
        asked, all_asked = [], asyncio.Event()

        async def together() -> None:
            asked.append(path)
            if len(asked) == 4:  # two of each engine
                all_asked.set()
            await all_asked.wait()

        a.together = b.together = together
        assert (await client.get(path, timeout=60)).status_code == 200

    run(scenario)


def test_control_routes_are_not_there() -> None:
    assert not [path for path in PASSED_ON if "rl_memory" in path or "sleep" in path or "weights" in path]

    async def scenario(client: httpx.AsyncClient, a: Engine, b: Engine) -> None:
        for path in (
            "/v1/rl_memory/sleep",
            "/sleep",
            "/v1/load_lora_adapter",
            "/v1/chat/completions/../../rl_memory/x",
        ):
            answer = await client.post(path, json={"model": "a"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")
        assert a.asked == []

    run(scenario)


def test_with_a_key_callers_must_show_it() -> None:
    async def scenario(client: httpx.AsyncClient, a: Engine, b: Engine) -> None:
        for request in (
            client.build_request("GET", "/v1/models"),
            client.build_request("POST", CHAT, json={"model": "a"}),
        ):
            assert (await client.send(request)).status_code == 401
            request.headers["authorization"] = "Bearer secret"
            assert (await client.send(request)).status_code == 200
        assert (await client.get("/health")).status_code == 200

    run(scenario, "secret")
