"""The layers of an SGLang model that take adapters, and what of an adapter fits them.

SGLang compares nothing before the first request of an adapter. A tensor that does not fit ends its scheduler then.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from rl_memory_plugins.engines.lora_layers import ExpertSizes, features
from rl_memory_plugins.weights.manifest import Mismatch, TensorSpec

if TYPE_CHECKING:
    import torch

#: SGLang's packed layers, and the parts under which checkpoints hold them.
_PACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
_NAME = re.compile(r"(?:(.*?)\.)?layers\.(\d+)\.(.+)\.lora_([AB])\.weight")
_EXPERTS = re.compile(r"(.*\bexperts)(?:\.(\d+))?(?:\.([^.]+))?")
_PROJECTIONS = {
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), "up"),
    **dict.fromkeys(("down_proj", "w2"), "down"),
    "gate_up_proj": "gate_up",
}
_GATES = (("gate_proj", "up_proj"), ("w1", "w3"))
#: Parts of names that wrappers add, in front of the layers of the language model.
_WRAPPERS = {"", "base_model", "model", "language_model", "text_model"}


class _Part(NamedTuple):
    """A layer, or a part of a packed layer.

    Attributes:
        layer: SGLang's layer.
        head: The name of the module that has the blocks.
        number: The index of the part.
        siblings: The names of all parts.
        expert: For experts, the features that come in and those that go out; `None` where they are not known.
        together: How many experts one tensor of A has, and one of B; zeros if each expert has a tensor of its own.
    """

    layer: Any
    head: str
    number: int = 0
    siblings: tuple[str, ...] = ()
    expert: tuple[int, int] | None = None
    together: tuple[int, int] = (0, 0)

    def shape(self, rank: int, *, is_a: bool) -> list[int] | None:
        """The shape of A or B; `None` if it is not known."""
        if self.expert is not None:
            size: int | None = self.expert[0 if is_a else 1]
        else:
            size = features(self.layer, self.number, max(len(self.siblings), 1), incoming=is_a)
        if size is None:
            return None
        experts = self.together[0 if is_a else 1]
        return [*([experts] if experts else []), *((rank, size) if is_a else (size, rank))]


class AdapterLayers:
    """The layers of a model that take adapters, compared with the tensors of one.

    Args:
        loras: SGLang's `LoRAManager`.
        rank: The rank of the adapter.
    """

    def __init__(self, loras: Any, rank: int) -> None:
        self._loras = loras
        self._rank = rank
        self._halves: dict[tuple[int, str], list[TensorSpec]] = {}

    def take(self, spec: TensorSpec) -> bool:
        """Returns whether this rank uses the tensor.

        Raises:
            ValueError: the name is not that of an adapter's tensor, or the shape does not fit.
        """
        if any(part in spec.name for part in ("embed_tokens", "lm_head", "unembed_tokens")):
            return self._take_embedding(spec)
        found = self._find(spec.name)
        if found is None:
            return False
        place, part, is_a = found
        self._halves.setdefault(place, []).append(spec)
        _compare(spec, part.shape(self._rank, is_a=is_a))
        return True

    def incomplete(self) -> list[Mismatch]:
        """The tensors without the other half of their pair."""
        lonely = [pair[0].name for pair in self._halves.values() if len(pair) == 1]
        return [Mismatch("missing", name, "the other half of the pair is not in the manifest") for name in lonely]

    def zeros(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Zeros for the parts of packed layers that the adapter leaves out. SGLang would drop the other parts."""
        made = {}
        for name, tensor in tensors.items():
            if _NAME.fullmatch(name) is None or (found := self._find(name)) is None:
                continue
            (_, tail), part, is_a = found
            for number, sibling in enumerate(part.siblings):
                other = name.replace(f".{tail}.", f".{sibling}.")
                shape = part._replace(number=number).shape(self._rank, is_a=is_a)
                if other not in tensors and shape is not None:
                    made[other] = tensor.new_zeros(shape)
        return made

    def _take_embedding(self, spec: TensorSpec) -> bool:
        from sglang.srt.lora.utils import get_hidden_dim

        layer = "lm_head" if "lm_head" in spec.name or "unembed_tokens" in spec.name else "embed_tokens"
        if getattr(self._loras, f"{layer}_module", None) is None:
            return False
        half = re.search(r"lora_(?:embedding_)?([AB])", spec.name)
        if half is not None:
            self._halves.setdefault((-1, layer), []).append(spec)
            incoming, outgoing = get_hidden_dim(layer, *self._model, 0)
            _compare(spec, [self._rank, incoming] if half[1] == "A" else [outgoing, self._rank])
        return True

    @property
    def _model(self) -> tuple[Any, Any]:
        """The arguments of SGLang's functions for the sizes of layers."""
        return self._loras.base_hf_config, self._loras.base_model

    def _find(self, name: str) -> tuple[tuple[int, str], _Part, bool] | None:
        """The block and the name in it, the part with this name, and whether the tensor is A; `None` if there is none.

        Raises:
            ValueError: the name is not that of an adapter's tensor.
        """
        matched = _NAME.fullmatch(name)
        if matched is None:
            if re.fullmatch(r".+\.lora_[AB]\.weight", name) is None:
                raise ValueError("this is not the name of an adapter's tensor")
            return None
        head, place, is_a = matched[1] or "", (int(matched[2]), matched[3]), matched[4] == "A"
        part = self._experts(*place) if re.search(r"\bexperts(\.|$)", matched[3]) else self._parts.get(place)
        # The blocks of a vision tower or of MTP layers have the names of the language model's.
        if part is None or not set(head.split(".")) - _WRAPPERS <= set(part.head.split(".")):
            return None
        return place, part, is_a

    @cached_property
    def _parts(self) -> dict[tuple[int, str], _Part]:
        """The layers that take adapters, by the number of their block and their name in it."""
        parts: dict[tuple[int, str], _Part] = {}
        for number, layers in enumerate(self._loras.lora_modules):
            for name, layer in layers.items():
                *before, tail = re.split(rf"(?:^|\.)layers\.{number}\.", name, maxsplit=1)
                head = "".join(before)
                parent, _, last = tail.rpartition(".")
                siblings = tuple(f"{parent}.{part}" for part in _PACKED.get(last, ()))
                parts[number, tail] = _Part(layer, head)
                for index, sibling in enumerate(siblings):
                    parts[number, sibling] = _Part(layer, head, index, siblings)
        return parts

    def _experts(self, block: int, tail: str) -> _Part | None:
        """A projection of one expert, or of all experts in one tensor; `None` if these experts take no adapters.

        Raises:
            ValueError: SGLang knows no such projection.
        """
        matched = _EXPERTS.fullmatch(tail)
        layer = self._parts.get((block, matched[1])) if matched is not None else None
        if matched is None or layer is None:
            return None
        _, expert, last = matched.groups()
        projection = _PROJECTIONS.get(last)
        if projection is None:
            raise ValueError("SGLang takes the adapters of experts by their projections, as experts.0.gate_proj")
        from sglang.srt.lora.utils import get_stacked_multiply

        if get_stacked_multiply("gate_up_proj_moe", self._loras.base_model) != 2:  # experts without a gate
            return layer._replace(layer=None)
        sizes = self._sizes(block, layer.layer.base_layer)
        if expert is not None and int(expert) >= sizes.number:
            return None
        incoming, outgoing = (sizes.features(projection, incoming=each) for each in (True, False))
        assert incoming is not None and outgoing is not None
        siblings: tuple[str, ...] = ()
        for names in _GATES:
            if last in names:
                siblings = tuple(f"{tail.removesuffix(last)}{name}" for name in names)
        shared = bool(getattr(self._loras.memory_pool, "experts_shared_outer_loras", False))
        if expert is not None and shared:
            raise ValueError("with --experts-shared-outer-loras SGLang takes the adapters of all experts in one tensor")
        together = (0, 0)
        if expert is None:  # with the option the experts share what touches the outside of the layer
            outer = 1 if shared else sizes.number
            together = (sizes.number, outer) if projection == "down" else (outer, sizes.number)
        return layer._replace(siblings=siblings, expert=(incoming, outgoing), together=together)

    def _sizes(self, block: int, experts: Any) -> ExpertSizes:
        from sglang.srt.lora.utils import get_hidden_dim

        hidden, _ = get_hidden_dim("gate_up_proj_moe", *self._model, block)
        intermediate, _ = get_hidden_dim("down_proj_moe", *self._model, block)
        count = getattr(self._loras.memory_pool, "_get_num_experts", lambda model: experts.num_experts)
        return ExpertSizes(hidden, intermediate, count(self._loras.base_model))


def _compare(spec: TensorSpec, expected: list[int] | None) -> None:
    """Raises a ValueError if a tensor has another shape than expected; `None` stands for any shape."""
    if expected is not None and list(spec.shape) != expected:
        raise ValueError(f"the shape is {list(spec.shape)}; the engine expects {expected}")
