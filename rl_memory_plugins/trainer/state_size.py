"""The size of the state that the first step of an optimiser will make, from a step of a small twin."""

from __future__ import annotations

import logging
from typing import Any

import torch

from rl_memory_plugins.trainer.held_tensors import plain_parts
from rl_memory_plugins.trainer.targets import is_of_torch

logger = logging.getLogger(__name__)

#: The shape of the twin's parameters. Quantising optimisers keep the state of small parameters in float32.
SHAPE = torch.Size((256, 256))
#: Memory is allocated in segments, so a state takes a little more than its tensors.
ROUNDING = 1.02


def expected_state_bytes(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """The bytes of the state on `device`, or 0 if the optimiser has state or is not of `torch.optim`.

    A twin of the same class steps once, with one small parameter for each group and dtype. Other classes have no twin:
    their constructors may communicate with other ranks.
    """
    if optimizer.state or not is_of_torch(optimizer):
        return 0
    try:
        return int(ROUNDING * sum(_of_group(optimizer, group, device) for group in optimizer.param_groups))
    except Exception as error:  # an estimate that fails costs time, not correctness
        logger.debug("the size of the state of %s is not known in advance: %s", type(optimizer).__name__, error)
        return 0


def _of_group(optimizer: torch.optim.Optimizer, group: dict[str, Any], device: torch.device) -> float:
    elements: dict[torch.dtype, int] = {}
    for parameter in group["params"]:
        if parameter.requires_grad:
            for part in plain_parts(parameter.detach()):
                if part.device == device:
                    elements[part.dtype] = elements.get(part.dtype, 0) + part.numel()
    return sum(number * _bytes_per_element(optimizer, group, device, dtype) for dtype, number in elements.items())


def _bytes_per_element(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> float:
    parameter = torch.nn.Parameter(torch.zeros(SHAPE, device=device, dtype=dtype))
    parameter.grad = torch.zeros_like(parameter)
    twin: Any = type(optimizer)([{**group, "params": [parameter]}], lr=group["lr"])
    step = type(twin).step
    getattr(step, "__wrapped__", step)(twin)  # without the hooks that are registered for all optimisers
    state = twin.state[parameter].values()
    parts = [part for value in state if isinstance(value, torch.Tensor) for part in plain_parts(value)]
    nbytes: int = sum(part.nbytes for part in parts if part.device == device and part.numel() > 1)
    return float(nbytes) / float(SHAPE.numel())
