"""Parameters that an engine has padded: no tensor of a checkpoint fills them whole."""

import pytest
import torch
from toys import Rank, update

from rl_memory_plugins.errors import ManifestError
from rl_memory_plugins.trainer import ModelSource

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
