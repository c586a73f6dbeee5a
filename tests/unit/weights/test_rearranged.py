"""Views of copies that loaders make to change a layout are views of the tensor."""

import itertools

import pytest
import torch

from rl_memory_plugins.weights.manifest import Manifest, TensorSpec
from rl_memory_plugins.weights.plan import trace

SHAPE = (3, 4, 6)

#: What loaders make of a tensor before they copy it, all without a change of a value.
REARRANGED = {
    "transposed": lambda w: w.permute(0, 2, 1).contiguous(),
    "a part, transposed": lambda w: w[:, 1:3, 2:].permute(0, 2, 1).contiguous(),
    "a part of the transposed": lambda w: w.permute(2, 0, 1).contiguous()[1:4, :, 1:3],
    "one expert of the transposed": lambda w: w.permute(0, 2, 1).contiguous()[2],
    "twice": lambda w: w.permute(0, 2, 1).contiguous()[1:].permute(2, 0, 1).contiguous()[:, :, 1:5],
    "every second": lambda w: w.permute(0, 2, 1).contiguous()[:, 1::2],
    "split into dimensions": lambda w: w.permute(0, 2, 1).contiguous().view(3, 2, 3, 4)[:, 1],
    "cloned": lambda w: w.permute(2, 1, 0).clone(memory_format=torch.contiguous_format)[0],
}
#: What no strides of the tensor describe, or what changes values.
COMPUTED = {
    "merged dimensions": lambda w: w.permute(0, 2, 1).contiguous().view(18, 4).view(6, 12),
    "doubled": lambda w: (w.permute(0, 2, 1) * 2).contiguous(),
    "changed after": lambda w: w.permute(0, 2, 1).contiguous().mul_(2),
}


def loader_to(destination, make):
    def load(weights):
        for _, weight in weights:
            destination.copy_(make(weight))

    return load


@pytest.mark.parametrize("make", REARRANGED.values(), ids=REARRANGED)
def test_a_rearranged_tensor_is_copied_by_a_plan(make):
    source = torch.randn(SHAPE)
    expected = make(source)
    destination = torch.zeros(expected.shape)
    plan = trace(loader_to(destination, make), Manifest([TensorSpec("w", "float32", SHAPE)]))
    assert not plan.opaque and not destination.any()
    plan.apply("w", source)
    assert torch.equal(destination, expected)


@pytest.mark.parametrize("make", COMPUTED.values(), ids=COMPUTED)
def test_what_is_computed_takes_the_loader(make):
    destination = torch.zeros(make(torch.zeros(SHAPE)).shape)
    plan = trace(loader_to(destination, make), Manifest([TensorSpec("w", "float32", SHAPE)]))
    assert set(plan.opaque) == {"w"}


def test_any_part_of_any_permutation_is_right_or_opaque():
    source = torch.randn(SHAPE)
    for order, (start, step) in itertools.product(itertools.permutations(range(3)), [(0, 1), (1, 1), (0, 2), (2, 3)]):
        for dimension in range(3):

            def make(w, order=order, start=start, step=step, dimension=dimension):
                copy = w.permute(order).contiguous()
                part = [slice(None)] * 3
                part[dimension] = slice(start, None, step)
                return copy[tuple(part)].transpose(0, 1)

            destination = torch.zeros(make(source).shape)
            plan = trace(loader_to(destination, make), Manifest([TensorSpec("w", "float32", SHAPE)]))
            assert not plan.opaque
            plan.apply("w", source)
            assert torch.equal(destination, make(source))
