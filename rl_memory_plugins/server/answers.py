"""The types of the control routes' answers. `openapi.py` derives the schemas from them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from rl_memory_plugins.records import EngineStatus, Report
from rl_memory_plugins.tags import Content, Level, Tag


class Slept(msgspec.Struct, frozen=True):
    status: Literal["sleeping"]
    level: Level
    tags: tuple[Tag, ...]  # all tags of the call, in the order in which they sleep
    report: Report


class Woken(msgspec.Struct, frozen=True):
    status: Literal["awake", "sleeping"]  # whether any tag still sleeps
    tags: list[str] | str | None  # as the caller wrote them
    report: Report


class Updated(msgspec.Struct, frozen=True):
    status: Literal["updated"]
    weight_version: str
    content: Content
    report: Report


class AdapterUpdated(msgspec.Struct, frozen=True):
    status: Literal["updated"]
    adapter: str
    adapter_version: str
    report: Report


class AdapterRemoved(msgspec.Struct, frozen=True):
    status: Literal["removed"]
    adapter: str
    adapter_version: str  # the last
    report: Report


class Sleeping(msgspec.Struct, frozen=True):
    is_sleeping: bool


class Memory(msgspec.Struct, frozen=True):
    admitting: bool
    reason: str | None  # why a generation request would be refused
    is_sleeping: bool
    weight_version: str
    content: Content
    engines: list[EngineStatus]


class Version(msgspec.Struct, frozen=True):
    weight_version: str
    content: Content


class BoardFile(msgspec.Struct, frozen=True):
    path: str
    writer_lives: bool


class Installation(msgspec.Struct, frozen=True):
    version: str  # of this package, in the server's process
    protocol: int  # of the weight stream
    python: str
    versions: dict[str, str]  # of the engine and of torch, by distribution
    pid: int  # of the server's process, in its own namespace
    host: str
    hooks: dict[str, list[str]]  # the engine's symbols that are replaced in the server's process
    boards: list[BoardFile]  # of the engines on this host
    has_key: bool  # whether control routes need a key


class ErrorFields(msgspec.Struct, frozen=True):
    code: str  # the class's name in `rl_memory_plugins.errors`
    type: Literal["rl_memory_error"]
    message: str
    details: dict[str, Any]


class Failed(msgspec.Struct, frozen=True):
    error: ErrorFields
