"""Reads the parameters of a control route from the query and from a JSON body. The body wins."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import msgspec

from rl_memory_plugins.errors import InvalidRequestError

if TYPE_CHECKING:
    from starlette.requests import Request

MAX_BODY_BYTES = 1 << 20
#: Parameters that the query may repeat, each value with commas.
LISTS = ("tags", "keep")
LARGEST_SINCE = 10**18 - 1


async def read_arguments(request: Request, allowed: Collection[str]) -> dict[str, Any]:
    """The parameters of the query and of the body, with their names checked and their values not.

    Raises:
        InvalidRequestError: an unknown name (a misspelt `tags` would otherwise mean all tags), a name that the query
            gives twice, or a body that `read_body` refuses.
    """
    query: dict[str, Any] = {}
    for name in request.query_params:
        values = request.query_params.getlist(name)
        if name in LISTS:
            query[name] = [item for value in values for item in value.split(",")]
        elif len(values) == 1:
            query[name] = values[0]
        else:
            raise InvalidRequestError(f"{name} is given {len(values)} times", field=name, got=values)
    arguments = {**query, **await read_body(request)}
    reject_unknown(arguments, allowed)
    return arguments


def read_since(request: Request) -> int:
    """The parameter `since` of the query, a whole number of at least 0; 0 if there is none.

    Raises:
        InvalidRequestError: it is no such number, or the query has other parameters.
    """
    reject_unknown(request.query_params.keys(), {"since"})
    given = request.query_params.getlist("since") or ["0"]
    if len(given) > 1 or not re.fullmatch("[0-9]{1,18}", given[0]):
        raise InvalidRequestError("since must be a whole number: `next` of the last answer", field="since", got=given)
    return int(given[0])


async def read_body(request: Request) -> dict[str, Any]:
    """The JSON object in the body of the request; empty if there is no body.

    Raises:
        InvalidRequestError: the body is no JSON object, names a field twice, or exceeds `MAX_BODY_BYTES`; the rest is
            not read. Or the client has gone away: nobody reads the error, and no log shall take it for a fault of the
            engine.
    """
    from starlette.requests import ClientDisconnect

    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise InvalidRequestError(f"the body exceeds {MAX_BODY_BYTES} bytes", max_bytes=MAX_BODY_BYTES)
    except ClientDisconnect:
        raise InvalidRequestError("the client went away before the end of the body") from None
    if not body.strip():
        return {}
    try:
        content = msgspec.json.decode(bytes(body))
        json.loads(body, object_pairs_hook=_require_single)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise InvalidRequestError(f"the body must be a JSON object, not {type(content).__name__}")
    return content


def _require_single(pairs: list[tuple[str, Any]]) -> None:
    """
    Raises:
        InvalidRequestError: an object names a field twice. Decoders take the last one, or the first.
    """
    if len({name for name, _ in pairs}) == len(pairs):
        return
    ((name, count),) = Counter(name for name, _ in pairs).most_common(1)
    raise InvalidRequestError(f"{name} is given {count} times", field=name)


def reject_unknown(names: Collection[str], allowed: Collection[str]) -> None:
    """
    Raises:
        InvalidRequestError: a name is not among the allowed ones.
    """
    unknown = sorted(set(names) - set(allowed))
    if unknown:
        choice = f"use {', '.join(sorted(allowed))}" if allowed else "send them in the body"
        raise InvalidRequestError(
            f"parameters not allowed here: {', '.join(unknown)}; {choice}", got=unknown, allowed=sorted(allowed)
        )
