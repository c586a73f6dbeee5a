"""An SGLang plugin: schedulers and detokenizers are forks, which spares each of them 8 s of imports.

SGLang itself starts new interpreters, since CUDA does not survive a fork. The data-parallel controller starts its
schedulers in threads, and there a fork could copy a lock that another thread holds: those stay new interpreters.
"""

import gc
import multiprocessing.context
import threading
from typing import Any


def register() -> None:
    multiprocessing.context.Process._Popen = staticmethod(_start)  # what `multiprocessing.Process` starts by


def _start(process: Any) -> Any:
    method = "fork" if threading.active_count() == 1 else "spawn"
    gc.freeze()  # a fork's collections need not look at, and copy, what its parent has imported
    return multiprocessing.get_context(method).Process._Popen(process)
