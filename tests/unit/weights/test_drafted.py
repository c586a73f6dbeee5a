"""One manifest for a target model and its draft: which tensors go where, and the plan of both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
import torch

from rl_memory_plugins.errors import ManifestError, UnsupportedError, WeightUpdateError
from rl_memory_plugins.tags import DraftShare
from rl_memory_plugins.weights import wire
from rl_memory_plugins.weights.answers import of_ranks
from rl_memory_plugins.weights.drafted import DraftedLoader, DraftedPlan
from rl_memory_plugins.weights.manifest import Manifest, TensorSpec
from rl_memory_plugins.weights.model_loader import ModelLoader
from rl_memory_plugins.weights.plan import LoadPlan

SHAPE = (4, 2)


class Model:
    """Parameters by name, and a loader that skips other names, or raises."""

    def __init__(self, *names: str, skips: str = "", reads: bool = False) -> None:
        self.memory = {name: torch.zeros(SHAPE) for name in names}
        self.loaded: list[str] = []
        self._skips, self._reads = skips, reads

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if self._skips and name.startswith(self._skips):
                continue
            if self._reads and float(tensor.sum()) > 1e9:  # only real tensors have values
                raise ValueError(name)
            self.memory[name].copy_(tensor)
            self.loaded.append(name)

    def loader(self) -> ModelLoader:
        return ModelLoader(self.load_weights, lambda: self.memory)


def pair(target: Model, draft: Model | None, one_checkpoint: bool = False) -> DraftedLoader:
    of_draft = (draft or Model()).loader()
    return DraftedLoader(target.loader(), of_draft, lambda: draft is not None, lambda: one_checkpoint)


def manifest(*names: str, partial: bool = False) -> Manifest:
    return Manifest([TensorSpec(name, "float32", SHAPE) for name in names], partial=partial)


def plan(loader: DraftedLoader, of: Manifest) -> object:
    return loader.plan(of, loader.drop_outdated())


def load(loader: DraftedLoader, of: Manifest, values: Mapping[str, float]) -> None:
    """As a session does: what the plan replays is applied, and the loaders get the rest."""
    made = loader.plan(of, loader.drop_outdated())

    def arrivals() -> Iterable[tuple[str, torch.Tensor]]:
        for spec in of.tensors:
            tensor = torch.full(SHAPE, values[spec.name])
            if spec.name in made.opaque:
                yield spec.name, tensor
            else:
                made.apply(spec.name, tensor)

    left = iter(arrivals())
    loader.load_with_engine(made, left)
    assert list(left) == []
    loader.note_complete(made)


def values(model: Model) -> dict[str, float]:
    return {name: float(tensor[0, 0]) for name, tensor in model.memory.items()}


@pytest.mark.parametrize("drafted", [False, True])
def test_a_known_manifest_reads_the_parameters_a_few_times_however_many_they_are(drafted: bool) -> None:
    """A model's `named_parameters` walks through all its modules."""
    names = [f"layers.{number}" for number in range(50)]
    model, reads = Model(*names), []

    def parameters() -> dict[str, torch.Tensor]:
        reads.append(1)
        return dict(model.memory)

    target = ModelLoader(model.load_weights, parameters)
    loader = DraftedLoader(target, Model("a").loader(), lambda: drafted, lambda: False)
    made = plan(loader, manifest(*names))
    reads.clear()
    assert plan(loader, manifest(*names)) is made
    assert len(reads) <= 3


def test_an_update_of_both_clears_the_padding_of_both() -> None:
    class Padded(ModelLoader):
        def plan(self, *arguments: object, **named: object) -> LoadPlan:
            found = super().plan(*arguments, **named)  # type: ignore[arg-type]
            found.padded = [padding[self]]
            return found

    models = Model("a"), Model("a")
    target, draft = (Padded(model.load_weights, lambda model=model: model.memory) for model in models)
    padding = {loader: torch.ones(2) for loader in (target, draft)}
    loader = DraftedLoader(target, draft, lambda: True, lambda: False)
    loader.plan(manifest("a", "draft.a"), loader.drop_outdated()).clear_padding()
    assert all(not one.any() for one in padding.values())


def test_a_draft_with_unfilled_parameters_is_traced_once() -> None:
    traces: list[int] = []

    class Unfilled(ModelLoader):
        def unfilled(self) -> frozenset[str]:
            return frozenset({"never"})

    model = Model("a", "never")

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        traces.append(1)
        model.load_weights(weights)

    draft = Unfilled(load_weights, lambda: model.memory)
    loader = DraftedLoader(Model("a").loader(), draft, lambda: True, lambda: False)
    made = plan(loader, manifest("a", "draft.a"))
    traces.clear()
    assert plan(loader, manifest("a", "draft.a")) is made
    assert not traces


