"""What the process imports of which all engines are forks: an engine's modules take most of a start."""

from __future__ import annotations

import multiprocessing
import os

from integration.engines.sglang import STAND_IN_KERNELS
from tests.run_report import gpus

MODULES = {
    "vllm": ["vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "transformers"],
    "sglang": ["sglang.srt.entrypoints.engine", "sglang.srt.managers.scheduler", "transformers"],
}


def preload(engine: str) -> None:
    """Set it up; to be called before the first engine starts."""
    if engine == "sglang" and not gpus():
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(STAND_IN_KERNELS), os.environ.get("PYTHONPATH")]))
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # SGLang's modules use the GPU when they are imported, and no fork can use it then.
    modules = [] if engine == "sglang" and gpus() else MODULES[engine]
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)
