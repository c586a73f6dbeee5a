"""What the process imports of which all engines are forks: an engine's modules take most of a start."""

from __future__ import annotations

import multiprocessing
import os

from integration.engines.sglang import STAND_IN_KERNELS
from tests.run_report import gpus

MODULES = {
    "vllm": ["vllm.entrypoints.llm", "vllm.v1.engine.core", "transformers"],
    "sglang": ["sglang.srt.entrypoints.engine", "sglang.srt.managers.scheduler", "transformers"],
}
#: It replaces functions of `torch.cuda` when it is imported.
CPU_WORKER = "vllm.v1.worker.cpu_worker"


def preload(engine: str) -> None:
    """Set it up; to be called before the first engine starts."""
    modules = MODULES[engine]
    if gpus():
        modules = [] if engine == "sglang" else modules  # SGLang's modules use the GPU, and no fork can use it then
    elif engine == "vllm":
        modules = [*modules, CPU_WORKER, "integration.engines.without_amx"]
    else:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(STAND_IN_KERNELS), os.environ.get("PYTHONPATH")]))
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)