def test_a_manifest_without_the_draft_is_the_target_s_alone() -> None:
    loader = pair(Model("a", "b"), Model("a"))
    made = plan(loader, manifest("a", "b"))
    assert not isinstance(made, DraftedPlan)
    assert (made.draft_share, made.draft_tensors) == (DraftShare.NONE, 0)


@pytest.mark.parametrize("target_reads", [False, True])
@pytest.mark.parametrize("draft_reads", [False, True])
@pytest.mark.parametrize("names", [("a", "b", "draft.a", "draft.c"), ("draft.a", "a", "draft.c", "b")])
def test_an_update_of_both(names: tuple[str, ...], target_reads: bool, draft_reads: bool) -> None:
    target, draft = Model("a", "b", reads=target_reads), Model("a", "c", reads=draft_reads)
    loader = pair(target, draft)
    made = plan(loader, manifest(*names))
    assert (made.draft_share, made.draft_tensors, made.unused) == (DraftShare.WHOLE, 2, [])
    load(loader, manifest(*names), {"a": 1.0, "b": 2.0, "draft.a": 3.0, "draft.c": 4.0})
    assert values(target) == {"a": 1.0, "b": 2.0}
    assert values(draft) == {"a": 3.0, "c": 4.0}


def test_a_loader_that_stops_early_is_noticed() -> None:
    target, draft = Model("a", "b", reads=True), Model("c")
    loader = pair(target, draft)
    plan(loader, manifest("a", "b", "draft.c"))
    target.load_weights = lambda weights: next(iter(weights)) and None  # type: ignore[method-assign]
    loader._target.load_weights = target.load_weights
    loader._target.load_opaque = target.load_weights
    with pytest.raises(WeightUpdateError, match="did not"):
        load(loader, manifest("a", "b", "draft.c"), {"a": 1.0, "b": 2.0, "draft.c": 4.0})


def test_what_is_wrong_with_the_draft_has_the_manifest_s_names() -> None:
    loader = pair(Model("a"), Model("b", "c"))
    with pytest.raises(ManifestError) as error:
        plan(loader, manifest("a", "draft.b", "draft.d"))
    found = {(mismatch["kind"], mismatch["name"]) for mismatch in error.value.details["mismatches"]}
    assert found == {("unknown", "draft.d"), ("missing", "draft.c")}


def test_the_whole_draft_is_what_a_load_of_its_checkpoint_fills() -> None:
    target, draft = Model("a"), Model("b", "c")
    of_draft = ModelLoader(
        draft.load_weights, lambda: draft.memory, checkpoint=lambda: {"b": TensorSpec("b", "float32", SHAPE)}
    )
    loader = DraftedLoader(target.loader(), of_draft, lambda: True, lambda: False)
    assert plan(loader, manifest("a", "draft.b")).draft_share is DraftShare.WHOLE
    assert plan(loader, manifest("a", "draft.b", "draft.c")).draft_share is DraftShare.WHOLE
    with pytest.raises(ManifestError, match=r"draft\.b"):
        plan(loader, manifest("a", "draft.c"))


def test_what_no_load_of_the_draft_fills_must_come_if_a_load_that_broke_off_has_changed_it() -> None:
    target, draft, torn = Model("a"), Model("b", "c"), [False]
    of_draft = ModelLoader(
        draft.load_weights, lambda: draft.memory, checkpoint=lambda: {"b": TensorSpec("b", "float32", SHAPE)}
    )
    loader = DraftedLoader(target.loader(), of_draft, lambda: True, lambda: False, lambda: torn[0])
    whole, rest = manifest("a", "draft.b", "draft.c"), manifest("a", "draft.b")
    load(loader, whole, {"a": 1.0, "draft.b": 2.0, "draft.c": 3.0})
    plan(loader, rest)
    torn[0] = True
    plan(loader, rest)  # the load that broke off has not come to it
    draft.memory["c"].fill_(4.0)
    with pytest.raises(ManifestError, match=r"draft\.c"):
        plan(loader, rest)
    load(loader, whole, {"a": 1.0, "draft.b": 2.0, "draft.c": 5.0})
    torn[0] = False
    plan(loader, rest)


def test_a_draft_that_was_torn_before_anybody_looked_needs_all() -> None:
    draft = Model("b", "c")
    of_draft = ModelLoader(
        draft.load_weights, lambda: draft.memory, checkpoint=lambda: {"b": TensorSpec("b", "float32", SHAPE)}
    )
    loader = DraftedLoader(Model("a").loader(), of_draft, lambda: True, lambda: False, lambda: True)
    with pytest.raises(ManifestError, match=r"draft\.c"):
        plan(loader, manifest("a", "draft.b"))


