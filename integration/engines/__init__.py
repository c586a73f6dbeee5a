"""How each engine is started, on the CPU or on GPUs, asked over HTTP, and looked at from outside."""

from __future__ import annotations

from integration.engines.base import EngineKind
from integration.engines.sglang import Sglang
from integration.engines.vllm import Vllm

ENGINES: dict[str, type[EngineKind]] = {"vllm": Vllm, "sglang": Sglang}
