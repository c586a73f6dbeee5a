"""A source that wraps another says what is true of the other: all wrappers, all optional protocols."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import pytest
import torch

from rl_memory_plugins import trainer, weights
from rl_memory_plugins.trainer.fan_out import FanOut, Reader
from rl_memory_plugins.trainer.once import Once
from rl_memory_plugins.trainer.sources import quantised as quantised_module
from rl_memory_plugins.trainer.sources.drafted import DraftedSource
from rl_memory_plugins.trainer.sources.model import ModelSource, only_reads
from rl_memory_plugins.trainer.sources.quantised import QuantisedSource
from rl_memory_plugins.weights import source as protocols
from rl_memory_plugins.weights.manifest import Mismatch, TensorSpec
from rl_memory_plugins.weights.overrides import as_sharded
from rl_memory_plugins.weights.source import TensorSource, spec_of

GROUP_BYTES = 12345
GATHERED = 77
OTHER = Mismatch("dtype", "norm.weight", "why", expected="bfloat16")


class Inner:
    """Says all that a source can say; without `holds`, that its tensors do not exist before an update."""

    only_reads = True
    stable = True
    group_bytes = GROUP_BYTES
    negotiable = True
    gathered = GATHERED
    silent_s = 7.0

    def __init__(self, *, holds: bool = True) -> None:
        self.tensor = torch.ones(16, 16)
        self._holds = holds
        self.learnt: list[Mismatch] = []
        self.left_out: Collection[str] | None = None

    def specs(self) -> list[TensorSpec]:
        return [spec_of("norm.weight", self.tensor)]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "norm.weight", self.tensor

    def tensors_in(self, places: protocols.Places) -> Iterator[tuple[str, torch.Tensor]]:
        yield "norm.weight", places["norm.weight"]

    def resident(self) -> list[torch.Tensor] | None:
        return [self.tensor] if self._holds else None

    def revise(self, mismatches: Sequence[Mismatch]) -> bool:
        self.learnt += mismatches
        return True

    def layouts(self) -> list[Any]:
        return ["a layout"]

    def leave_out(self, names: Collection[str]) -> None:
        self.left_out = names

    def held(self, name: str) -> torch.Tensor:
        return self.tensor


class Says:
    """A source that says nothing."""

    def specs(self) -> list[TensorSpec]:
        return [spec_of("norm.weight", torch.ones(2))]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "norm.weight", torch.ones(2)


def quantised(inner: TensorSource) -> QuantisedSource:
    return QuantisedSource(inner, {"quant_method": "fp8", "weight_block_size": [16, 16]}, ["layer.weight_scale_inv"])


def read(inner: TensorSource) -> Reader:
    fan = FanOut(Once(inner))
    fan.ask()
    return Reader(fan)


WRAPPERS: dict[type, Callable[[Any], Any]] = {
    Once: Once,
    Reader: read,
    DraftedSource: lambda inner: DraftedSource(inner, inner),
    QuantisedSource: quantised,
}

#: What is not true of a wrapper, and why.
UNTRUE = {
    (Reader, "ShardedSource"): "the owner's thread gathers for all readers",
    (Reader, "PlacingSource"): "each reader has a buffer of its own",
    (Reader, "ReadingSource"): "nobody asks a reader: the handoff asks the source",
    (Reader, "ArrivingSource"): "nobody asks a reader: the update asks for all of them",
    (DraftedSource, "ShardedSource"): "it gathers; its docstring says so",
    (QuantisedSource, "ResidentSource"): "it makes tensors",
    (QuantisedSource, "ShardedSource"): "a weight is quantised whole",
}

#: Classes with `specs` and `tensors` that read no other source of this package.
OWN = {
    "ModelSource", "OwnSource", "StreamSource", "CheckpointSource", "FSDP1Source", "MegatronSource", "Incoming",
}  # fmt: skip


def optional_protocols() -> dict[str, type]:
    found = {
        name: one
        for name, one in vars(protocols).items()
        if inspect.isclass(one) and one is not TensorSource and TensorSource in one.__mro__
    }
    assert len(found) >= 6
    return found


def says_resident(wrapper: Any, inner: Inner) -> None:
    assert {id(tensor) for tensor in wrapper.resident()} == {id(inner.tensor)}


def says_stable(wrapper: Any, inner: Inner) -> None:
    assert wrapper.stable is True


def says_group(wrapper: Any, inner: Inner) -> None:
    makes_groups = isinstance(wrapper, QuantisedSource)  # of its own, of what it rounds
    assert wrapper.group_bytes == (quantised_module.GROUP_VALUES if makes_groups else GROUP_BYTES)


def says_negotiable(wrapper: Any, inner: Inner) -> None:
    assert wrapper.negotiable is True
    if isinstance(wrapper, Reader):
        wrapper._fan.revise([OTHER])
    assert wrapper.revise([OTHER]) is True
    assert inner.learnt == [OTHER]


def says_sharded(wrapper: Any, inner: Inner) -> None:
    sharded = as_sharded(wrapper)
    assert sharded is not None and sharded.gathered == GATHERED
    assert sharded.layouts() == ["a layout"] and sharded.held("norm.weight") is inner.tensor
    sharded.leave_out(["norm.weight"])
    assert inner.left_out == ["norm.weight"]
    wrapper.close()
    assert inner.left_out == ()


def says_it_reads(wrapper: Any, inner: Inner) -> None:
    assert only_reads(wrapper)


def says_how_long_it_waits(wrapper: Any, inner: Inner) -> None:
    assert wrapper.silent_s == inner.silent_s


def says_where(wrapper: Any, inner: Inner) -> None:
    if isinstance(wrapper, QuantisedSource):  # of its own, of what it rounds; the rest is not the other's form
        assert next(wrapper.tensors_in({}))[1] is inner.tensor
        return
    place = torch.zeros(16, 16)
    assert next(wrapper.tensors_in({"norm.weight": place}))[1] is place


CHECKS = {
    "PlacingSource": says_where,
    "ResidentSource": says_resident,
    "StableSource": says_stable,
    "GroupingSource": says_group,
    "NegotiableSource": says_negotiable,
    "ShardedSource": says_sharded,
    "ReadingSource": says_it_reads,
    "ArrivingSource": says_how_long_it_waits,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("protocol", optional_protocols())
def test_a_wrapper_says_what_is_true_of_the_source(protocol: str, wrapper: type) -> None:
    inner = Inner(holds=protocol == "ResidentSource")
    made = WRAPPERS[wrapper](inner)
    if (wrapper, protocol) in UNTRUE:
        assert not isinstance(made, optional_protocols()[protocol]), "then it is true, and belongs into the table"
        return
    assert isinstance(made, optional_protocols()[protocol])
    CHECKS[protocol](made, inner)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_says_nothing_of_a_source_that_says_nothing(wrapper: type) -> None:
    made = WRAPPERS[wrapper](Says())
    assert not made.stable and made.group_bytes == 0 and not made.negotiable
    assert getattr(made, "silent_s", 0.0) == 0.0
    assert not made.revise([OTHER]) and not only_reads(made)
    assert getattr(made, "resident", lambda: None)() is None
    sharded = as_sharded(made)
    assert sharded is None or (sharded.layouts() is None and sharded.gathered is None)


def test_what_the_draft_must_change_reaches_the_draft_by_its_own_name() -> None:
    target, draft = Inner(), Inner()
    both = DraftedSource(target, draft)
    of_draft = Mismatch("dtype", "draft.norm.weight", "why", expected="bfloat16")
    assert both.revise([of_draft])
    assert target.learnt == [] and draft.learnt == [OTHER]
    assert not both.revise([])


def test_what_is_quantised_is_no_matter_of_the_source() -> None:
    class WithWeight(Inner):
        def specs(self) -> list[TensorSpec]:
            return [*super().specs(), spec_of("layer.weight", self.tensor)]

    inner = WithWeight()
    made = quantised(inner)
    assert [spec.name for spec in made.specs()] == ["norm.weight", "layer.weight", "layer.weight_scale_inv"]
    parts = [Mismatch("dtype", f"layer.{part}", "why") for part in ("weight", "weight_scale_inv")]
    assert not made.revise(parts) and inner.learnt == []
    assert made.revise([*parts, OTHER]) and inner.learnt == [OTHER]


def test_the_bias_beside_a_quantised_weight_is_negotiated() -> None:
    masters = {"layer.weight": torch.ones(16, 16), "layer.bias": torch.ones(16), "norm.weight": torch.ones(16)}
    source = quantised(ModelSource(masters, dtype="engine"))
    before = source.specs()
    refused = [Mismatch("dtype", name, "why", expected="bfloat16") for name in ("layer.bias", "norm.weight")]
    assert source.revise(refused)
    changed = {spec.name: spec.dtype for spec in source.specs() if spec not in before}
    assert changed == {"layer.bias": "bfloat16", "norm.weight": "bfloat16"}
    assert not source.revise(refused)


def test_every_class_that_gives_tensors_is_in_these_tables() -> None:
    found = set()
    for package in (trainer, weights):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            loaded = importlib.import_module(module.name)
            for name, one in vars(loaded).items():
                is_own = inspect.isclass(one) and one.__module__ == module.name
                if is_own and {"specs", "tensors"} <= set(dir(one)) and not getattr(one, "_is_protocol", False):
                    found.add(name)
    assert found == OWN | {wrapper.__name__ for wrapper in WRAPPERS}
