"""The engines: how to start each one on the CPU or on GPUs, send it requests, and watch its memory."""

from __future__ import annotations

from integration.engines.base import EngineKind
from integration.engines.sglang import Sglang
from integration.engines.vllm import Vllm

ENGINES: dict[str, type[EngineKind]] = {"vllm": Vllm, "sglang": Sglang}
