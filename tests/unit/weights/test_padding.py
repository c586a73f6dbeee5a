"""Parameters that an engine has padded: no tensor of a checkpoint fills them whole."""

from contextlib import contextmanager

import pytest
import torch
from toys import Rank, update

from rl_memory_plugins.errors import ManifestError, UnsupportedError
from rl_memory_plugins.tags import Content
from rl_memory_plugins.trainer import ModelSource
from rl_memory_plugins.weights.engine_updates import EngineUpdates
from rl_memory_plugins.weights.manifest import Manifest

EXPERTS, ROWS, PADDED, WIDTH = 3, 4, 6, 8


class PaddedExperts(torch.nn.Module):
    """Experts with rows for a kernel that takes multiples of 6. The engine has made the padding zeros."""

    def __init__(self):
        super().__init__()
        self.experts = torch.nn.Parameter(torch.zeros(EXPERTS, PADDED, WIDTH), requires_grad=False)
        self.norm = torch.nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def load_weights(self, weights):
        for name, weight in weights:
            if name == "norm":
                self.norm.copy_(weight)
            else:
                self.experts[int(name.split(".")[1]), :ROWS].copy_(weight)

    @property
    def padding(self):
        return self.experts[:, ROWS:]


def checkpoint(seed=0):
    generator = torch.Generator().manual_seed(seed)
    experts = {f"experts.{i}": torch.rand(ROWS, WIDTH, generator=generator) for i in range(EXPERTS)}
    return {**experts, "norm": torch.rand(WIDTH, generator=generator)}


def rank(**options):
    specs = {spec.name: spec for spec in ModelSource(checkpoint()).specs()}
    return Rank(PaddedExperts(), checkpoint=lambda: specs, **options)


def assert_loaded(model, tensors):
    for i in range(EXPERTS):
        assert torch.equal(model.experts[i, :ROWS], tensors[f"experts.{i}"])
    assert torch.equal(model.norm, tensors["norm"])


def test_what_the_engines_own_checkpoint_leaves_is_padding():
    one = rank()
    assert not isinstance(update([one], checkpoint(1))[0], Exception)
    assert_loaded(one.model, checkpoint(1))


def test_without_the_checkpoint_nobody_knows_what_is_padding():
    outcome, _ = update([Rank(PaddedExperts())], checkpoint(1))
    assert isinstance(outcome, ManifestError)
    assert [(m["kind"], m["name"]) for m in outcome.details["mismatches"]] == [("missing", "experts")]


@pytest.mark.parametrize("absent", ["experts.1", "norm"])
def test_a_part_that_the_checkpoint_fills_must_not_lack(absent):
    one, tensors = rank(), checkpoint(1)
    del tensors[absent]
    outcome, _ = update([one], tensors)
    assert isinstance(outcome, ManifestError)
    assert [(m["kind"], m["name"]) for m in outcome.details["mismatches"]] == [("missing", absent.split(".")[0])]


def test_padding_that_a_sleep_has_discarded_is_zero_again():
    one = rank()
    for seed in (1, 2):  # the second time by the known plan
        one.model.experts.fill_(float("nan"))
        one.manager.mark_failed()
        assert not isinstance(update([one], checkpoint(seed))[0], Exception)
        assert_loaded(one.model, checkpoint(seed))
        assert not one.model.padding.any()


def test_padding_that_is_still_there_stays():
    one = rank()
    one.model.padding.fill_(5)
    update([one], checkpoint(1))
    assert (one.model.padding == 5).all()
    update([one], {"experts.0": checkpoint(2)["experts.0"]}, partial=True)
    assert (one.model.padding == 5).all()


def test_random_numbers_of_dummy_weights_leave_the_padding_with_the_first_complete_update():
    one = rank(dummy=lambda: True)
    one.model.experts.fill_(5)
    update([one], {"norm": checkpoint(1)["norm"]}, partial=True)
    assert (one.model.padding == 5).all()
    assert not isinstance(update([one], checkpoint(1))[0], Exception)
    assert_loaded(one.model, checkpoint(1))
    assert not one.model.padding.any()
    one.model.padding.fill_(3)  # nobody discards it any more
    update([one], checkpoint(2))
    assert (one.model.padding == 3).all()


@pytest.mark.parametrize("dummy", [False, True])
def test_the_engine_s_own_load_of_undefined_weights_leaves_zeros_in_the_padding(dummy):
    one = rank(dummy=lambda: dummy)
    updates = EngineUpdates(one.manager, one.model.named_parameters, padding=one.receiver.padding)
    one.model.experts.fill_(float("nan"))
    one.manager.content = Content.STALE
    tensors = checkpoint(1)
    for names, content in (
        (["norm", "experts.0", "experts.2"], Content.STALE),
        (["experts.1"], Content.VALID),
    ):
        with updates.watch():
            one.model.load_weights([(name, tensors[name]) for name in names])
        assert one.manager.content is content
    assert_loaded(one.model, tensors)
    assert not one.model.padding.any()


def test_a_model_that_cannot_tell_has_no_padding_for_the_engine_s_own_loads():
    def refuse():
        raise UnsupportedError("no reload")

    assert rank(reload=refuse).receiver.padding() == {}


class Transformed:
    """A reload that makes `experts` anew in each update."""

    why = "transformed"

    def __init__(self, model, *, whole):
        self.blank = torch.zeros_like(model.experts)
        self.model = model
        self.is_temporary = None if whole else lambda tensor: tensor.data_ptr() == self.blank.data_ptr()
        self.optional = {}

    def suits(self, plan):
        return True

    @contextmanager
    def checkpoint_layout(self):
        former, self.model.experts.data = self.model.experts.data, self.blank
        yield dict(self.model.named_parameters())
        self.model.experts.data = former


@pytest.mark.parametrize("whole", [False, True])
def test_the_padding_of_a_transformed_layer_is_made_anew(whole):
    """Its regions are those of the checkpoint's layout, which the engine's own load does not find."""
    model = PaddedExperts()
    reload = Transformed(model, whole=whole)
    specs = {spec.name: spec for spec in ModelSource(checkpoint()).specs()}
    one = Rank(model, checkpoint=lambda: specs, reload=lambda: reload)
    assert one.receiver.padding() == {}
    for partial in (False, True):
        plan = one.loader.plan(Manifest(list(specs.values()), partial=partial), one.loader.drop_outdated())
        assert set(plan.padding) == {"experts"}
        assert plan.padded == []
