"""An SGLang plugin: host memory that SGLang asks to be page-locked is pageable.

SGLang's layers with LoRA ask for page-locked memory on every device, and CUDA alone has it. Without this stand-in
SGLang 0.5.23 does not start with LoRA on a CPU. The answers do not depend on it.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch


def register() -> None:
    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, _pageable(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *args: tensor


def _pageable(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return make(*args, **kwargs)

    return made
