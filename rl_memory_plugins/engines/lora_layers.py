"""The sizes of the linear layers that take LoRA adapters. SGLang's classes have the attributes of vLLM's."""

from __future__ import annotations

from typing import Any, NamedTuple


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


class ExpertSizes(NamedTuple):
    """The features of the experts of a layer, on all ranks.

    Attributes:
        hidden: The features that come into the layer and go out of it.
        intermediate: The features between the projections of one expert.
        number: The number of experts.
        padded: Whether the sizes are larger than those of the checkpoint.
    """

    hidden: int
    intermediate: int
    number: int
    padded: bool = False

    def features(self, projection: str, *, incoming: bool) -> int | None:
        """The features of a projection of one expert; `None` if padding hides them.

        Args:
            projection: `down`; `up`, which stands for `gate` too; or `gate_up`, which is both in one matrix.
            incoming: The features that come in; else those that go out.
        """
        if self.padded:
            return None
        if incoming == (projection == "down"):
            return self.intermediate * (2 if projection == "gate_up" else 1)
        return self.hidden
