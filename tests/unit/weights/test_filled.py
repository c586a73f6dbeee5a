"""Parameters that the load of the engine's own checkpoint does not fill: an update need not bring them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from toys import Rank, update

from rl_memory_plugins.errors import ManifestError
from rl_memory_plugins.tags import Content
from rl_memory_plugins.trainer import ModelSource
from rl_memory_plugins.weights.filled import Region, filled_by
from rl_memory_plugins.weights.manifest import TensorSpec
from rl_memory_plugins.weights.names import NamedWeights

WIDTH = 8


class Reward(torch.nn.Module):
    """A head whose bias no checkpoint has, as SGLang's reward models have it, beside a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        self.score = torch.nn.Linear(WIDTH, 2).requires_grad_(False)
        self.score.bias.fill_(7)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, weight in weights:
            parameters[name].data.copy_(weight)


def checkpoint(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"norm": torch.rand(WIDTH, generator=generator), "score.weight": torch.rand(2, WIDTH, generator=generator)}


def specs(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {spec.name: spec for spec in ModelSource(tensors).specs()}


def rank(known: Mapping[str, torch.Tensor] | None = None, **options: Any) -> Rank:
    known = checkpoint() if known is None else known
    made = Rank(Reward(), checkpoint=lambda: specs(known), **options)
    made.manager.find_unfilled = made.loader.unfilled
    made.manager.memory_of = NamedWeights(lambda: made.model).memory
    return made


def send(one: Rank, tensors: Any) -> Any:
    return update([one], tensors)[0]


def missing(outcome: Any) -> list[tuple[str, str]]:
    assert isinstance(outcome, ManifestError), outcome
    return [(mismatch["kind"], mismatch["name"]) for mismatch in outcome.details["mismatches"]]


def test_an_update_is_complete_without_what_no_load_fills() -> None:
    one = rank()
    for seed in (1, 2):
        assert not isinstance(send(one, checkpoint(seed)), Exception)
        assert torch.equal(one.model.score.weight, checkpoint(seed)["score.weight"])
        assert one.model.score.bias.eq(7).all()
        assert one.manager.content is Content.VALID


def test_a_trainer_that_has_it_writes_it() -> None:
    one = rank()
    assert not isinstance(send(one, {**checkpoint(1), "score.bias": torch.full((2,), 3.0)}), Exception)
    assert one.model.score.bias.eq(3).all()
    assert not isinstance(send(one, checkpoint(2)), Exception)
    assert one.model.score.bias.eq(3).all()


@pytest.mark.parametrize("absent", ["norm", "score.weight"])
def test_what_the_checkpoint_fills_is_still_missing(absent: str) -> None:
    one, tensors = rank(), checkpoint(1)
    del tensors[absent]
    assert missing(send(one, tensors)) == [("missing", absent)]
    assert not one.model.norm.any()


def test_a_part_of_it_is_a_mismatch() -> None:
    class Halves(Reward):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, weight in weights:
                (self.score.bias[:1] if name == "half" else self.get_parameter(name)).data.copy_(weight)

    one = Rank(Halves(), checkpoint=lambda: specs(checkpoint()))
    one.manager.find_unfilled = one.loader.unfilled
    one.manager.memory_of = NamedWeights(lambda: one.model).memory
    assert missing(send(one, {**checkpoint(1), "half": torch.zeros(1)})) == [("missing", "score.bias")]


def test_without_a_checkpoint_every_parameter_must_come() -> None:
    assert missing(send(rank(known={}), checkpoint(1))) == [("missing", "score.bias")]


def test_dummy_weights_hide_what_a_load_leaves() -> None:
    assert missing(send(rank(dummy=lambda: True), checkpoint(1))) == [("missing", "score.bias")]


def test_an_update_that_broke_off_without_it_leaves_it_whole() -> None:
    one = rank()
    send(one, checkpoint(1))
    one.manager.mark_failed()
    assert not isinstance(send(one, checkpoint(2)), Exception)
    assert one.manager.content is Content.VALID
    assert one.model.score.bias.eq(7).all()


class Short(ModelSource):
    """Gives up after the first tensor."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield next(iter(super().tensors()))
        raise RuntimeError("the trainer gave up")


@pytest.mark.parametrize("lacking", [True, False])
def test_the_first_update_that_breaks_off_leaves_it_whole(lacking: bool) -> None:
    one = rank()
    more = {} if lacking else {"score.bias": torch.zeros(2)}
    assert isinstance(send(one, Short({**checkpoint(1), **more})), Exception)
    assert one.manager.content is Content.FAILED
    assert not isinstance(send(one, checkpoint(2)), Exception)
    assert one.manager.content is Content.VALID
    assert one.model.score.bias.eq(7).all()


def test_a_loader_that_makes_new_tensors_leaves_the_model_as_it_was() -> None:
    model, seen = Reward(), []

    @contextmanager
    def unchanged() -> Iterator[None]:
        seen.append("entered")
        yield
        seen.append("left")

    found = filled_by(model.load_weights, specs(checkpoint()), dict(model.named_parameters()), unchanged)
    assert found == {"score.bias": ()}
    assert seen == ["entered", "left"]


def found(load: Any, parameters: dict[str, torch.Tensor], known: dict[str, TensorSpec]) -> Any:
    return filled_by(load, known, parameters, nullcontext)


A = {"a": TensorSpec("a", "float32", (2, 3))}


def test_regions_are_what_the_load_fills_of_a_parameter() -> None:
    memory = {"a": torch.zeros(4, 4)[1:3], "b": torch.zeros(2), "c": torch.zeros(2, 3)}

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, weight in weights:
            memory["a"][:, 1:].copy_(weight)
            memory["c"].copy_(weight)

    regions = found(load, memory, A)
    assert regions == {"a": (Region((2, 3), (4, 1), 1),), "b": ()}
    regions["a"][0].of(memory["a"]).fill_(5)
    assert memory["a"].tolist() == [[0, 5, 5, 5]] * 2


def _fails(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    raise KeyError("a")


def _replaces(memory: dict[str, torch.Tensor]) -> Any:
    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, weight in weights:
            memory["a"].data = weight

    return load


def _modifies(memory: dict[str, torch.Tensor]) -> Any:
    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, weight in weights:
            memory["a"].copy_(weight)
            memory["b"].mul_(2)

    return load


def _skips(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    for _ in weights:
        pass


def test_where_the_trace_cannot_tell_nothing_counts_as_unfilled() -> None:
    memory = {"a": torch.zeros(2, 3), "b": torch.zeros(2)}
    for load in (_fails, _skips, _modifies(memory)):
        assert found(load, memory, A) == {}
    odd = {**A, "b": TensorSpec("b", "F4", (2,))}
    assert found(lambda weights: [memory["a"].copy_(weight) for _, weight in weights], memory, odd) == {}


def test_a_parameter_whose_memory_the_load_replaces_is_filled() -> None:
    memory = {"a": torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False), "b": torch.zeros(2)}
    assert found(_replaces(memory), memory, A) == {"b": ()}


def test_writes_across_parameters_are_no_regions() -> None:
    flat = torch.zeros(10)
    memory = {"a": flat[:7], "b": flat[7:]}

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, weight in weights:
            flat[2:8].copy_(weight.view(-1))

    assert found(load, memory, A) == {}
