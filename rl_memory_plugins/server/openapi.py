"""The control routes in `/openapi.json`: parameters, bodies, answers and errors.

FastAPI cannot derive these: the endpoints take the bare request, read parameters by their own rules, and answer errors
in their own shape. The schemas of answers come from the types in `answers.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rl_memory_plugins.records import LONGEST_ADAPTER, LONGEST_VERSION
from rl_memory_plugins.server import examples
from rl_memory_plugins.server.answers import (
    AdapterRemoved,
    AdapterUpdated,
    Failed,
    Installation,
    Memory,
    Sleeping,
    Slept,
    Updated,
    Version,
    Woken,
)
from rl_memory_plugins.server.parameters import LARGEST_SINCE
from rl_memory_plugins.server.router import UPDATE_ROUTE
from rl_memory_plugins.tags import PUBLIC_TAGS, Level, PauseMode
from rl_memory_plugins.timeline.records import Timeline
from rl_memory_plugins.timing import LONGEST_S

Json = dict[str, Any]

SECURITY = "rl_memory_key"

ERRORS = {
    401: "The engine has a key, and the request does not carry it (`AuthenticationError`). The engine's own check may "
    "come first, and answers in the engine's own shape.",
    403: "The engine has no key, and the request does not come from a client on its machine (`PermissionDeniedError`).",
    409: "Not possible in this state; the message names the call to make first (`StateConflictError`).",
    422: "A parameter is wrong, or this engine cannot do it; nothing happened (`InvalidRequestError`, "
    "`ManifestError`, `UnsupportedError`).",
    500: "The engine failed in a way that the contract does not foresee (`EngineFaultError`).",
    502: "The update broke off (`WeightUpdateError`).",
    503: "The server is still starting (`EngineAsleepError`).",
    504: "Running requests did not end within `drain_timeout_s`; nothing was released (`DrainTimeoutError`).",
    507: "Device or host memory does not suffice; memory and weights are as before (`DeviceMemoryError`, "
    "`HostMemoryError`).",
}
_BODY_WINS = " If query and body name a parameter, the body wins."
_ALL_ROUTES = (401, 403, 500, 503)

_TAG = {"type": "string", "enum": [tag.value for tag in PUBLIC_TAGS]}
_LEVEL: Json = {
    "type": "integer",
    "enum": [level.value for level in Level],
    "default": Level.PRESERVE.value,
    "description": "0 pauses, 1 keeps the weights in host memory, 2 discards them.",
}
_MODES = {"type": "string", "enum": [mode.value for mode in PauseMode]}
_RUNNING = (
    "Running requests end now (abort), finish first (wait), continue afterwards with a recomputed KV cache (keep), or "
    "continue with the KV cache that they have (freeze), which needs a KV cache that stays."
)
_TAGS: Json = {"type": "array", "items": _TAG, "minItems": 1, "description": "All tags if it is left out."}
_TAGS_OF_BODY: Json = {
    "description": "A list, or names with commas between them. All tags if it is left out or null.",
    "anyOf": [
        {"type": "array", "items": _TAG, "minItems": 1},
        {"type": "string", "examples": ["weights,kv_cache"]},
        {"type": "null"},
    ],
}
_GLOBS: Json = {"type": "array", "items": {"type": "string", "minLength": 1}}
_SLEEP: Json = {
    "level": _LEVEL,
    "tags": _TAGS_OF_BODY,
    "mode": {**_MODES, "default": PauseMode.ABORT.value, "description": _RUNNING},
    "keep": {
        "description": "Names of weights, or globs, that level 2 preserves, and that the next update may leave out. "
        "A list, or names with commas between them; the engine's default if it is left out or null.",
        "anyOf": [_GLOBS, {"type": "string", "examples": ["*.embed_tokens.*"]}, {"type": "null"}],
    },
}
_WAKE: Json = {"tags": _TAGS_OF_BODY}
_PLACE: Json = {
    "type": "string",
    "description": "The path of a Unix socket, `tcp://address:port`, or `tls://address:port#fingerprint`.",
    "examples": ["/tmp/rl-memory-x/weights.sock", "tcp://192.0.2.1:5000"],
}
_UPDATE: Json = {
    "endpoints": {
        "type": "object",
        "additionalProperties": {"anyOf": [_PLACE, {"type": "array", "items": _PLACE, "minItems": 1}]},
        "minProperties": 1,
        "description": "Device → where the trainer listens, or a list of places to try in order; `*` for all others.",
    },
    "token": {"type": "string", "minLength": 1, "description": "The secret that the ranks present to the trainer."},
    "weight_version": {
        "type": ["string", "null"],
        "maxLength": LONGEST_VERSION,
        "description": "The version after the update; a counter if none is given.",
    },
    "mode": {**_MODES, "default": PauseMode.KEEP.value, "description": _RUNNING},
    "timeout_s": {
        "type": ["number", "null"],
        "exclusiveMinimum": 0,
        "maximum": LONGEST_S,
        "description": "The longest silence of the trainer; the option `update_timeout_s` if none is given.",
    },
    "base_version": {
        "type": ["string", "null"],
        "description": "The version that the weights must have; any if none is given.",
    },
}
_CHECKPOINT: Json = {
    "path": {
        "type": "string",
        "minLength": 1,
        "description": "A folder of safetensors files on the engine's host, or one file.",
    },
    "partial": {
        "type": "boolean",
        "default": False,
        "description": "The files hold only some of the weights, and the others are valid.",
    },
    **{name: _UPDATE[name] for name in ("weight_version", "mode", "timeout_s", "base_version")},
}
_NAME: Json = {"type": "string", "minLength": 1, "maxLength": LONGEST_ADAPTER, "description": "The adapter's name."}
_ADAPTER: Json = {
    "name": _NAME,
    "config": {"type": "object", "description": "PEFT's `adapter_config.json`."},
    **{name: _UPDATE[name] for name in ("endpoints", "token", "timeout_s", "base_version")},
    "adapter_version": {
        "type": ["string", "null"],
        "maxLength": LONGEST_ADAPTER,
        "description": "The version of the adapter after the update; a counter if none is given.",
    },
}
_SINCE: Json = {
    "since": {
        "type": "integer",
        "minimum": 0,
        "maximum": LARGEST_SINCE,
        "default": 0,
        "description": "Only events with a higher number: `next` of the last answer.",
    }
}
#: The body and the answer of SGLang's own callers of the root route `UPDATE_ROUTE`.
_NATIVE_UPDATE: Json = {
    "title": "The engine's own",
    "type": "object",
    "required": ["zmq_handles"],
    "properties": {"zmq_handles": {"type": "object", "additionalProperties": {"type": "string"}}},
}
_NATIVE_ANSWER: Json = {
    "title": "The engine's own",
    "type": "object",
    "required": ["success", "message"],
    "properties": {"success": {"type": "boolean"}, "message": {"type": "string"}},
}


class _Route(msgspec.Struct, frozen=True):
    method: str
    path: str
    name: str
    summary: str
    answer: type
    answers: Json  # examples
    errors: tuple[int, ...] = ()  # besides those of all routes
    body: Json = {}
    bodies: Json = {}  # examples
    required: tuple[str, ...] = ()  # in the body
    parameters: Json = {}  # that only the query may hold

    @property
    def query(self) -> Json:
        """The parameters that the query may hold: none where the body has required ones, among them a secret token."""
        if self.required or self.parameters:
            return self.parameters
        lists = {"tags": _TAGS, "keep": _GLOBS}
        return {name: lists.get(name, schema) for name, schema in self.body.items()}


def _routes() -> list[_Route]:
    from rl_memory_plugins.weights.checksums import ReplicaChecksums

    release = "Release memory"
    take_back = "Take memory back"
    update = "Take weights from a trainer's sockets; ends when they are in place"
    sleeping = "Whether any tag is released or the engine is paused"
    memory = "Every rank's memory by tag, and whether requests are admitted; never waits"
    version = "The version that the last complete update gave, and whether the weights may be used"
    installed = "The versions, the replaced symbols and the status boards of the server"
    timeline = "Transitions that have ended, by time, with the bytes before and after, and the present; never waits"
    sums = "Checksums of the weights as they are, over all engines"
    return [
        _Route("post", "/sleep", "sleep", release, Slept, examples.SLEPT, (409, 422, 504, 507), _SLEEP, examples.SLEEP),
        _Route("post", "/wake_up", "wake_up", take_back, Woken, examples.WOKEN, (409, 422, 507), _WAKE, examples.WAKE),
        _Route(
            "post",
            UPDATE_ROUTE,
            "update_weights_from_ipc",
            update,
            Updated,
            examples.UPDATED,
            (409, 422, 502, 504, 507),
            _UPDATE,
            examples.UPDATE,
            required=("endpoints", "token"),
        ),
        _Route(
            "post",
            "/update_weights_from_checkpoint",
            "update_weights_from_checkpoint",
            "Take weights from safetensors files on the engine's host; ends when they are in place",
            Updated,
            examples.UPDATED,
            (409, 422, 502, 504, 507),
            _CHECKPOINT,
            examples.CHECKPOINT,
            required=("path",),
        ),
        _Route(
            "post",
            "/update_adapter",
            "update_adapter",
            "Take a LoRA adapter from a trainer's sockets; the requests that come afterwards use it",
            AdapterUpdated,
            examples.ADAPTER_UPDATED,
            (409, 422, 502, 507),
            _ADAPTER,
            examples.ADAPTER,
            required=("name", "config", "endpoints", "token"),
        ),
        _Route(
            "post",
            "/remove_adapter",
            "remove_adapter",
            "Remove an adapter; its running requests finish with it",
            AdapterRemoved,
            examples.ADAPTER_REMOVED,
            (409, 422),
            {"name": _NAME},
            {"by its name": {"name": "policy"}},
        ),
        _Route("get", "/is_sleeping", "is_sleeping", sleeping, Sleeping, examples.SLEEPING),
        _Route("get", "/memory", "memory", memory, Memory, examples.MEMORY),
        _Route("get", "/weight_version", "weight_version", version, Version, examples.VERSION),
        _Route("get", "/installation", "installation", installed, Installation, examples.INSTALLATION),
        _Route("get", "/timeline", "timeline", timeline, Timeline, examples.TIMELINE, (422,), parameters=_SINCE),
        _Route("get", "/weights/checksums", "weight_checksums", sums, ReplicaChecksums, examples.CHECKSUMS, (409, 422)),
    ]


def specification(prefixes: Sequence[str], *, has_key: bool, native_update: bool = False) -> Json:
    """The `paths` and `components` of the routes that `build_router` makes.

    Args:
        prefixes: As given to `build_router`.
        has_key: Whether callers need a key.
        native_update: Whether the root route `UPDATE_ROUTE` also takes the engine's own bodies.
    """
    routes = _routes()
    answers, components = msgspec.json.schema_components(
        [*(route.answer for route in routes), Failed], ref_template="#/components/schemas/RLMemory{name}"
    )
    paths: Json = {}
    for prefix in prefixes:
        for route, answer in zip(routes, answers, strict=False):
            operation = _operation(route, answer, answers[-1], prefix)
            operation["security"] = [{SECURITY: []}] if has_key else []
            if native_update and not prefix and route.path == UPDATE_ROUTE:
                _take_native(operation)
            paths.setdefault(prefix + route.path, {})[route.method] = operation
    return {
        "paths": paths,
        "components": {
            "schemas": {f"RLMemory{name}": schema for name, schema in components.items()},
            "securitySchemes": {SECURITY: {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: _Route, answer: Json, failed: Json, prefix: str) -> Json:
    where = "" if prefix else "_at_root"  # the engine may have its own route of this name, with its own id
    operation: Json = {
        "tags": ["rl_memory"],
        "operationId": f"rl_memory_{route.name}{where}",
        "summary": route.summary,
        "description": f"{route.summary}.{_BODY_WINS if route.query and route.body else ''}",
        "parameters": [
            {"name": name, "in": "query", "required": False, "schema": schema} for name, schema in route.query.items()
        ],
        "responses": {
            "200": _content("It is done." if route.method == "post" else "The answer.", answer, route.answers)
        },
    }
    for status in sorted((*_ALL_ROUTES, *route.errors)):
        schema: Json = {"type": "object", "required": ["error"]} if status == 401 else failed
        operation["responses"][str(status)] = _content(ERRORS[status], schema, examples.ERRORS.get(status, {}))
    operation["responses"]["503"]["headers"] = {
        "Retry-After": {"schema": {"type": "string"}, "description": "Seconds to wait before the next try."}
    }
    if route.body:
        body = {"type": "object", "additionalProperties": False, "properties": route.body}
        if route.required:
            body["required"] = list(route.required)
        operation["requestBody"] = {
            "required": bool(route.required),
            "content": {"application/json": {"schema": body, "examples": _named(route.bodies)}},
        }
    return operation


def _take_native(operation: Json) -> None:
    bodies = ((operation["requestBody"], _NATIVE_UPDATE), (operation["responses"]["200"], _NATIVE_ANSWER))
    for body, native in bodies:
        media = body["content"]["application/json"]
        media["schema"] = {"anyOf": [media["schema"], native]}
    operation["responses"]["400"] = _content("The engine's own call is wrong or failed.", {"type": "object"}, {})


def _content(description: str, schema: Json, named: Json) -> Json:
    return {
        "description": description,
        "content": {"application/json": {"schema": schema, **({"examples": _named(named)} if named else {})}},
    }


def _named(values: Json) -> Json:
    return {name: {"value": value} for name, value in values.items()}


def described(openapi: Callable[[], Json], ours: Json) -> Callable[[], Json]:
    """The `openapi` method of an app, with our routes in the place of the app's routes of the same path and method.

    Operation ids are unique. FastAPI gives all methods of a route the same id, and warns about it.

    Args:
        openapi: The app's own method.
        ours: The result of `specification`.
    """

    def with_ours() -> Json:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Duplicate Operation ID")
            schema = openapi()
        for path, operations in ours["paths"].items():
            schema["paths"].setdefault(path, {}).update(operations)
        for kind, named in ours["components"].items():
            schema.setdefault("components", {}).setdefault(kind, {}).update(named)
        for operations in schema["paths"].values():
            _make_ids_distinct(operations)
        return schema

    return with_ours


def _make_ids_distinct(operations: Json) -> None:
    """Append the method to an operation id that another method of the same path has too."""
    seen: set[str] = set()
    for method, operation in operations.items():
        if operation["operationId"] in seen:
            operation["operationId"] += f"_by_{method}"
        seen.add(operation["operationId"])
