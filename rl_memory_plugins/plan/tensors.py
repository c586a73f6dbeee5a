"""The tensors of a model by name and shape, and how tensor-parallel ranks share them."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

#: Each rank holds these whole: norms, routers, the first halves of low-rank projections, biases that are added after
#: the ranks' parts are summed.
_REPLICATED = re.compile(
    r"norm|\.(gate|router)\.|shared_expert_gate|e_score_correction|(kv_a|q_a)_proj|(?<!experts\.)(o|down)_proj\.bias"
)
_KEYS_AND_VALUES = re.compile(r"\.(k|v)_proj\.")
_EMBEDDING = re.compile(r"embed_tokens|\.wte\.|word_embeddings")


class Tensor(NamedTuple):
    """Tensors of one name and shape.

    Attributes:
        name: As in the checkpoint; `*` stands for the number of a layer or an expert.
        copies: How many there are.
        bits: Of each element where the tensor is stored; 0 for the dtype that the engine computes in.
        extra: Bytes beside the elements, as the scales of a quantised tensor.
    """

    name: str
    shape: tuple[int, ...]
    copies: int = 1
    bits: int = 0
    extra: int = 0

    @property
    def elements(self) -> int:
        return math.prod(self.shape) * self.copies

    @property
    def is_embedding(self) -> bool:
        return bool(_EMBEDDING.search(self.name))

    @property
    def is_matrix(self) -> bool:
        """Whether matrix products read the tensor, which then may be quantised or cast."""
        matrix = len(self.shape) > 1 and "norm" not in self.name and not self.name.endswith("bias")
        return matrix and not self.is_embedding

    def nbytes(self, width: int) -> int:
        """Bytes of all of them, if the engine computes in `width` bytes."""
        return self.elements * (self.bits or 8 * width) // 8 + self.extra * self.copies

    def parts(self, ranks: int, kv_heads: int) -> int:
        """Into how many parts tensor-parallel ranks cut the tensor."""
        if _REPLICATED.search(self.name):
            return 1
        return min(ranks, kv_heads) if _KEYS_AND_VALUES.search(self.name) else ranks
