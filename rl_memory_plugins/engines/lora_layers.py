"""The sizes of the linear layers that take LoRA adapters. SGLang's classes have the attributes of vLLM's."""

from __future__ import annotations

from typing import Any


def features(layer: Any, index: int, count: int, *, incoming: bool) -> int | None:
    """The features of a linear layer, or of one part of a packed layer, on all ranks; `None` for any other layer.

    Args:
        layer: An engine's layer with LoRA, which wraps the `base_layer`.
        index: The index of the part.
        count: The number of parts.
        incoming: The features that come in, which A maps to the rank; else those that go out, to which B maps it.
    """
    base: Any = getattr(layer, "base_layer", None)
    if not hasattr(base, "input_size") or not hasattr(base, "output_size"):
        return None
    if incoming:
        return int(base.input_size)
    if count == 1:
        return int(base.output_size)
    heads = getattr(base, "total_num_kv_heads", None)
    if heads is not None and count == 3:  # each rank may hold a copy of a head
        size = (base.total_num_heads, heads, heads)[index]
        return int(size * (base.head_size if index < 2 else getattr(base, "v_head_size", base.head_size)))
    sizes = getattr(base, "output_sizes", ())
    return int(sizes[index]) if len(sizes) == count else None
