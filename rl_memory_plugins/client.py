"""An engine's control routes from Python: the client that trainers, the command line and the tests use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import httpx

from rl_memory_plugins.errors import InvalidRequestError, RLMemoryError, UnsupportedError, from_record

ROUTES = "/v1/rl_memory"  # these are there whatever routes the engine itself has at the root


def http_client(url: str, api_key: str, timeout: httpx.Timeout | float) -> httpx.Client:
    """To a server whose every call counts.

    A server closes a kept connection after some idle seconds, and right after an error of its own; a call sent into
    that moment fails, and cannot be sent again since it may have been carried out. So each call has a connection of its
    own, which costs less than a millisecond. It is the server that is told: a pool that is to keep none
    (`max_keepalive_connections=0`) lets one thread close the connection that another has just begun to use.
    """
    headers = {"Connection": "close"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    return httpx.Client(
        base_url=url,
        headers=headers,
        timeout=timeout,
        limits=httpx.Limits(),  # none: a control call does not wait for a hundred requests to end
        trust_env=False,  # a proxy has no business between a trainer and its engine
    )


class EngineClient:
    """One server's control routes; every error of the server is raised as the typed error it is.

    Args:
        url: The server's address, e.g. `http://127.0.0.1:8000`.
        api_key: The engine's admin or API key, where it has one.
        timeout_s: How long the server may say nothing; `None` waits as long as it does. The server has its own
            deadlines, and a transition goes on without its client.

    Raises:
        RLMemoryError: the address is none.
        InvalidRequestError: the key cannot be sent.
    """

    def __init__(self, url: str, api_key: str = "", timeout_s: float | None = None) -> None:
        self.url = url.rstrip("/")
        try:
            self._http = http_client(self.url, api_key, httpx.Timeout(timeout_s, connect=10))
        except httpx.InvalidURL as error:
            raise RLMemoryError(f"cannot reach {url}: {error}") from None
        except UnicodeEncodeError:
            raise InvalidRequestError("the API key has characters that no HTTP header can hold") from None

    def __enter__(self) -> EngineClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def sleep(self, level: Any = 1, tags: Any = None, mode: Any = "abort") -> dict[str, Any]:
        """Close admission and release memory. The answer holds the report."""
        return self.call("POST", "/sleep", {"level": level, "tags": tags, "mode": mode})

    def wake_up(self, tags: Any = None) -> dict[str, Any]:
        """Take memory back; `status` is `awake` once nothing sleeps any more."""
        return self.call("POST", "/wake_up", {"tags": tags})

    def is_sleeping(self) -> bool:
        with self._expected():
            return bool(self.call("GET", "/is_sleeping")["is_sleeping"])

    def memory(self) -> dict[str, Any]:
        """Every rank's memory by tag, and whether requests are admitted; never waits for a transition."""
        return self.call("GET", "/memory")

    def devices(self) -> list[str]:
        """The devices of all ranks, as a weight update addresses them."""
        with self._expected():
            return [rank["device"] for engine in self.memory()["engines"] for rank in engine["ranks"]]

    def weight_version(self) -> str:
        with self._expected():
            return str(self.call("GET", "/weight_version")["weight_version"])

    def checksums(self) -> dict[str, Any]:
        """Checksums of the weights as they are; see `weights.checksums`."""
        return self.call("GET", "/weights/checksums")

    def update_weights(self, tensors: Any, *, receivers: Sequence[str] | None = None, **options: Any) -> dict[str, Any]:
        """Send weights from this process to every rank of the engine, which must be on the same host.

        Args:
            tensors: A module, a mapping of names to tensors, or a `weights.source.TensorSource`.
            receivers: The devices to serve; all of the engine's where not given.
            **options: As for `weights.push.push_weights`.

        Returns: the sender's report, with the engine's under `engine`.
        """
        from rl_memory_plugins.weights.push import push_weights

        return push_weights(
            self.post_update, tensors, receivers=self.devices() if receivers is None else receivers, **options
        )

    def post_update(self, body: dict[str, Any]) -> dict[str, Any]:
        """Have the engine connect to a sender that waits for it; blocks until the update is over."""
        return self.call("POST", "/update_weights_from_ipc", body)

    @contextmanager
    def _expected(self) -> Iterator[None]:
        """Another server may answer anything."""
        try:
            yield
        except (KeyError, TypeError):
            raise RLMemoryError(f"{self.url} did not answer as control routes do") from None

    def call(self, method: str, route: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Call a control route and give its answer.

        Raises:
            RLMemoryError: the server's own error, rebuilt; or a server that has no such route or is not there.
        """
        try:
            response = self._http.request(method, ROUTES + route, json=body)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise RLMemoryError(f"cannot reach {self.url}: {error}") from None
        except httpx.HTTPError as error:
            raise RLMemoryError(
                f"no answer from {self.url} ({type(error).__name__}: {error}): the call may have been carried out; "
                "ask for the status"
            ) from None
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if response.is_success and isinstance(answer, dict):
            return answer
        failure = answer.get("error") if isinstance(answer, dict) else None
        if isinstance(failure, dict) and {"code", "message", "details"} <= failure.keys():
            raise from_record({**failure, "error": failure["code"]})
        if response.status_code == 404:
            raise UnsupportedError(
                f"{self.url} has no control routes: was its engine started with --rl-memory? "
                f"They are looked for at {response.url}; the address is the server's, without a path like /v1"
            )
        raise RLMemoryError(f"{self.url} answered {response.status_code}: {response.text[:500]}")
