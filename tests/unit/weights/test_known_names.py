"""Names that a model's loader skips by itself, and names that nobody knows."""

import pytest
import torch
from toys import Rank, ToyModel, checkpoint, update

from rl_memory_plugins.errors import ManifestError
from rl_memory_plugins.trainer import ModelSource
from rl_memory_plugins.weights import wire
from rl_memory_plugins.weights.answers import of_ranks
from rl_memory_plugins.weights.known_names import Ignored, ignored_by_all, nearest
from rl_memory_plugins.weights.manifest import Mismatch


class Partial(ToyModel):
    """Has a draft and a vision tower in its checkpoint, and loads neither. Ignores unknown names, as SGLang does."""

    def __init__(self, rank=0, tp=1):
        super().__init__(rank, tp)
        self.layers = torch.nn.ParameterList([torch.zeros(2), torch.zeros(2)]).requires_grad_(False)

    def load_weights(self, weights):
        known = dict(self.named_parameters())
        for name, weight in weights:
            if name.startswith("model.layers."):
                number = int(name.split(".")[2])
                if number < 2 and name.endswith("up_proj.weight"):
                    self.layers[number].data.copy_(weight)
            elif name in known or name.split(".")[0] in ("q", "k", "v", "o", "experts", "norm", "embed", "packed"):
                super().load_weights([(name, weight)])


SKIPPED = {"mtp.fc.weight": torch.zeros(2), "visual.merger.weight": torch.zeros(3), "lm_head.weight": torch.zeros(2)}
LAYERS = {f"model.layers.{number}.up_proj.weight": torch.full((2,), number + 1.0) for number in range(2)}


def whole(seed=3):
    return {**checkpoint(seed), **LAYERS, **SKIPPED}


def rank(model=None, number=0):
    names = {spec.name: spec for spec in ModelSource(whole()).specs()}
    return Rank(model or Partial(), number, ignorable=lambda name: False, checkpoint=lambda: names)


def unknown(outcome):
    assert isinstance(outcome, ManifestError)
    return {m["name"]: m["message"] for m in outcome.details["mismatches"] if m["kind"] == "unknown"}


def test_names_of_the_checkpoint_that_the_loader_ignores_are_listed():
    one = rank()
    outcome, (thread,) = update([one], whole())
    assert set(outcome["unused"]) == SKIPPED.keys()
    assert thread.report["unused"] == outcome["unused"]
    assert torch.equal(one.model.layers[1], torch.full((2,), 2.0))


def test_a_name_that_the_loader_uses_is_not_listed():
    outcome, _ = update([rank()], {name: tensor for name, tensor in whole().items() if name not in SKIPPED})
    assert outcome["unused"] == []


@pytest.mark.parametrize("partial", [False, True])
def test_a_misspelt_name_is_an_error_with_the_nearest_name(partial):
    one = rank()
    before = one.model.snapshot()
    tensors = {
        **({} if partial else whole()),
        "mtp.fcc.weight": torch.zeros(2),
        "model.layers.1.up_prj.weight": torch.zeros(2),
        "model.layers.7.up_proj.weight": torch.zeros(2),
        "quite.another.one": torch.zeros(2),
        **({} if partial else {"norm.weight": torch.zeros(3)}),  # of another shape: the rank rejects the manifest
    }
    found = unknown(update([one], tensors, partial=partial)[0])
    assert found.keys() == tensors.keys() - whole().keys() - {"norm.weight"}
    assert found["mtp.fcc.weight"].endswith("the nearest known name is mtp.fc.weight")
    assert found["model.layers.1.up_prj.weight"].endswith("the nearest known name is model.layers.1.up_proj.weight")
    assert found["model.layers.7.up_proj.weight"].endswith("the nearest known name is model.layers.1.up_proj.weight")
    assert "nearest" not in found["quite.another.one"]
    one.model.assert_unchanged(before)


def test_a_name_that_the_loader_raises_on_has_a_hint_too():
    found = unknown(update([Rank()], {**checkpoint(), "norms.weight": torch.zeros(2)})[0])
    assert found["norms.weight"].endswith("the nearest known name is norm.weight")


def test_a_model_in_memory_may_have_other_outer_names():
    """Of a part that the engine does not run: its names in the checkpoint are ignored as well."""
    tensors = {name: tensor for name, tensor in whole().items() if name not in SKIPPED}
    outcome, _ = update([rank()], {**tensors, "model.visual.merger.weight": torch.zeros(3)})
    assert outcome["unused"] == ["model.visual.merger.weight"]


def test_other_outer_names_of_a_part_that_the_engine_runs_are_unknown():
    one = rank()
    before = one.model.snapshot()
    sent = {"language_model.model.layers.1.up_proj.weight": torch.ones(2)}
    assert unknown(update([one], sent, partial=True)[0]).keys() == sent.keys()
    one.model.assert_unchanged(before)


def test_a_name_is_skipped_only_if_no_rank_uses_it():
    class First(Partial):
        def load_weights(self, weights):
            super().load_weights((name, weight) for name, weight in weights if "layers.1" not in name)

    def pipeline(model, number):
        made = rank(model, number)
        parameters = {name: one for name, one in model.named_parameters() if "layers" not in name}
        made.receiver._model.parameters = lambda: parameters
        return made

    ranks = [pipeline(First(), 0), pipeline(Partial(), 1)]
    outcome, threads = update(ranks, whole())
    assert set(outcome["unused"]) == SKIPPED.keys()
    assert [thread.report["unused"] for thread in threads] == [outcome["unused"]] * 2


def test_an_engine_without_files_skips_what_its_adapter_says():
    outcome, _ = update([Rank()], checkpoint(4))
    assert outcome["unused"] == ["lm_head.weight"]


def test_groups_of_ranks_agree():
    assert ignored_by_all([]) == Ignored([], [])
    one, other = Ignored(["a", "b"], ["c"]), Ignored(["a", "c"], ["d"])
    assert ignored_by_all([one, other]) == Ignored(["a"], ["c"])


def test_the_search_for_near_names_is_short():
    known = [f"model.layers.{i}.mlp.experts.{j}.up_proj.weight" for i in range(60) for j in range(256)]
    names = [f"model.layers.{i}.mlp.experts.{i}.up_prj.weight" for i in range(60)]
    found = nearest(names, dict.fromkeys(known))
    assert len(found) == 20
    assert found[names[7]] == "model.layers.7.mlp.experts.7.up_proj.weight"


def test_a_name_that_two_pipeline_stages_do_not_know_is_one_mismatch():
    stages = [Mismatch("unknown", "layers.9.w", f"the nearest known name is layers.{rank}.w") for rank in range(2)]
    answers = [(rank, wire.Reject(mismatches=[stages[rank]], unused=[])) for rank in range(2)]
    (found,) = of_ranks(answers).mismatches
    assert (found.name, found.ranks) == ("layers.9.w", (0, 1))
