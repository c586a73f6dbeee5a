"""A vLLM plugin: engine cores and workers are forks, which spares each of them 8 s of imports.

On GPUs vLLM forks where it can. Its CPU platform asks for new interpreters, so that a worker gets the libraries of
`LD_PRELOAD`; a small model's worker does without them.
"""

import gc
import os
import time

SETTLED_S = 5
BUSY_LOOP_S = 0.005


def register() -> None:
    from vllm.utils import system_utils

    def fork() -> None:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        gc.freeze()  # a fork's collections need not look at, and copy, what its parent has imported

    system_utils._maybe_force_spawn = fork
    _compile_nothing()
    _sleep_when_idle()


def _compile_nothing() -> None:
    """Without compiled models vLLM still compiles some functions, for seconds in each process.

    PyTorch has read the variable before the fork.
    """
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        import torch

        torch.compiler.set_stance("force_eager")


def _sleep_when_idle() -> None:
    """vLLM's processes look for messages in a loop for a second after each one, and would take a core from the tests.

    A while after their start they wait for a notification, as they do otherwise after that second. Before, the
    connection that carries notifications may not be there.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    condition = shm_broadcast.SpinCondition
    start, record_read = condition.__init__, condition.record_read

    def begin(self, *args, **kwargs) -> None:
        start(self, *args, **kwargs)
        self.made = time.monotonic()

    def record(self) -> None:
        record_read(self)
        if self.last_read > self.made + SETTLED_S:
            self.busy_loop_s = BUSY_LOOP_S

    condition.__init__, condition.record_read = begin, record
