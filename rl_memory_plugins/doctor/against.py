"""What a running engine says: `rl-memory doctor --against URL`."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from rl_memory_plugins.client import ROUTES, http_client
from rl_memory_plugins.doctor import engine_state
from rl_memory_plugins.doctor.finding import PAGE, Finding, failure, not_applicable, ok, warning
from rl_memory_plugins.doctor.listening import engine_ports

ANSWER_S = 10.0  # of each wait for bytes
ASK_S = 60.0

Json = dict[str, Any]


@dataclass(frozen=True)
class _Answer:
    status: int
    body: Any  # parsed JSON; `None` if it is none
    text: str

    @property
    def error(self) -> Json:
        """The error record of a control route; empty if the answer is none."""
        found = self.body.get("error") if isinstance(self.body, dict) else None
        return found if isinstance(found, dict) and {"code", "message", "details"} <= found.keys() else {}


def ask(url: str, api_key: str = "") -> list[Finding]:
    """The findings about the engine at `url`. Never raises, and never takes longer than `ASK_S`."""
    found: list[list[Finding]] = []
    thread = threading.Thread(target=lambda: found.append(_ask(url, api_key)), daemon=True)
    thread.start()
    thread.join(ASK_S)
    if found:
        return found[0]
    hangs = failure(f"{url} did not answer all questions within {ASK_S:g} s", "look at the server's log")
    return _unanswered(hangs, not_applicable("see `url`"))


def _unanswered(url: Finding, auth: Finding) -> list[Finding]:
    """All findings about an engine that has told nothing."""
    why = not_applicable("the engine gave no status: see `url` and `auth`")
    findings = [_named(url, "url", "starting"), _named(auth, "auth", "requests")]
    return findings + [_named(why, name, section) for name, section, _ in STATES]


def _ask(url: str, api_key: str) -> list[Finding]:
    reached, memory = _reach(url, api_key)
    if memory is None:
        return _unanswered(*reached)
    findings = [_named(reached[0], "url", "starting"), _named(reached[1], "auth", "requests")]
    installation = _installation(url, api_key)
    for name, section, examine in STATES:
        try:
            finding = examine(memory, installation)
        except (KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
            finding = failure(
                f"the server's answer has another form than this version of the package expects: {error!r}",
                "install the same version on both sides",
            )
        findings.append(_named(finding, name, section))
    return findings


#: The checks of an engine's answers: name, section of the page with the symptoms, function of both answers.
STATES: tuple[tuple[str, str, Callable[[Json, Json | None], Finding]], ...] = (
    ("versions", "updates", engine_state.versions),
    ("active-hooks", "starting", engine_state.active_hooks),
    ("engine-boards", "health", engine_state.engine_boards),
    ("same-place", "updates", engine_state.same_place),
    ("admission", "requests", engine_state.admission),
    ("updates", "updates", engine_state.updates),
    ("next-sleep", "memory", engine_state.next_sleep),
    ("next-wake", "memory", engine_state.next_wake),
    ("kept-memory", "memory", engine_state.kept_memory),
    ("rank-allocators", "memory", engine_state.rank_allocators),
)

NAMES = ("url", "auth", *(name for name, _, _ in STATES))


def _named(finding: Finding, name: str, section: str) -> Finding:
    return msgspec.structs.replace(finding, name=name, docs=f"{PAGE}#{section}")


def _reach(url: str, api_key: str) -> tuple[tuple[Finding, Finding], Json | None]:
    """The findings `url` and `auth`, and the answer to `GET /memory` if there is one."""
    unknown = not_applicable("no control route answered")
    problem = _wrong_address(url)
    if problem is not None:
        return (problem, unknown), None
    try:
        answer = _get(url, api_key, f"{ROUTES}/memory")
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeEncodeError) as error:
        return (_no_connection(url, error), unknown), None
    if answer.status in (401, 403):
        reached = ok(f"a server answers at {url}") if answer.error else _plain_server(url, api_key, answer)
        return (reached, _refused(answer, api_key)), None
    if answer.error.get("details", {}).get("reason") == "starting":
        starting = warning(f"{url}: {answer.error['message']}", "wait until the engine has started, and ask again")
        return (starting, unknown), None
    if answer.error:
        told = f"{answer.error['code']}: {answer.error['message']}"
        return (failure(f"{url} answers {answer.status}, {told}", "docs/errors.md says what to do"), unknown), None
    if answer.status != 200 or not isinstance(answer.body, dict) or "engines" not in answer.body:
        return (_plain_server(url, api_key, answer), unknown), None
    return (ok(f"the engine at {url} answers on its control routes"), _admitted(url, api_key)), answer.body


def _get(url: str, api_key: str, path: str) -> _Answer:
    with http_client(url.rstrip("/"), api_key, httpx.Timeout(ANSWER_S)) as http:
        response = http.get(path)
    try:
        body = response.json()
    except ValueError:
        body = None
    return _Answer(response.status_code, body, response.text[:200])


def _wrong_address(url: str) -> Finding | None:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return failure(f"{url} is no address: {error}", "write http://HOST:PORT")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return failure(f"{url} is no address of an HTTP server", "write http://HOST:PORT")
    if parts.path.strip("/"):
        return failure(
            f"{url} has the path {parts.path}", f"give the server's address alone: {parts.scheme}://{parts.netloc}"
        )
    try:
        socket.getaddrinfo(parts.hostname, port or 80)
    except OSError as error:
        return failure(f"the host {parts.hostname} is not known here: {error}", "correct the name, or write an address")
    return None


def _no_connection(url: str, error: Exception) -> Finding:
    if isinstance(error, httpx.ConnectError):
        ports = engine_ports()
        known = f"; engines of this user listen on {', '.join(map(str, ports))}" if ports else ""
        return failure(
            f"nothing listens at {url} ({error}){known}",
            "correct the port, start the engine, or start it with `--host` if this is another machine",
            ports=ports,
        )
    if isinstance(error, httpx.ConnectTimeout):
        return failure(f"no connection to {url} within {ANSWER_S:g} s", "look at the host and its firewall")
    if isinstance(error, httpx.TimeoutException):
        return failure(
            f"the server at {url} took the request and gave no answer within {ANSWER_S:g} s",
            "look at its log: its process may hang or be stopped; ask again later",
        )
    if isinstance(error, UnicodeEncodeError):
        return failure("the API key has characters that no HTTP header can hold", "correct the key")
    return failure(
        f"{url} does not answer as an HTTP server ({type(error).__name__}: {error})",
        "use https:// if the server has a certificate, or correct the port",
    )


def _plain_server(url: str, api_key: str, answer: _Answer) -> Finding:
    """A server that has no control routes, or does not let us to them."""
    models = None
    with suppress(httpx.HTTPError):
        models = _get(url, api_key, "/v1/models")
    told = f"{url} answers {answer.status} to {ROUTES}/memory"
    if answer.status == 401:
        return warning(
            f"{told} in a form that is not this package's: another check refuses the key before", "see the check `auth`"
        )
    if models is not None and models.status in (200, 401) and isinstance(models.body, dict):
        return failure(
            f"{told}, and {models.status} to /v1/models: an engine without the plugin",
            "start it with --rl-memory, or with `rl-memory serve`; run `rl-memory doctor` in its environment",
        )
    return failure(f"{told}: {answer.text!r}. This is not the server of an engine with the plugin", "correct the port")


def _refused(answer: _Answer, api_key: str) -> Finding:
    message = answer.error.get("message", answer.text)
    if answer.status == 403:
        return failure(
            f"403: {message}",
            "call from the engine's machine by localhost or an address and without a proxy, or give the engine a key",
        )
    if not api_key:
        return failure(f"401: {message}", "give the engine's key: --api-key, or RL_MEMORY_API_KEY")
    return failure(
        f"401: {message}",
        "give the key of vLLM's --api-key, or of SGLang's --admin-api-key if it has one, else of its --api-key",
    )


def _admitted(url: str, api_key: str) -> Finding:
    """The key was right, or none was needed: ask once more without it."""
    if not api_key:
        return ok("the engine has no key, and admits this caller as a client on its machine")
    try:
        keyless = _get(url, "", f"{ROUTES}/is_sleeping")
    except httpx.HTTPError as error:
        return warning(f"the key is right; a request without a key got no answer ({error})", "ask again")
    if keyless.status == 200:
        return warning(
            "the engine has no key: it admits every client on its machine, and the given key has no effect",
            "give the engine a key if other users or a proxy can reach its port",
        )
    return ok("the engine has a key, and the given one is right")


def _installation(url: str, api_key: str) -> Json | None:
    """The answer to `GET /installation`; `None` from a version of the package that has no such route."""
    try:
        answer = _get(url, api_key, f"{ROUTES}/installation")
    except httpx.HTTPError:
        return None
    return answer.body if answer.status == 200 and isinstance(answer.body, dict) else None
