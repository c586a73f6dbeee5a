"""Tensors that a model's loader computes of weights and assigns to layers, such as the absorbed projections of MLA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rl_memory_plugins.engines.saved_layers import alike


@contextmanager
def in_place(model: torch.nn.Module) -> Iterator[None]:
    """The body runs the model's loader. What it has computed anew lies at its exit where the former tensors lie.

    CUDA graphs read these by their addresses. A loader assigns new ones (SGLang's Kimi-Linear: `w_kc`), or gives
    parameters other memory (Kimi-K3). What has another shape, dtype or device stays where the loader has made it, and
    so does what would overwrite a parameter, a buffer, or another such tensor. Containers of tensors are not looked
    into. After an error the layers have their former tensors, whatever these hold.
    """
    parameters = [(parameter, parameter.data) for parameter in model.parameters()]
    former = [
        (vars(module), name, tensor)
        for module in model.modules()
        for name, tensor in vars(module).items()
        if isinstance(tensor, torch.Tensor) and not tensor.is_meta
    ]
    try:
        yield
        for parameter, memory in parameters:
            if parameter.data_ptr() != memory.data_ptr() and alike(parameter, memory):
                memory.copy_(parameter.data)
                parameter.data = memory
        changed = [one for one in former if one[0].get(one[1]) is not one[2]]
        owned = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())} if changed else set()
        written: dict[int, torch.Tensor] = {}  # by address, what has been copied there
        for attributes, name, old in changed:
            new = attributes.get(name)
            if not isinstance(new, torch.Tensor) or not alike(new, old):
                continue
            if _storage(old) in owned:
                if torch.equal(old, new):  # a view of parameters, which have their new values
                    attributes[name] = old
            elif written.setdefault(old.data_ptr(), new) is new:
                old.data.copy_(new.data)
                attributes[name] = old
    except BaseException:
        for parameter, memory in parameters:
            parameter.data = memory
        for attributes, name, old in former:
            attributes[name] = old
        raise


def _storage(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_meta else int(tensor.untyped_storage().data_ptr())
