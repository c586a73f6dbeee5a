"""The symbols of SGLang that this package has replaced, in this process."""

from __future__ import annotations

from rl_memory_plugins.hooking import Hooks

ENGINE = "sglang.srt.entrypoints.engine"
ARGUMENTS = "sglang.srt.server_args:ServerArgs"
SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"

hooks = Hooks("sglang")
