"""Copies that a loader makes of a tensor to change its layout, such as `weight.permute(0, 2, 1).contiguous()`.

Such a copy holds the tensor's elements unchanged. A view of it is a view of the tensor, with other strides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Elements(NamedTuple):
    """Elements of a tensor of the manifest: element `index` lies at `offset + sum(index * stride)` of the tensor."""

    name: str
    stride: tuple[int, ...]
    offset: int


class Rearranged(NamedTuple):
    """A copy of elements of a tensor of the manifest, in another layout.

    Attributes:
        elements: The elements of which this is the copy, by dimension of the copy.
        size: The shape of the copy.
        stride: The strides of the copy in its own memory, which it fills without gaps.
    """

    elements: Elements
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def elements_of(self, view: torch.Tensor) -> Elements | None:
        """The elements of a view of the copy; `None` if a dimension of the view crosses dimensions of the copy."""
        order = sorted(range(len(self.size)), key=lambda dimension: -self.stride[dimension])
        last = [0] * len(self.size)  # the highest index of the view in each dimension of the copy
        offset, rest = self.elements.offset, view.storage_offset()
        for dimension in order:
            step = self.stride[dimension]
            index, rest = divmod(rest, step) if step else (0, rest)
            last[dimension] = index
            offset += index * self.elements.stride[dimension]
        strides = []
        for extent, step in zip(view.shape, view.stride(), strict=True):
            if extent == 1 or step == 0:
                strides.append(0)
                continue
            for dimension in order:
                factor, wrong = divmod(step, self.stride[dimension] or step + 1)
                if factor and not wrong and last[dimension] + factor * (extent - 1) < self.size[dimension]:
                    last[dimension] += factor * (extent - 1)
                    strides.append(factor * self.elements.stride[dimension])
                    break
            else:
                return None
        inside = all(high < size for high, size in zip(last, self.size, strict=True))
        return Elements(self.elements.name, tuple(strides), offset) if inside and not rest else None
