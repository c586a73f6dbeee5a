"""An engine's control routes from Python: the client that trainers, the command line and the tests use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import httpx

from rl_memory_plugins import answer_time, keepalive
from rl_memory_plugins.api_keys import usable_key
from rl_memory_plugins.errors import (
    AuthenticationError,
    NoAnswerError,
    RLMemoryError,
    UnsupportedError,
    from_record,
)
from rl_memory_plugins.trace_context import outgoing

TRANSITION_S = 900.0
"""How long a transition may take if the caller names no time. The engine's own `drain_timeout_s` is 600 by default."""

CONNECT_S = 10.0

STATUS_S = 30.0
"""How long the server may take for its status if the caller names no time. No status waits for a transition."""

ROUTES = "/v1/rl_memory"  # these are there whatever routes the engine itself has at the root


def http_client(
    url: str, api_key: str | None, timeout: httpx.Timeout | float, transport: httpx.BaseTransport | None = None
) -> httpx.Client:
    """A client that opens a new connection for each call, at a cost of less than a millisecond.

    A server closes an idle connection after some seconds, and any connection after an error of its own. A call sent at
    that moment fails, and must not be repeated because the server may have carried it out. The header asks the server
    to close the connection. `max_keepalive_connections=0` would let one thread close the connection of another.

    A call without a limit ends when the server's host answers no more; see `keepalive`.
    """
    headers = {"Connection": "close"}
    if key := usable_key(api_key):
        headers["Authorization"] = f"Bearer {key}"
    if transport is None:
        transport = httpx.HTTPTransport(
            limits=httpx.Limits(),  # no limit: a control call must not wait until a hundred requests end
            trust_env=False,
            socket_options=keepalive.socket_options(),
        )
    return httpx.Client(
        base_url=url,
        headers=headers,
        timeout=timeout,
        transport=transport,
        trust_env=False,  # no proxy between a trainer and its engine
    )


