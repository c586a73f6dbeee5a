"""How the tests start each engine, talk to it and look at its processes."""

from __future__ import annotations

from tests.engines.base import EngineKind
from tests.engines.vllm import Vllm

ENGINES: dict[str, type[EngineKind]] = {"vllm": Vllm}
