"""A vLLM plugin: engine cores and workers are forks, which spares each of them 8 s of imports.

On GPUs vLLM forks where it can. Its CPU platform asks for new interpreters, so that a worker gets the libraries of
`LD_PRELOAD`; a small model's worker does without them.
"""

import gc
import os


def register() -> None:
    from vllm.utils import system_utils

    def fork() -> None:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        gc.freeze()  # a fork's collections need not look at, and copy, what its parent has imported

    system_utils._maybe_force_spawn = fork
    _compile_nothing()


def _compile_nothing() -> None:
    """Without compiled models vLLM still compiles some functions, for seconds in each process.

    PyTorch has read the variable before the fork.
    """
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        import torch

        torch.compiler.set_stance("force_eager")