def test_a_partial_update_may_cover_the_draft_or_a_part_of_it() -> None:
    loader = pair(Model("a"), Model("b", "c"))
    assert plan(loader, manifest("draft.b", partial=True)).draft_share is DraftShare.PART
    assert plan(loader, manifest("draft.b", "draft.c", partial=True)).draft_share is DraftShare.WHOLE
    assert plan(loader, manifest("a", partial=True)).draft_share is DraftShare.NONE


def test_a_rank_without_a_draft_leaves_the_prefix_to_other_pipeline_stages() -> None:
    """The last stage has the draft. An engine of which no rank has one does not know the names."""
    first, last = pair(Model("a"), None), pair(Model("c"), Model("b"))
    both = manifest("a", "draft.b")
    made = plan(first, both)
    assert isinstance(made, LoadPlan)
    assert (made.unused, list(made.steps), made.draft_share) == (["draft.b"], ["a"], DraftShare.NONE)
    assert plan(first, both) is made
    load(first, both, {"a": 1.0, "draft.b": 2.0})
    of_last = plan(last, manifest("c", "draft.b"))
    assert isinstance(of_last, LoadPlan) and of_last.unused == []
    found = of_ranks([(0, wire.Accept(made.unused))])
    assert [(one.kind, one.name) for one in found.all_mismatches()] == [("unknown", "draft.b")]


def test_one_checkpoint_has_both() -> None:
    target, draft = Model("a", "b", skips="mtp"), Model("a", "mtp.c", skips="b")
    loader = pair(target, draft, one_checkpoint=True)
    both = manifest("mtp.c", "a", "b")
    assert plan(loader, both).draft_share is DraftShare.WHOLE
    load(loader, both, {"a": 1.0, "b": 2.0, "mtp.c": 3.0})
    assert values(target) == {"a": 1.0, "b": 2.0}
    assert values(draft) == {"a": 1.0, "mtp.c": 3.0}
    assert not isinstance(plan(loader, manifest("a", "b")), DraftedPlan)


def test_a_draft_that_cannot_be_updated_leaves_the_target_updatable() -> None:
    draft = Model("mtp.c", skips="a")
    loader = pair(Model("a", skips="mtp"), draft, one_checkpoint=True)

    def refuse() -> None:
        raise UnsupportedError("packed")

    loader._draft.reload = refuse
    made = plan(loader, manifest("a", "mtp.c"))
    assert not isinstance(made, DraftedPlan)
    with pytest.raises(UnsupportedError, match="packed"):
        plan(loader, manifest("a", "draft.mtp.c"))


@pytest.mark.parametrize("prefix", ["", "draft."])
def test_memory_that_the_draft_shares_gets_the_target_s_tensors(prefix: str) -> None:
    target, draft = Model("embedding", skips="mtp"), Model("mtp.embedding", "mtp.c", skips="embedding")
    draft.memory["mtp.embedding"] = target.memory["embedding"]
    loader = pair(target, draft, one_checkpoint=not prefix)
    of = manifest("embedding", f"{prefix}mtp.embedding", f"{prefix}mtp.c")
    load(loader, of, {"embedding": 1.0, f"{prefix}mtp.embedding": 2.0, f"{prefix}mtp.c": 3.0})
    assert values(target) == {"embedding": 1.0}
    assert values(draft) == {"mtp.embedding": 1.0, "mtp.c": 3.0}
    assert list(loader.drop_outdated()) == ["embedding", "draft.mtp.c"]


def test_plans_are_kept_until_memory_moves() -> None:
    target, draft = Model("a"), Model("b")
    loader, of = pair(target, draft), manifest("a", "draft.b")
    first = plan(loader, of)
    assert plan(loader, of) is first
    load(loader, of, {"a": 1.0, "draft.b": 2.0})
    assert loader.complete is first
    draft.memory["b"] = torch.zeros(SHAPE)
    assert plan(loader, of) is not first
    assert loader.complete is None
    load(loader, of, {"a": 1.0, "draft.b": 2.0})
    assert values(draft) == {"b": 2.0}


def test_the_checksums_are_those_of_the_last_complete_update() -> None:
    loader = pair(Model("a"), Model("b"))
    load(loader, manifest("a", "draft.b"), {"a": 1.0, "draft.b": 2.0})
    assert set(loader.complete.steps) == {"a", "draft.b"}
    load(loader, manifest("a"), {"a": 1.0})
    assert set(loader.complete.steps) == {"a"}
