"""Which requests `rl-memory serve` passes on. It has no control routes: those are at each engine's own port."""

from __future__ import annotations

from rl_memory_plugins.engines.sglang.generation import GENERATION as SGLANG
from rl_memory_plugins.engines.vllm.generation import GENERATION as VLLM

_NOT_JSON = ("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/realtime")
"""A form or a WebSocket, whose `model` this package does not read."""

_BESIDE = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")

PASSED_ON = tuple(sorted({*VLLM, *SGLANG, *_BESIDE}.difference(_NOT_JSON)))
"""Paths of POST requests whose JSON body has a `model`."""
