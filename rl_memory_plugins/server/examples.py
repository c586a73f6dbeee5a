"""Examples of bodies and answers for `/openapi.json`, by name. The first body is what `/docs` sends at first."""

from __future__ import annotations

from typing import Any

import msgspec

from rl_memory_plugins import errors
from rl_memory_plugins.records import EngineStatus, RankStatus, Report, StepTime, TagChange, TagStatus
from rl_memory_plugins.server.answers import (
    AdapterRemoved,
    AdapterUpdated,
    BoardFile,
    Installation,
    Memory,
    Sleeping,
    Slept,
    Updated,
    Version,
    Woken,
)
from rl_memory_plugins.server.responses import error_body
from rl_memory_plugins.tags import Content, Level, Tag, TagState
from rl_memory_plugins.timeline.records import VERSION as TIMELINE_VERSION
from rl_memory_plugins.timeline.records import Clock, Event, Present, RankMemory, Step, Timeline

Json = dict[str, Any]


def _sent(answer: msgspec.Struct) -> Json:
    """The answer as it is sent."""
    sent: Json = msgspec.json.decode(msgspec.json.encode(answer))
    return sent


_DEFAULTS = "the defaults, or the parameters of the query"

SLEEP: Json = {
    _DEFAULTS: {},
    "before an update of all weights": {"level": 2},
    "before an update of all weights but the embedding": {"level": 2, "keep": ["*.embed_tokens.*"]},
    "only the KV cache, without ending requests": {"level": 1, "tags": ["kv_cache"], "mode": "keep"},
}
WAKE: Json = {_DEFAULTS: {}, "the weights first": {"tags": ["weights"]}}
UPDATE: Json = {
    "one trainer process for all ranks": {
        "endpoints": {"*": "/tmp/rl-memory-x/weights.sock"},
        "token": "the token of the trainer",
        "weight_version": "step-41",
    },
    "a trainer on another host": {
        "endpoints": {"*": [f"tls://192.0.2.1:5000#{'0' * 64}", f"tls://[2001:db8::1]:5000#{'0' * 64}"]},
        "token": "the token of the trainer",
        "weight_version": "step-41",
    },
}
_SLEEP_REPORT = Report(
    changes=[
        TagChange(0, "kv_cache", TagState.DISCARDED, bytes_released=134213632),
        TagChange(0, "weights", TagState.DISCARDED, bytes_released=26136576, bytes_copied=8384512),
    ],
    seconds={"drain": 0.00065, "synchronize": 4.6e-06, "backup": 0.0022, "release": 0.014, "total": 0.018},
    steps=[
        StepTime("drain", None, 1795745904682959017, 1795745904683610375, 0.00065),
        StepTime("total", None, 1795745904682959017, 1795745904701204240, 0.018),
        StepTime("backup", 0, 1795745904684113475, 1795745904698366070, 0.0022),
        StepTime("synchronize", 0, 1795745904684138065, 1795745904685083768, 4.6e-06),
        StepTime("release", 0, 1795745904686624344, 1795745904700714190, 0.014),
    ],
)
SLEPT: Json = {"level 2": _sent(Slept("sleeping", Level.DISCARD, (Tag.KV_CACHE, Tag.WEIGHTS), _SLEEP_REPORT))}
_WAKE_REPORT = Report(
    changes=[TagChange(0, "weights", TagState.RESIDENT, bytes_restored=2088960)],
    seconds={"reserve": 0.0012, "map": 3.2e-06, "restore": 3.4e-05, "total": 0.0018},
)
WOKEN: Json = {"a tag still sleeps": _sent(Woken("sleeping", ["weights"], _WAKE_REPORT))}
_UPDATE_REPORT = Report(
    changes=[],
    seconds={
        "drain": 2.1e-05,
        "connect": 0.00029,
        "validate": 0.0032,
        "wait": 0.0028,
        "receive": 0.0,
        "load": 0.00037,
        "finish": 5.4e-05,
        "total": 0.007,
    },
    details={"weight_version": "step-41", "ranks": [{"rank": 0, "device": "cpu:0", "bytes": 2097152}]},
)
UPDATED: Json = {"one rank": _sent(Updated("updated", "step-41", Content.VALID, _UPDATE_REPORT))}
CHECKPOINT: Json = {"a folder": {"path": "/models/Qwen2.5-7B-Instruct", "weight_version": "instruct"}}
ADAPTER: Json = {
    "one trainer process for all ranks": {
        "name": "policy",
        "config": {"r": 16, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"]},
        "endpoints": {"*": "/tmp/rl-memory-x/weights.sock"},
        "token": "the token of the trainer",
        "adapter_version": "step-41",
    }
}
_ADAPTER_REPORT = Report(
    changes=[],
    seconds={
        "connect": 0.0003,
        "validate": 0.0004,
        "wait": 0.0028,
        "receive": 0.0,
        "load": 0.0004,
        "add": 0.003,
        "total": 0.008,
    },
    details={
        "adapter": "policy",
        "adapter_version": "step-41",
        "ranks": [{"rank": 0, "device": "cpu:0", "bytes": 65536}],
    },
)
ADAPTER_UPDATED: Json = {"one rank": _sent(AdapterUpdated("updated", "policy", "step-41", _ADAPTER_REPORT))}
_REMOVAL_REPORT = Report([], {"total": 0.0006}, {"adapter": "policy", "adapter_version": "step-41"})
ADAPTER_REMOVED: Json = {"one rank": _sent(AdapterRemoved("removed", "policy", "step-41", _REMOVAL_REPORT))}
SLEEPING: Json = {"awake": _sent(Sleeping(is_sleeping=False))}
_RANK = RankStatus(
    rank=0,
    device="cpu:0",
    allocator="host",
    tags={
        "kv_cache": TagStatus(TagState.RESIDENT, bytes=4190208),
        "weights": TagStatus(TagState.RESIDENT, bytes=2088960),
        "cuda_graph": TagStatus(TagState.RESIDENT, bytes=0),
    },
    content=Content.VALID,
    content_epoch=0,
    device_free_bytes=24038719488,
    device_total_bytes=25276502016,
    host_arena_bytes=0,
)
MEMORY: Json = {"one rank": _sent(Memory(True, None, False, "default", Content.VALID, [EngineStatus([_RANK])]))}
VERSION: Json = {"discarded": _sent(Version("default", Content.STALE))}
INSTALLATION: Json = {
    "a vLLM server": _sent(
        Installation(
            version="1.2.3",
            protocol=6,
            python="3.11.14",
            versions={"vllm": "0.32.0", "torch": "2.13.0"},
            pid=4711,
            host="node-1",
            hooks={"vllm": ["vllm.engine.arg_utils:EngineArgs.add_cli_args", "vllm.v1.engine.core:EngineCore.sleep"]},
            boards=[BoardFile("/tmp/rl-memory-1000/4730-x.board", True)],
            has_key=False,
        )
    )
}
_AWAKE = RankMemory(
    engine=0,
    rank=0,
    device="cuda:0",
    tags={"kv_cache": 42949672960, "weights": 15231233024, "cuda_graph": 981467136},
    left={},
    host={"kv_cache": 0, "weights": 0, "cuda_graph": 0},
    host_arena_bytes=0,
    device_free_bytes=23622320128,
    device_total_bytes=85017493504,
)
_ASLEEP_RANK = msgspec.structs.replace(
    _AWAKE,
    tags={"kv_cache": 0, "weights": 0, "cuda_graph": 0},
    host={"kv_cache": 0, "weights": 0, "cuda_graph": 981467136},
    host_arena_bytes=981467136,
    device_free_bytes=82784693452,
)
_WITH_LEFT = msgspec.structs.replace(_ASLEEP_RANK, left={"context": 613416960, "workspace": 142606336, "nccl": 0})
_START = 1790000000000000000
TIMELINE: Json = {
    "a sleep, a wake that was refused three times, and the present": _sent(
        Timeline(
            version=TIMELINE_VERSION,
            timeline="5f0c9a4e",
            clock=Clock(now_ns=_START + 9_000_000_000, host="node-1"),
            events=[
                Event(
                    seq=1,
                    operation="sleep",
                    start_ns=_START,
                    duration_ns=412_000_000,
                    outcome="completed",
                    steps=[
                        Step("drain", _START + 2_000_000, 60_000_000, seconds=0.06),
                        Step("backup", _START + 63_000_000, 48_000_000, rank=0, seconds=0.04),
                        Step("synchronize", _START + 63_100_000, 1_000_000, rank=0, seconds=0.001),
                        Step("release", _START + 103_000_000, 305_000_000, rank=0, seconds=0.297),
                    ],
                    before=[_AWAKE],
                    after=[_ASLEEP_RANK],
                    weight_version="step-40",
                    content=Content.STALE,
                    level=2,
                    tags=["kv_cache", "weights", "cuda_graph"],
                    mode="abort",
                    first_seq=1,
                ),
                Event(
                    seq=4,
                    operation="wake_up",
                    start_ns=_START + 5_000_000_000,
                    duration_ns=2_003_000_000,
                    outcome="failed",
                    steps=[],
                    before=[_WITH_LEFT],
                    after=[_WITH_LEFT],
                    weight_version="step-40",
                    content=Content.STALE,
                    error="DeviceMemoryError",
                    message="15231233024 bytes are needed, 1048576 are free",
                    tags=["weights"],
                    count=3,
                    first_seq=2,
                ),
            ],
            next=4,
            dropped=0,
            present=Present(
                admitting=False,
                reason="asleep",
                weight_version="step-40",
                content=Content.STALE,
                under_way=[],
                memory=[_WITH_LEFT],
            ),
        )
    )
}
CHECKSUMS: Json = {
    "after a complete update": {
        "layout": "checkpoint",
        "tensors": {"a.weight": "35d3df4827bd2eb4", "b.weight": "83c0cbf0d4a9b1ed"},
        "partial": [],
        "opaque": [],
    }
}
_ASLEEP = {"asleep": ["weights"], "engine_rank": 0, "failed_engine_ranks": [0]}
_NEEDED = {"needed_bytes": 2088960, "free_bytes": 1048576, "margin_bytes": 67108864, "rank": 0}
_ERRORS = [
    errors.AuthenticationError("this key is not the server's"),
    errors.PermissionDeniedError("no key is set, so only this machine's clients are admitted"),
    errors.StateConflictError("the weights are asleep: wake_up(tags=['weights']) before an update", **_ASLEEP),
    errors.InvalidRequestError("level 7 is not allowed: use one of 0, 1, 2", field="level", got=7, allowed=[0, 1, 2]),
    errors.WeightUpdateError("rank 0 cannot open the trainer's socket", reason="unreachable", rank=0),
    errors.EngineAsleepError("the server is still starting", reason="starting", retry_after_s=1),
    errors.DrainTimeoutError("running requests did not finish within drain_timeout_s"),
    errors.DeviceMemoryError("2088960 bytes are needed, 1048576 are free", **_NEEDED),
]
ERRORS: dict[int, Json] = {error.status: {error.code: error_body(error)} for error in _ERRORS}
