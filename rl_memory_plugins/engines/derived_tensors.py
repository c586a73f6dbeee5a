"""Tensors that a model's loader computes of weights and assigns to layers, such as the absorbed projections of MLA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def in_place(model: torch.nn.Module) -> Iterator[None]:
    """The body runs the model's loader. What it has computed anew lies at its exit where the former tensors lie.

    CUDA graphs read these by their addresses, and a loader assigns new ones (SGLang's Kimi-Linear: `w_kc`). What has
    another shape, dtype or device stays where the loader has made it, and so does what would overwrite a parameter, a
    buffer, or another such tensor. After an error the layers have their former tensors, whatever these hold.
    """
    owned = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta}
    former = [
        (vars(module), name, tensor)
        for module in model.modules()
        for name, tensor in vars(module).items()
        if isinstance(tensor, torch.Tensor) and not tensor.is_meta
    ]
    try:
        yield
    except BaseException:
        for attributes, name, old in former:
            attributes[name] = old
        raise
    written: dict[int, torch.Tensor] = {}  # by address, what has been copied there
    for attributes, name, old in former:
        new = attributes.get(name)
        if new is old or not isinstance(new, torch.Tensor) or _storage(old) in owned:
            continue
        is_alike = (new.shape, new.dtype, new.device) == (old.shape, old.dtype, old.device)
        if is_alike and written.setdefault(old.data_ptr(), new) is new:
            old.data.copy_(new.data)
            attributes[name] = old


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())
