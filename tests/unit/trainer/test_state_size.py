"""The expected size of an optimiser's state against the state that a step makes."""

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rl_memory_plugins.trainer import PausableMemory
from rl_memory_plugins.trainer.state_size import ROUNDING, expected_state_bytes

CPU = torch.device("cpu")


def model():
    return torch.nn.Sequential(torch.nn.Linear(100, 300), torch.nn.Linear(300, 7, bias=False).bfloat16())


def state_bytes(optimizer):
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.numel() > 1)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"amsgrad": True, "foreach": False}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {}),
        (torch.optim.RMSprop, {"centered": True}),
        (torch.optim.Adagrad, {}),
    ],
)
def test_a_step_makes_the_expected_state(make, options):
    first, second = model()
    frozen = torch.nn.Parameter(torch.ones(1000), requires_grad=False)
    groups = [{"params": [*first.parameters(), frozen]}, {"params": second.parameters(), "lr": 0.5}]
    optimizer = make(groups, lr=0.1, **options)
    random = torch.get_rng_state()
    expected = expected_state_bytes(optimizer, CPU)
    assert torch.equal(torch.get_rng_state(), random)
    if make is torch.optim.Adagrad:  # makes its state at once
        assert expected == 0
        return
    for parameter in [*first.parameters(), *second.parameters()]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert expected == int(ROUNDING * state_bytes(optimizer))
    assert expected_state_bytes(optimizer, CPU) == 0


def test_the_twin_runs_no_hooks_of_all_optimisers():
    seen = []
    handles = [
        register(lambda *_: seen.append(1))
        for register in (
            register_optimizer_step_pre_hook,
            register_optimizer_step_post_hook,
        )
    ]
    try:
        assert expected_state_bytes(torch.optim.AdamW(model().parameters()), CPU) > 0
    finally:
        for handle in handles:
            handle.remove()
    assert seen == []


def test_a_state_in_host_memory_needs_no_copy():
    assert expected_state_bytes(torch.optim.AdamW(model().parameters()), torch.device("cuda", 0)) == 0


def test_other_optimisers_have_no_expected_size():
    class Own(torch.optim.AdamW):
        def __init__(self, *arguments, **options):
            assert not hasattr(Own, "made"), "a twin was made"
            super().__init__(*arguments, **options)
            Own.made = True

    Own.__module__ = "mine"
    assert expected_state_bytes(Own(model().parameters()), CPU) == 0
    assert expected_state_bytes(torch.optim.LBFGS(model().parameters()), CPU) == 0  # its step needs a closure


def test_host_memory_for_the_state_is_asked_for_before_the_first_step(monkeypatch):
    memory, asked = PausableMemory(allocator="host"), []
    monkeypatch.setattr(memory._manager.arena, "prepare", asked.extend)
    parameters = model()
    optimizer = torch.optim.AdamW(parameters.parameters())
    memory.adopt(parameters, optimizer)
    own = sum(parameter.nbytes for parameter in parameters.parameters())
    assert (
        asked[0] > 0.9 * own and asked[1] == expected_state_bytes(optimizer, CPU) > 1.9 * own
    )  # whole pages are released
    for parameter in parameters.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    memory.sleep()
    memory.wake()
    assert len(asked) == 2
    memory.close()
