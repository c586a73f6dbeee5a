"""An SGLang plugin: schedulers and detokenizers are forks, which spares each of them 8 s of imports.

SGLang itself starts new interpreters, since CUDA does not survive a fork. The data-parallel controller starts its
schedulers in threads, and there a fork could copy a lock that another thread holds: those stay new interpreters.
"""

import gc
import multiprocessing.context
import sys
import threading
from typing import Any

POLL_MS = 20


def register() -> None:
    multiprocessing.context.Process._Popen = staticmethod(_start)  # what `multiprocessing.Process` starts by
    _wait_for_requests()


def _start(process: Any) -> Any:
    method = "fork" if threading.active_count() == 1 else "spawn"
    gc.freeze()  # a fork's collections need not look at, and copy, what its parent has imported
    return multiprocessing.get_context(method).Process._Popen(process)


def _wait_for_requests() -> None:
    """The data-parallel controller looks for requests in an endless loop, and would take a core from the tests."""
    module = sys.modules.get("sglang.srt.managers.data_parallel_controller")
    if module is None:  # not in this process
        return
    loop = module.DataParallelController.event_loop

    def event_loop(self: Any) -> None:
        feed = self.soft_watchdog.feed

        def wait_and_feed() -> None:
            self.recv_from_tokenizer.poll(POLL_MS)
            feed()

        self.soft_watchdog.feed = wait_and_feed
        loop(self)

    module.DataParallelController.event_loop = event_loop
