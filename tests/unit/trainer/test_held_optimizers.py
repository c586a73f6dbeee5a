"""Optimisers that hold the optimisers which have the state; and several of one memory."""

import threading

import pytest
import torch
from models import Tied
from test_pausable import TOKENS, WIDTH, adamw, reads_zero, tensors_in, train
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from rl_memory_plugins.errors import StateConflictError
from rl_memory_plugins.trainer import PausableMemory, pausable_tensors, targets
from rl_memory_plugins.trainer.held_tensors import optimizers_in, tensors_of


class Container(torch.optim.Optimizer):
    """As torchtitan's: an optimiser for each part of a model."""

    def __init__(self, model):
        self.optimizers = [torch.optim.AdamW([parameter], lr=1e-2) for parameter in model.parameters()]
        super().__init__(list(model.parameters()), {})

    def step(self, closure=None):
        for optimizer in self.optimizers:
            optimizer.step()


class Wrapper(torch.optim.Optimizer):
    """As accelerate's, which makes no hooks."""

    def __init__(self, model):
        self.optimizer = adamw(model)

    @property
    def defaults(self):
        return self.optimizer.defaults

    @property
    def state(self):
        return self.optimizer.state

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        self.optimizer.step()


class Around(torch.optim.Optimizer):
    """Has state of its own besides."""

    def __init__(self, model):
        super().__init__(list(model.parameters()), {})
        self.base_optimizer = adamw(model)

    def step(self, closure=None):
        self.base_optimizer.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("slow", parameter.detach().clone())


@pytest.fixture
def alone(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def zero(model):
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)


@pytest.mark.parametrize("kind", [Container, Wrapper, Around, zero])
def test_the_state_of_optimisers_inside_sleeps_and_no_step_reads_it_meanwhile(kind, alone):
    model = Tied(width=WIDTH)
    optimizer = kind(model)
    memory = PausableMemory(model, optimizer)
    train(model, optimizer)
    inside = tensors_in(*optimizers_in(optimizer))
    large = [tensor for tensor in inside if tensor.numel() > WIDTH]
    assert large and all(map(memory.owned(), (tensor.data_ptr() for tensor in large)))  # since the step
    content = [tensor.clone() for tensor in inside]
    memory.sleep(["optimizer"])
    assert any(map(reads_zero, large))
    with pytest.raises(StateConflictError, match="asleep"):
        optimizer.step()
    memory.wake()
    assert all(torch.equal(*pair) for pair in zip(inside, content, strict=True))
    train(model, optimizer)
    memory.close()


def test_a_step_of_one_optimiser_looks_into_no_other(monkeypatch):
    """Of a container of one for each parameter, all steps together would take seconds."""
    model = Tied(width=WIDTH)
    optimizer = Container(model)
    memory = PausableMemory(model, optimizer)
    train(model, optimizer)
    looked = []
    for module in (targets, pausable_tensors):
        monkeypatch.setattr(module, "optimizers_in", lambda *several: looked.append(several) or [])
    train(model, optimizer)
    assert not looked
    memory.close()


def test_an_optimiser_that_holds_itself_is_found_once():
    optimizer = adamw(Tied(width=8))
    optimizer.others = {"itself": optimizer, "none": None}
    assert optimizers_in(optimizer) == [optimizer] and list(tensors_of(optimizer)) == []


def test_a_first_step_moves_no_state_of_another_optimiser_which_may_be_in_a_step():
    actor, critic = Tied(width=WIDTH), Tied(width=WIDTH)
    first, second = adamw(actor), adamw(critic)
    memory = PausableMemory(actor, critic, first, second)
    begun, go_on = threading.Event(), threading.Event()

    def waits(*_):
        """As a step in another thread that has made its state, and will write to it."""
        begun.set()
        assert go_on.wait(60)

    second.register_step_post_hook(waits)
    hooks = second._optimizer_step_post_hooks
    hooks.move_to_end(next(reversed(hooks)), last=False)  # before the memory's hook
    beside = threading.Thread(target=train, args=(critic, second))
    beside.start()
    assert begun.wait(60)
    places = [tensor.data_ptr() for tensor in tensors_in(second)]
    train(actor, first)
    assert [tensor.data_ptr() for tensor in tensors_in(second)] == places
    assert any(map(memory.owned(), (tensor.data_ptr() for tensor in tensors_in(first))))
    go_on.set()
    beside.join()
    assert any(map(memory.owned(), (tensor.data_ptr() for tensor in tensors_in(second))))
    memory.close()


def test_a_sleep_drops_the_gradients_of_masters_too():
    model = Tied(width=WIDTH)
    masters = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    memory = PausableMemory(model)
    memory.adopt(masters, tag="masters")
    for master in masters:
        master.grad = torch.ones_like(master)
    memory.sleep()
    assert all(master.grad is None for master in masters)
    memory.wake()
    memory.close()


def test_gradients_of_ddp_that_are_adopted_after_its_second_backward_sleep_at_every_step(alone):
    """Before its second forward it makes its buckets anew."""
    model = Tied(width=WIDTH)
    memory = PausableMemory(model)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def backward():
        parallel(TOKENS).square().mean().backward()

    for _ in range(2):
        model.zero_grad(set_to_none=True)
        backward()
    memory.adopt([parameter.grad for parameter in model.parameters()], tag="gradients")
    for _ in range(3):
        gradients = [parameter.grad for parameter in model.parameters()]
        assert all(memory.owned()(gradient.data_ptr()) for gradient in gradients)
        memory.sleep()
        memory.wake()
        backward()
        assert any(gradient.any() for gradient in gradients)
    memory.close()
