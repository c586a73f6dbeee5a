"""Examples of bodies and answers for `/openapi.json`, by name. The first body is what `/docs` sends at first."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

_DEFAULTS = "the defaults, or what the query says"


def _change(tag: str, state: str, released: int = 0, restored: int = 0, copied: int = 0) -> Json:
    moved = {"bytes_released": released, "bytes_restored": restored, "bytes_copied": copied}
    return {"rank": 0, "tag": tag, "state": state, **moved}


def _tag(nbytes: int) -> Json:
    return {"state": "resident", "bytes": nbytes, "host_bytes": 0}


SLEEP: Json = {
    _DEFAULTS: {},
    "before an update of all weights": {"level": 2},
    "only the KV cache, without ending requests": {"level": 1, "tags": ["kv_cache"], "mode": "keep"},
}
WAKE: Json = {_DEFAULTS: {}, "the weights first": {"tags": ["weights"]}}
UPDATE: Json = {
    "one trainer process for all ranks": {
        "endpoints": {"*": "/tmp/rl-memory-x/weights.sock"},
        "token": "of the trainer",
        "weight_version": "step-41",
    }
}
SLEPT: Json = {
    "level 2": {
        "status": "sleeping",
        "level": 2,
        "tags": ["kv_cache", "weights"],
        "report": {
            "changes": [_change("kv_cache", "discarded", 4190208), _change("weights", "discarded", 2088960)],
            "seconds": {
                "drain": 5.3e-05,
                "synchronize": 3.8e-06,
                "backup": 0.00014,
                "release": 0.00054,
                "total": 0.00086,
            },
            "details": {},
        },
    }
}
WOKEN: Json = {
    "a tag still sleeps": {
        "status": "sleeping",
        "tags": ["weights"],
        "report": {
            "changes": [_change("weights", "resident", restored=2088960)],
            "seconds": {"reserve": 0.0012, "map": 3.2e-06, "restore": 3.4e-05, "total": 0.0018},
            "details": {},
        },
    }
}
UPDATED: Json = {
    "one rank": {
        "status": "updated",
        "weight_version": "step-41",
        "content": "valid",
        "report": {
            "changes": [],
            "seconds": {
                "drain": 2.1e-05,
                "connect": 0.00029,
                "validate": 0.0032,
                "wait": 0.0028,
                "load": 0.00037,
                "finish": 5.4e-05,
                "total": 0.007,
            },
            "details": {"weight_version": "step-41", "ranks": [{"rank": 0, "device": "cpu:0", "bytes": 2097152}]},
        },
    }
}
SLEEPING: Json = {"awake": {"is_sleeping": False}}
MEMORY: Json = {
    "one rank": {
        "admitting": True,
        "reason": None,
        "is_sleeping": False,
        "weight_version": "initial",
        "content": "valid",
        "engines": [
            {
                "ranks": [
                    {
                        "rank": 0,
                        "device": "cpu:0",
                        "allocator": "host",
                        "tags": {"kv_cache": _tag(4190208), "weights": _tag(2088960), "cuda_graph": _tag(0)},
                        "content": "valid",
                        "content_epoch": 0,
                        "device_free_bytes": 24038719488,
                        "device_total_bytes": 25276502016,
                        "host_arena_bytes": 0,
                        "notes": [],
                        "left": {},
                    }
                ],
                "weight_version": "initial",
                "paused": False,
                "busy": "",
                "engine_rank": 0,
                "capabilities": {
                    "ranks": 1,
                    "steps_with_peers": False,
                    "modes": ["abort", "wait", "keep"],
                    "fixed_weights": "",
                    "fixed_layers": {},
                    "resident_graphs": "",
                },
            }
        ],
    }
}
VERSION: Json = {"discarded": {"weight_version": "initial", "content": "stale"}}
CHECKSUMS: Json = {
    "after a complete update": {
        "layout": "checkpoint",
        "tensors": {"a.weight": "35d3df4827bd2eb4", "b.weight": "83c0cbf0d4a9b1ed"},
        "partial": [],
        "opaque": [],
    }
}


def _error(code: str, message: str, **details: Any) -> Json:
    return {code: {"error": {"code": code, "type": "rl_memory_error", "message": message, "details": details}}}


ERRORS: dict[int, Json] = {
    401: _error("AuthenticationError", "this key is not the server's"),
    403: _error("PermissionDeniedError", "no key is set, so only this machine's clients are admitted"),
    409: _error(
        "StateConflictError",
        "the weights are asleep: wake_up(tags=['weights']) before an update",
        asleep=["weights"],
        engine_rank=0,
        failed_engine_ranks=[0],
    ),
    422: _error(
        "InvalidRequestError",
        "level 7 is not allowed: use one of 0, 1, 2",
        field="level",
        got=7,
        allowed=[0, 1, 2],
    ),
    502: _error("WeightUpdateError", "rank 0 cannot open the trainer's socket", reason="unreachable", rank=0),
    503: _error("EngineAsleepError", "the server is still starting", reason="starting", retry_after_s=1),
    504: _error("DrainTimeoutError", "running requests did not finish within drain_timeout_s"),
    507: _error(
        "DeviceMemoryError",
        "2088960 bytes are needed, 1048576 are free",
        needed_bytes=2088960,
        free_bytes=1048576,
        margin_bytes=67108864,
        rank=0,
    ),
}
