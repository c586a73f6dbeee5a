"""A loader as a user may name it by `--custom-weight-loader`."""

from __future__ import annotations

import ctypes

import torch


def past_the_dispatcher(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Write bytes into parameters by the engine's names, where no operator of torch runs. A tensor "raise" raises."""
    parameters = dict(model.named_parameters())
    for name, tensor in named_tensors:
        if name == "raise":
            raise ConnectionError("the trainer is gone")
        ctypes.memmove(parameters[name].data_ptr(), tensor.data_ptr(), tensor.nbytes)
