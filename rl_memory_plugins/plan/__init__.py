"""What fits on which GPUs, before anything starts: `rl-memory plan`, and `plan()` in Python.

    found = plan("folder/of/the/model", gpu="h100-80", tp=2, trainer="fsdp2", fraction=0.85)
    found.fits, found.peak.name, found.phase("training").free

Nothing here needs a GPU, an engine or the network. torch and `transformers` are imported only for kinds of models that
have no rule in `architectures` and no safetensors files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.plan.advice import with_advice
from rl_memory_plugins.plan.gpus import GPUS, Gpu
from rl_memory_plugins.plan.making import Advice, Plan, make_plan
from rl_memory_plugins.plan.model import read_model
from rl_memory_plugins.plan.options import NAMES, Options
from rl_memory_plugins.plan.phases import Phase

__all__ = ["GPUS", "Advice", "Gpu", "Options", "Phase", "Plan", "plan"]


def plan(model: str | Path, **options: Any) -> Plan:
    """Plan a model on GPUs that an engine and a trainer share.

    Args:
        model: A local folder of a model, or its `config.json`.
        **options: The fields of `Options`.

    Raises:
        InvalidRequestError: there is no such model, an option is unknown or has a bad value, or the engine cannot cut
            the model into `tp` parts.
        UnsupportedError: nothing here knows this kind of model.
    """
    unknown = sorted(options.keys() - set(NAMES))
    if unknown:
        raise InvalidRequestError(
            f"unknown options: {', '.join(unknown)}", field=unknown[0], got=unknown, allowed=list(NAMES)
        )
    checked = Options(**options)
    found = read_model(model)
    return with_advice(found, make_plan(found, checked))