class EngineClient:
    """The control routes of one server. Raises each error of the server as its own type.

    If a span of OpenTelemetry is current, the calls are part of its trace.

    Every call takes `timeout_s`: the seconds that the server may take to answer, in place of the client's; `math.inf`
    for no limit. A transition continues without its client.

    Args:
        url: The address of the server, e.g. `http://127.0.0.1:8000`.
        api_key: The admin or API key of the engine, if it has one; `None` or empty for none.
        timeout_s: The seconds that the server may take to answer; `None` for no limit. Default: `TRANSITION_S` for
            transitions and checksums, and `STATUS_S` for the status. An update has no limit here: it takes as long as
            the trainer sends, and both its ends notice a peer that says nothing. A server whose host is gone is noticed
            within minutes.
        transport: What carries the calls instead of a connection to `url`.

    Raises:
        RLMemoryError: the address is not valid.
        InvalidRequestError: the key has characters that no HTTP header can hold.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = "",
        timeout_s: float | Literal["default"] | None = "default",
        *,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._has_default = timeout_s == "default"
        self._timeout_s = TRANSITION_S if timeout_s == "default" else timeout_s
        try:
            self._http = http_client(self.url, api_key, httpx.Timeout(None, connect=CONNECT_S), transport)
        except httpx.InvalidURL as error:
            raise RLMemoryError(f"cannot reach {url}: {error}") from None

    def __enter__(self) -> EngineClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def sleep(
        self,
        level: Any = 1,
        tags: Any = None,
        mode: Any = "abort",
        keep: Any = None,
        *,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """Close admission and release memory. `report` of the answer holds the report.

        Args:
            keep: Names of weights, or globs, that level 2 preserves.
            timeout_s: See above.
        """
        body = {"level": level, "tags": tags, "mode": mode}
        return self.call("POST", "/sleep", body if keep is None else {**body, "keep": keep}, timeout_s=timeout_s)

    def wake_up(self, tags: Any = None, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Take memory back. `status` of the answer is `awake` if no tag sleeps any more."""
        return self.call("POST", "/wake_up", {"tags": tags}, timeout_s=timeout_s)

    def is_sleeping(self, *, timeout_s: float | None = None) -> bool:
        with self._expected():
            return bool(self._status("/is_sleeping", timeout_s)["is_sleeping"])

    def memory(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Every rank's memory by tag, and whether requests are admitted; never waits for a transition."""
        return self._status("/memory", timeout_s)

    def timeline(self, since: int = 0, *, timeout_s: float | None = None) -> dict[str, Any]:
        """The transitions that have ended, and the present state; never waits for a transition.

        Args:
            since: Only events with higher numbers: `next` of the last answer.
            timeout_s: See above.
        """
        return self._status(f"/timeline?since={since}", timeout_s)

    def devices(self, *, timeout_s: float | None = None) -> list[str]:
        """The devices of all ranks, as a weight update addresses them."""
        with self._expected():
            engines = self.memory(timeout_s=timeout_s)["engines"]
            return [rank["device"] for engine in engines for rank in engine["ranks"]]

    def weights_state(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """`content`, `weight_version`, `admitting` and `reason` of `memory`."""
        with self._expected():
            memory = self.memory(timeout_s=timeout_s)
            return {name: memory[name] for name in ("content", "weight_version", "admitting", "reason")}

    def asleep_bytes(self, tag: str, *, timeout_s: float | None = None) -> list[tuple[str, int]]:
        """The device of each rank, and the bytes that a wake of a tag takes there."""
        with self._expected():
            ranks = [rank for engine in self.memory(timeout_s=timeout_s)["engines"] for rank in engine["ranks"]]
            tags = [(rank["device"], rank["tags"][tag]) for rank in ranks]
            return [(device, one["bytes"] if one["state"] != "resident" else 0) for device, one in tags]

    def weight_version(self, *, timeout_s: float | None = None) -> str:
        with self._expected():
            return str(self._status("/weight_version", timeout_s)["weight_version"])

    def checksums(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Checksums of the weights as they are; see `weights.checksums`."""
        return self.call("GET", "/weights/checksums", timeout_s=timeout_s)

    def update_weights(self, tensors: Any, *, receivers: Sequence[str] | None = None, **options: Any) -> dict[str, Any]:
        """Send weights from this process to every rank of the engine.

        An engine on another host needs `advertise=`, this host's address; see docs/several-machines.md.

        Args:
            tensors: A module, a mapping of names to tensors, or a `trainer.TensorSource`.
            receivers: The devices to serve; all devices of the engine if not given.
            **options: As for `trainer.push_weights`; among them `timeout_s`, the longest silence of either side.

        Returns: the report of the sender, with the report of the engine as `engine`.
        """
        from rl_memory_plugins.trainer.push import push_weights

        return push_weights(
            self.post_update, tensors, receivers=self.devices() if receivers is None else receivers, **options
        )

    def update_weights_from_checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        partial: bool = False,
        weight_version: str | None = None,
        mode: Any = "keep",
        update_timeout_s: float | None = None,
        base_version: str | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """Have the engine take weights from safetensors files on its own host.

        Args:
            path: A folder, or one file, as the engine's host knows it.
            partial: The files hold only some of the weights. The other weights must be valid.
            weight_version: The version of the weights after the update.
            mode: How the engine treats running requests during the update: a `PauseMode`.
            update_timeout_s: The longest silence of either side of the update, in seconds.
            base_version: The version that the engine's weights must have. With another one the engine refuses.
            timeout_s: See above.
        """
        given = {"weight_version": weight_version, "mode": mode, "timeout_s": update_timeout_s}
        body = {"path": os.fspath(path), "partial": partial, "base_version": base_version, **given}
        limit = math.inf if timeout_s is None and self._has_default else timeout_s
        return self.call("POST", "/update_weights_from_checkpoint", body, timeout_s=limit)

    def update_adapter(
        self, name: str, tensors: Any, config: Any = None, *, receivers: Sequence[str] | None = None, **options: Any
    ) -> dict[str, Any]:
        """Send a LoRA adapter from this process to every rank of the engine, as `update_weights` sends weights.

        The requests that come afterwards use it by this name. The base weights and their version stay as they are.

        Args:
            tensors, config, **options: As for `trainer.push_adapter`.
            receivers: The devices to serve; all devices of the engine if not given.

        Returns: as `update_weights`.
        """
        from rl_memory_plugins.trainer.push import push_adapter

        devices = self.devices() if receivers is None else receivers
        return push_adapter(self.post_adapter, name, tensors, config, receivers=devices, **options)

    def remove_adapter(self, name: str, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Remove an adapter. Its running requests finish with it."""
        return self.call("POST", "/remove_adapter", {"name": name}, timeout_s=timeout_s)

    def post_adapter(self, body: dict[str, Any], *, timeout_s: float | None = None) -> dict[str, Any]:
        """`post_update` for an adapter."""
        limit = math.inf if timeout_s is None and self._has_default else timeout_s
        return self.call("POST", "/update_adapter", body, timeout_s=limit)

    def post_update(self, body: dict[str, Any], *, timeout_s: float | None = None) -> dict[str, Any]:
        """Make the engine connect to a sender that waits for it. Blocks until the update has ended."""
        limit = math.inf if timeout_s is None and self._has_default else timeout_s
        return self.call("POST", "/update_weights_from_ipc", body, timeout_s=limit)

    def _status(self, route: str, timeout_s: float | None) -> dict[str, Any]:
        limit = STATUS_S if timeout_s is None and self._has_default else timeout_s
        return self.call("GET", route, timeout_s=limit)

    def _limit(self, timeout_s: float | None) -> float | None:
        """The limit of a call for httpx, which has `None` for no limit."""
        if timeout_s is not None:
            return None if timeout_s == math.inf else timeout_s
        return self._timeout_s

    @contextmanager
    def _expected(self) -> Iterator[None]:
        """Raise a typed error for an answer of another form: the address may be that of another server."""
        try:
            yield
        except (KeyError, TypeError):
            raise RLMemoryError(f"{self.url} did not answer as control routes do") from None

    def call(
        self, method: str, route: str, body: dict[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Call a control route. Returns its answer.

        Raises:
            NoAnswerError: the server took the call and gave no answer, or none in time.
            RLMemoryError: the error of the server, or the server cannot be reached.
            UnsupportedError: the server has no control routes.
        """
        limit = self._limit(timeout_s)
        try:
            response = self._http.request(
                method,
                ROUTES + route,
                json=body,
                headers={**outgoing(), **answer_time.told(limit)},
                timeout=httpx.Timeout(limit, connect=CONNECT_S),
            )
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise RLMemoryError(f"cannot reach {self.url}: {error}") from None
        except httpx.TimeoutException:
            raise NoAnswerError(
                f"no answer from {self.url} within {limit:g} s: the call may be carried out yet; ask for the status",
                timeout_s=limit,
            ) from None
        except httpx.HTTPError as error:
            raise NoAnswerError(
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
                f"The client asked {response.url}; give it the address of the server, without a path such as /v1"
            )
        if response.status_code == 401:  # of the engine's own check, which comes before ours
            raise AuthenticationError(
                f"{self.url} does not accept this key, or asks for one: give its admin or API key"
            )
        raise RLMemoryError(f"{self.url} answered {response.status_code}: {response.text[:500]}")
