"""The environment in which an engine's tests start their engines, the same for both subjects."""

from __future__ import annotations

import json
import os
from pathlib import Path

from integration.engines.base import REPOSITORY
from integration.engines.sglang import STAND_IN_KERNELS

DEFAULTS = REPOSITORY / "tests" / "aids" / "sglang_defaults"
DEFAULTS_VARIABLE = "SGLANG_TEST_DEFAULTS"
#: SGLang's own defaults ask for kernels that exist on GPUs only.
SGLANG_ON_CPU = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_overlap_schedule": True,
    "sleep_on_idle": True,
    "max_total_tokens": 8192,
}


def environment(engine: str, *, on_gpu: bool, defaults: dict[str, object], root: Path) -> dict[str, str]:
    """The variables to add.

    Args:
        engine: `vllm` or `sglang`.
        on_gpu: Whether the tests run on GPUs.
        defaults: Of SGLang's arguments, beside those that this device needs.
        root: The folder of the tests, whose package `tests` must be found before this repository's.
    """
    paths = [root, REPOSITORY]
    variables = {"HF_HUB_OFFLINE": "1"}
    if engine == "sglang":
        paths.append(DEFAULTS)
        if not on_gpu:
            paths.insert(0, STAND_IN_KERNELS)
            defaults = SGLANG_ON_CPU | defaults
            variables |= {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_NCCL_SO_PATH": "none", "OMP_WAIT_POLICY": "passive"}
        variables[DEFAULTS_VARIABLE] = json.dumps(defaults)
        variables["RL_MEMORY_IMPLICIT_UPDATE_SESSION"] = "true"  # see the aid
    former = os.environ.get("PYTHONPATH")
    return variables | {"PYTHONPATH": os.pathsep.join([*map(str, paths), *([former] if former else [])])}
