"""A trainer's memory that sleeps and wakes, on the allocator of CPUs. `tests/gpu` has those of GPUs."""

import copy
import gc
import mmap
import subprocess
import sys
import weakref

import pytest
import torch
from models import Tied, same, whole
from test_offloading import Hidden, Scaled
from test_sharded_sources import fsdp1, fsdp2
from torch import nn
from toy_engine import ToyEngine
from toys import Rank, Receiving, checkpoint, loaded

from rl_memory_plugins.errors import (
    DeviceMemoryError,
    HostMemoryError,
    InvalidRequestError,
    RLMemoryError,
    StateConflictError,
    UnsupportedError,
)
from rl_memory_plugins.memory import arena
from rl_memory_plugins.trainer import HandoffReport, ModelSource, Moved, Offloader, PausableMemory, RolloutHandoff
from rl_memory_plugins.trainer.offloading import plain_parts
from rl_memory_plugins.trainer.sleepers import sleepers
from rl_memory_plugins.weights.packing import Packing
from rl_memory_plugins.weights.sender import WeightSender

PAGE = mmap.PAGESIZE
WIDTH = 192  # the weights of a block have some hundred pages
TOKENS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def tensors_in(*optimizers):
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]


def train(model, optimizer):
    loss = model(TOKENS).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def states(memory):
    return {tag: str(status.state) for tag, status in memory.status().items()}


def test_what_stays_on_the_device_is_told_while_something_sleeps(monkeypatch):
    memory = PausableMemory(Tied(WIDTH))
    monkeypatch.setattr(memory._manager.allocator, "residual_memory", lambda: {"context": 5})
    assert memory.left() == {}
    memory.sleep()
    assert memory.left() == {"context": 5}
    memory.wake()
    assert memory.left() == {}
    memory.close()


def reads_zero(tensor):
    """Whether the whole pages inside a tensor are gone."""
    middle = tensor.detach().flatten()[tensor.numel() // 2]
    return middle.item() == 0


OPTIMIZERS = {
    "plain": lambda model: adamw(model, foreach=False),
    "foreach": lambda model: adamw(model, foreach=True),
    "fused": lambda model: adamw(model, fused=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_bit_by_bit_at_the_same_addresses(kind):
    undisturbed = Tied(width=WIDTH)
    expected = [train(undisturbed, optimizer) for optimizer in [OPTIMIZERS[kind](undisturbed)] for _ in range(5)]
    model = Tied(width=WIDTH)
    optimizer = OPTIMIZERS[kind](model)
    memory = PausableMemory(model, optimizer)
    losses = [train(model, optimizer)]
    kept = [*model.parameters(), *tensors_in(optimizer)]
    addresses = [tensor.data_ptr() for tensor in kept]
    for _ in range(4):
        content = [tensor.detach().clone() for tensor in kept]
        slept = memory.sleep()
        assert {change.tag for change in slept.changes} == {"parameters", "gradients", "optimizer"}
        assert sum(change.bytes_released for change in slept.changes) > 0.8 * sum(t.nbytes for t in kept)
        assert reads_zero(model.blocks[0].up.weight)
        assert any(reads_zero(tensor) for tensor in tensors_in(optimizer) if tensor.numel() > WIDTH)
        assert states(memory) == {"gradients": "discarded", "parameters": "preserved", "optimizer": "preserved"}
        memory.wake()
        assert [tensor.data_ptr() for tensor in kept] == addresses
        assert all(torch.equal(*pair) for pair in zip(kept, content, strict=True))
        losses.append(train(model, optimizer))
    assert losses == expected
    same(whole(model), whole(undisturbed))


SMALLER = """
import mmap, torch
from pathlib import Path
from rl_memory_plugins.trainer import PausableMemory

def process_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

memory = PausableMemory(dropped=("scratch",))
with memory.region("scratch"):
    scratch = torch.ones(16 << 20)
awake = process_bytes()
memory.sleep()
assert awake - process_bytes() > 0.9 * scratch.nbytes
memory.wake()
assert abs(awake - process_bytes()) < 0.1 * scratch.nbytes
"""


def test_a_sleep_makes_the_process_smaller():
    """In a process of its own: memory of former tests may end here at any moment."""
    subprocess.run([sys.executable, "-c", SMALLER], check=True)


def test_host_memory_is_kept_for_the_next_sleep_and_given_back_on_request():
    memory = PausableMemory()
    with memory.region("parameters"):
        model = nn.Linear(1024, 1024)
    expected = whole(model)
    memory.sleep()
    memory.free_host_memory()  # none: the copy is in use
    assert memory.status()["parameters"].host_bytes > 0.9 * model.weight.nbytes
    memory.wake()
    same(whole(model), expected)
    held = memory._manager.arena.held_bytes
    assert held > 0.9 * model.weight.nbytes
    memory.sleep()
    memory.wake()
    assert memory._manager.arena.held_bytes == held
    memory.free_host_memory()
    assert memory._manager.arena.held_bytes == memory.status()["parameters"].host_bytes == 0
    memory.sleep()
    memory.wake()
    same(whole(model), expected)


def test_what_a_region_makes_belongs_to_its_tag():
    memory = PausableMemory()
    with memory.region("mine"):
        mine = torch.full((WIDTH * WIDTH,), 3.0)
    other = torch.full((WIDTH * WIDTH,), 4.0)
    memory.sleep(["mine"])
    assert reads_zero(mine) and not reads_zero(other)
    with (
        pytest.raises(StateConflictError, match=r"the tag mine is asleep: wake\(\['mine'\]\) first"),
        memory.region("mine"),
    ):
        pass
    with pytest.raises(StateConflictError):
        memory.adopt([other], tag="mine")
    memory.wake()
    assert mine.eq(3).all()


def test_tensors_keep_the_tag_that_they_have():
    memory = PausableMemory()
    with memory.region("reference"):
        model = Tied(width=WIDTH)
    memory.adopt(model)
    assert memory.status()["parameters"].bytes == 0
    memory.adopt(model, tag="late")
    assert memory.status()["late"].bytes == 0


def test_tags_sleep_and_wake_alone():
    model = Tied(width=WIDTH)
    optimizer = adamw(model)
    memory = PausableMemory(model, optimizer)
    train(model, optimizer)
    moments = tensors_in(optimizer)
    assert not reads_zero(moments[1])
    memory.sleep(["optimizer"])
    assert any(reads_zero(t) for t in moments) and not reads_zero(model.blocks[0].up.weight)
    memory.sleep("parameters")
    memory.wake(["optimizer"])
    assert states(memory) == {"gradients": "resident", "parameters": "preserved", "optimizer": "resident"}
    memory.close()
    assert set(states(memory).values()) == {"resident"}


def test_a_second_call_does_nothing():
    model = Tied(width=WIDTH)
    expected = whole(model)
    memory = PausableMemory(model)
    assert memory.wake().changes == []
    assert memory.sleep().changes != []
    assert memory.sleep() == memory.sleep(["parameters"])
    assert memory.sleep().changes == [] and memory.sleep().seconds == {}
    assert memory.wake().changes != [] and memory.wake().changes == []
    same(whole(model), expected)


# -- the state of optimisers --------------------------------------------------------------------------------------


def test_the_state_of_the_first_step_is_adopted_at_its_end():
    model = Tied(width=WIDTH)
    optimizer = adamw(model)
    memory = PausableMemory(model, optimizer)
    assert memory.status()["optimizer"].bytes == 0
    train(model, optimizer)
    large = [tensor for tensor in tensors_in(optimizer) if tensor.numel() > 1]
    assert memory.status()["optimizer"].bytes > 0.8 * sum(tensor.nbytes for tensor in large)
    memory.sleep()
    assert not optimizer._optimizer_step_post_hooks
    memory.wake()
    twin = copy.deepcopy(optimizer)
    assert type(twin) is type(optimizer)


def test_an_optimiser_that_has_not_stepped_can_be_copied_and_does_not_keep_the_memory():
    model = Tied(width=WIDTH)
    optimizer = adamw(model)
    memory = PausableMemory(optimizer)
    copy.deepcopy(optimizer)
    gone = weakref.ref(memory)
    del memory
    gc.collect()
    assert gone() is None
    train(model, optimizer)


def test_the_hooks_of_others_run_beside_the_adoption():
    model = Tied(width=WIDTH)
    optimizer = adamw(model)
    memory = PausableMemory(model, optimizer)
    memory.adopt(optimizer)
    assert len(optimizer._optimizer_step_post_hooks) == 1
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(memory.status()["optimizer"].bytes))
    train(model, optimizer)
    train(model, optimizer)
    assert len(steps) == 2 and steps[0] == steps[1] > 0
    memory.adopt(model)
    assert len(optimizer._optimizer_step_post_hooks) == 1


def test_a_step_succeeds_although_its_state_cannot_be_adopted(monkeypatch, caplog):
    model = Tied(width=WIDTH)
    optimizer = adamw(model)
    memory = PausableMemory(model, optimizer)
    calls = []

    def refuse(tag, tensors):
        calls.append(tag)
        raise DeviceMemoryError("no room")

    monkeypatch.setattr(memory._allocator, "adopt", refuse)
    train(model, optimizer)
    train(model, optimizer)
    assert calls == ["optimizer"] and "the next sleep tries again: no room" in caplog.text
    monkeypatch.undo()
    memory.sleep()
    assert any(reads_zero(tensor) for tensor in tensors_in(optimizer) if tensor.numel() > WIDTH)


def test_a_step_whose_state_is_left_in_host_memory_says_so(monkeypatch):
    """The next step would read state that is not there."""
    model = Tied(width=WIDTH)
    optimizer = adamw(model)
    memory = PausableMemory(model, optimizer)

    def refuse(tag, tensors):
        raise DeviceMemoryError("taken by others", in_host_memory_bytes=100)

    monkeypatch.setattr(memory._allocator, "adopt", refuse)
    with pytest.raises(DeviceMemoryError, match="taken by others"):
        train(model, optimizer)


def test_state_that_replaces_adopted_state_is_adopted_by_the_next_sleep():
    model = Tied(width=WIDTH)
    optimizer = adamw(model)
    memory = PausableMemory(model, optimizer)
    train(model, optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    expected = [tensor.clone() for tensor in tensors_in(optimizer)]
    memory.sleep()
    assert any(reads_zero(tensor) for tensor in tensors_in(optimizer) if tensor.numel() > WIDTH)
    memory.wake()
    assert all(torch.equal(*pair) for pair in zip(tensors_in(optimizer), expected, strict=True))


class EightBit(torch.optim.Optimizer):
    """Momentum in int8 with a scale, in the two ways of quantised optimisers: plain tensors, or one subclass."""

    def __init__(self, parameters, wrapped):
        super().__init__(parameters, {})
        self._wrapped = wrapped

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                scale = parameter.grad.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
                codes = (parameter.grad / scale).round().to(torch.int8)
                state = {"step": 1, "codes": codes.view(torch.uint8), "nested": [{"scale": scale}]}
                self.state[parameter] = {"moment": Scaled(codes, scale)} if self._wrapped else state


@pytest.mark.parametrize("wrapped", [False, True])
def test_quantised_states_are_adopted(wrapped):
    model = nn.Linear(512, 512)
    optimizer = EightBit(model.parameters(), wrapped)
    memory = PausableMemory(model, optimizer)
    model(torch.randn(4, 512)).sum().backward()
    optimizer.step()
    state = optimizer.state[model.weight]
    parts = (
        [state["moment"].values_, state["moment"].scale] if wrapped else [state["codes"], state["nested"][0]["scale"]]
    )
    assert parts[0].nbytes == 512 * 512
    expected = [part.clone() for part in parts]
    assert memory.status()["optimizer"].bytes > 0.9 * parts[0].nbytes
    memory.sleep()
    assert not parts[0].flatten()[PAGE : 2 * PAGE].any()
    memory.wake()
    assert all(torch.equal(*pair) for pair in zip(parts, expected, strict=True))


# -- what is dropped ----------------------------------------------------------------------------------------------


def test_a_sleep_looks_at_no_storage_that_has_a_tag(monkeypatch):
    """There are thousands, and the copies have not begun yet."""
    model = Tied(width=WIDTH)
    optimizer = adamw(model)
    memory = PausableMemory(model, optimizer)
    train(model, optimizer)
    looked = []
    look = torch.Tensor.untyped_storage
    monkeypatch.setattr(torch.Tensor, "untyped_storage", lambda tensor: (looked.append(tensor), look(tensor))[1])
    memory.prepare_sleep()
    assert looked == []
    memory.abort()
    model.norm.weight.data = torch.ones(WIDTH)
    memory.prepare_sleep()
    assert len({id(tensor) for tensor in looked}) == 1
    memory.abort()


def test_gradients_are_set_to_none_by_a_sleep():
    model = Tied(width=WIDTH)
    memory = PausableMemory(model)
    model(TOKENS).sum().backward()
    memory.sleep(["parameters"])
    assert model.norm.weight.grad is not None
    memory.sleep(["gradients"])
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("made", ["in the region", "as a list"])
def test_flat_gradients_keep_their_address_and_come_back_as_zeros(made):
    model = nn.Linear(512, 511)
    memory = PausableMemory(model)
    if made == "in the region":
        with memory.region("gradients"):
            flat = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
    else:
        flat = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
        memory.adopt([flat], tag="gradients")
    start = 0
    for parameter in model.parameters():
        parameter.grad = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    addresses = [parameter.grad.data_ptr() for parameter in model.parameters()]
    for _ in range(2):
        model(torch.ones(1, 512)).sum().backward()
        assert flat.all()
        slept = memory.sleep()
        assert {change.tag: change.bytes_copied for change in slept.changes}["gradients"] == 0
        memory.wake()
        assert not flat.any()  # to its first and last byte
        assert [parameter.grad.data_ptr() for parameter in model.parameters()] == addresses


def test_gradients_that_are_not_dropped_are_preserved():
    model = Tied(width=WIDTH)
    memory = PausableMemory(model, dropped=())
    model(TOKENS).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    expected = [gradient.clone() for gradient in gradients]
    memory.sleep()
    assert any(reads_zero(gradient) for gradient in gradients if gradient.numel() > WIDTH)
    memory.wake()
    assert all(parameter.grad is gradient for parameter, gradient in zip(model.parameters(), gradients, strict=True))
    assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))


def test_own_tags_can_be_dropped():
    memory = PausableMemory(dropped=("scratch",))
    with memory.region("scratch"):
        scratch = torch.ones(WIDTH * WIDTH)
    address = scratch.data_ptr()
    memory.sleep()
    assert memory.status()["scratch"].host_bytes == 0
    memory.wake()
    assert scratch.data_ptr() == address and not scratch.any()


# -- copies that are still good -----------------------------------------------------------------------------------


def copied(report):
    return {change.tag: change.bytes_copied for change in report.changes}


def test_a_reference_policy_is_copied_once():
    policy, reference = Tied(width=WIDTH), Tied(width=WIDTH, seed=1).requires_grad_(False)
    memory = PausableMemory(policy)
    memory.adopt(reference, tag="reference")
    expected = whole(reference)
    first = copied(memory.sleep())
    assert first["reference"] > 0.8 * sum(tensor.nbytes for tensor in expected.values())
    memory.wake()
    again = copied(memory.sleep())
    assert again["reference"] == 0 and again["parameters"] == first["parameters"]
    memory.wake()
    same(whole(reference), expected)
    with torch.no_grad():
        reference.blocks[0].up.weight[300, 3] += 1  # not on the first page, which never leaves
    expected = whole(reference)
    assert copied(memory.sleep())["reference"] == first["reference"]
    memory.wake()
    same(whole(reference), expected)


def test_of_a_model_with_an_adapter_the_base_is_copied_once():
    model = nn.Sequential(nn.Linear(512, 512, bias=False).requires_grad_(False), nn.Linear(512, 16, bias=False))
    memory = PausableMemory(model)
    first = copied(memory.sleep())["parameters"]
    memory.wake()
    with torch.no_grad():
        model[1].weight += 1
    expected = whole(model)
    again = copied(memory.sleep())["parameters"]
    assert first > model[0].weight.nbytes - 2 * PAGE and 0 < again <= model[1].weight.nbytes
    memory.wake()
    same(whole(model), expected)


def test_a_tag_named_frozen_is_copied_once():
    memory = PausableMemory(frozen=("base",))
    with memory.region("base"):
        base = torch.ones(WIDTH * WIDTH)
    assert copied(memory.sleep(["base"]))["base"] > 0
    memory.wake()
    assert copied(memory.sleep(["base"]))["base"] == 0
    memory.wake()
    assert base.eq(1).all()


# -- failures -----------------------------------------------------------------------------------------------------


def starve(monkeypatch, memory, margin=1 << 60):
    monkeypatch.setattr(memory._allocator, "_margin_bytes", margin)


def test_out_of_memory_at_a_wake_leaves_all_asleep(monkeypatch):
    model = Tied(width=WIDTH)
    optimizer = adamw(model)
    memory = PausableMemory(model, optimizer)
    train(model, optimizer)
    expected, moments = whole(model), [tensor.clone() for tensor in tensors_in(optimizer)]
    memory.sleep()
    asleep = states(memory)
    starve(monkeypatch, memory)
    for _ in range(2):
        with pytest.raises(DeviceMemoryError, match="still sleep; free device memory and call wake again") as caught:
            memory.wake()
        assert caught.value.details["tags"] == ["gradients", "parameters", "optimizer"]
        assert caught.value.details["needed_bytes"] > 0
        assert states(memory) == asleep and reads_zero(model.blocks[0].up.weight)
    starve(monkeypatch, memory, 0)
    memory.wake()
    same(whole(model), expected)
    assert all(torch.equal(*pair) for pair in zip(tensors_in(optimizer), moments, strict=True))


def test_a_wake_tries_again_after_it_has_emptied_the_cache(monkeypatch):
    model = Tied(width=WIDTH)
    memory = PausableMemory(model)
    memory.sleep()
    starve(monkeypatch, memory)
    monkeypatch.setattr(memory._manager.device, "trim", lambda: starve(monkeypatch, memory, 0), raising=False)
    memory.wake()
    assert set(states(memory).values()) == {"resident"}


def test_too_little_host_memory_leaves_all_awake(monkeypatch):
    model = Tied(width=WIDTH)
    expected = whole(model)
    memory = PausableMemory(model)
    monkeypatch.setattr(arena, "free_host_bytes", lambda: 1 << 20)
    with pytest.raises(HostMemoryError):
        memory.sleep()
    assert set(states(memory).values()) == {"resident"}
    same(whole(model), expected)
    monkeypatch.undo()
    memory.sleep()
    memory.wake()
    same(whole(model), expected)


def test_a_bound_of_host_memory_holds():
    memory = PausableMemory(Tied(width=WIDTH), host_arena_max_bytes=4096)
    with pytest.raises(HostMemoryError, match="allowed by host_arena_max_bytes"):
        memory.sleep()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"host_arena_max_bytes": "1GiB"}, "host_arena_max_bytes"),
        ({"host_memory_margin_bytes": 1.5e9}, "host_memory_margin_bytes"),
        ({"device_memory_margin_bytes": -1}, "device_memory_margin_bytes"),
        ({"allocator": "vm"}, "allocator"),
        ({"prepare_host_memory": "always"}, "prepare_host_memory"),
    ],
)
def test_an_option_with_a_value_that_it_cannot_have_is_refused_at_once(options, says):
    with pytest.raises(InvalidRequestError, match=says):
        PausableMemory(Tied(width=WIDTH), **options)


def test_injected_faults_are_typed(tmp_path):
    memory = PausableMemory(Tied(width=WIDTH), fault_dir=str(tmp_path))
    (tmp_path / "release.0").touch()
    with pytest.raises(RLMemoryError, match="injected failure of release"):
        memory.sleep(["parameters"])
    assert set(states(memory).values()) == {"resident"}


def test_unknown_tags_are_named():
    memory = PausableMemory()
    for call in (memory.sleep, memory.wake, lambda tags: memory.part(*tags)):
        with pytest.raises(
            InvalidRequestError, match=r"\['weights'\] are unknown: use some of gradients, parameters"
        ) as caught:
            call(["weights"])
        assert caught.value.details["allowed"] == ["gradients", "parameters", "optimizer"]
    with pytest.raises(InvalidRequestError):
        memory.sleep([])
    with pytest.raises(InvalidRequestError), memory.region(""):
        pass
    for tags in (5, [None, 3, "x"], [["parameters"]]):
        with pytest.raises(InvalidRequestError):
            memory.sleep(tags)
    with pytest.raises(InvalidRequestError):
        memory.adopt([torch.ones(1)], tag=["mine"])


@pytest.mark.parametrize("option", ["dropped", "frozen"])
def test_one_name_may_stand_for_a_list_of_one(option):
    assert list(PausableMemory(**{option: "base"}).status()) == ["gradients", "parameters", "optimizer", "base"]
    with pytest.raises(InvalidRequestError, match=f"{option} is a name or several, not 5"):
        PausableMemory(**{option: 5})


def test_a_memory_can_be_made_while_another_thread_looks_at_all():
    made = [PausableMemory()]
    for _ in sleepers:
        made += [PausableMemory() for _ in range(100 - len(made))]
    assert set(sleepers) >= set(made)
    made.pop().close()
    del made[50:]
    gc.collect()
    assert set(sleepers) >= set(made)


def test_a_tag_can_be_added_while_another_thread_asks_for_the_status(monkeypatch):
    memory = PausableMemory()
    blocks, added = memory._allocator.blocks, iter(range(100))

    def late(tag):
        memory._manager.add_tag(f"late {next(added)}")
        return blocks(tag)

    monkeypatch.setattr(memory._allocator, "blocks", late)
    assert set(memory.status()) == {"gradients", "parameters", "optimizer"}


@pytest.mark.parametrize("frozen", [False, True])
def test_a_lazy_module_is_adopted_once_it_has_its_parameters(frozen):
    model = nn.LazyLinear(1 << 10)
    for parameter in model.parameters():
        parameter.requires_grad = not frozen
    memory = PausableMemory(model)
    memory.sleep()
    memory.wake()
    model(torch.ones(1, 64))
    expected = whole(model)
    assert memory.sleep(["parameters"]).changes[0].bytes_released > 0
    memory.wake()
    same(whole(model), expected)


def test_what_cannot_be_adopted_is_refused():
    memory = PausableMemory()
    with pytest.raises(InvalidRequestError, match="need a tag"):
        memory.adopt([torch.ones(1)])
    with pytest.raises(InvalidRequestError, match="this int cannot be moved"):
        memory.adopt(3)
    with pytest.raises(UnsupportedError, match="a Hidden cannot be adopted"):
        memory.adopt([Hidden(torch.ones(2), torch.ones(2))], tag="mine")
    with pytest.raises(UnsupportedError, match="cannot be moved: it has no storage"):
        memory.adopt([torch.ones(2, 2).to_mkldnn()], tag="mine")
    assert memory.sleep().changes  # nothing is left of the target that was refused
    memory = PausableMemory()
    memory.adopt([torch.ones(1, device="meta")], tag="mine")
    assert memory.sleep(["mine"]).changes[0].bytes_released == 0


def test_a_prepared_sleep_or_wake_can_be_undone():
    model = Tied(width=WIDTH)
    expected = whole(model)
    model(TOKENS).sum().backward()
    memory = PausableMemory(model)
    memory.abort()
    with pytest.raises(StateConflictError, match="no sleep or wake is prepared"):
        memory.commit()
    memory.prepare_sleep()
    with pytest.raises(StateConflictError, match="call commit or abort first"):
        memory.prepare_wake()
    memory.abort()
    assert set(states(memory).values()) == {"resident"} and model.norm.weight.grad is not None
    same(whole(model), expected)
    memory.prepare_sleep()
    assert memory.commit().changes
    memory.prepare_wake(["parameters"])
    memory.abort()
    assert states(memory)["parameters"] == "preserved" and reads_zero(model.blocks[0].up.weight)
    memory.prepare_wake()
    memory.commit()
    same(whole(model), expected)


def test_nothing_gets_a_tag_between_the_phases_of_a_sleep():
    model = Tied(width=WIDTH)
    optimizer = adamw(model)
    memory = PausableMemory(model, optimizer)
    memory.prepare_sleep()
    with pytest.raises(StateConflictError, match="call commit or abort first"):
        memory.adopt(Tied(width=WIDTH))
    with pytest.raises(StateConflictError, match="call commit or abort first"), memory.region("parameters"):
        pass
    train(model, optimizer)  # its state is adopted later
    assert memory.status()["optimizer"].bytes == 0
    expected, moments = whole(model), [tensor.clone() for tensor in tensors_in(optimizer)]
    memory.commit()
    memory.wake()
    same(whole(model), expected)
    assert all(torch.equal(*pair) for pair in zip(tensors_in(optimizer), moments, strict=True))
    memory.sleep()
    assert any(reads_zero(tensor) for tensor in tensors_in(optimizer) if tensor.numel() > WIDTH)


def test_a_sleep_is_refused_while_a_region_of_its_tag_is_open():
    memory = PausableMemory()
    with memory.region("mine"):
        mine = torch.ones(WIDTH * WIDTH)
        memory.sleep(["parameters"])
        with pytest.raises(StateConflictError, match="regions of mine are open"):
            memory.sleep(["mine"])
    memory.sleep()
    memory.wake()
    assert mine.eq(1).all()


def test_memory_that_a_tag_has_got_after_the_preparation_is_not_released():
    memory = PausableMemory()
    with memory.region("mine"):
        first = torch.ones(WIDTH * WIDTH)
    memory.prepare_sleep()
    second = torch.ones(WIDTH * WIDTH)
    memory._allocator.adopt("mine", [second])
    with pytest.raises(StateConflictError, match="the tag mine has got memory since its sleep was prepared"):
        memory.commit()
    assert first.eq(1).all() and second.eq(1).all() and states(memory)["mine"] == "resident"
    memory.sleep()
    memory.wake()
    assert first.eq(1).all() and second.eq(1).all()


def test_a_frozen_tensor_that_ends_between_the_phases_is_not_read():
    """Its pages have gone: to read them ends the process."""
    memory = PausableMemory(frozen=("base",))
    base = [torch.ones(1 << 24), torch.ones(WIDTH * WIDTH)]
    memory.adopt(base, tag="base")
    memory.sleep()
    memory.wake()
    memory.prepare_sleep()
    del base[0]
    memory.commit()
    memory.wake()
    assert (base[0] == 1).all()
    memory.close()


def test_frozen_tensors_that_are_written_after_the_preparation_keep_what_was_written():
    memory = PausableMemory(frozen=("base",))
    with memory.region("base"):
        base = torch.ones(WIDTH * WIDTH)
    memory.sleep()
    memory.wake()
    memory.prepare_sleep()
    base.fill_(2)
    memory.commit()
    memory.wake()
    assert base.eq(2).all()


def test_an_error_while_gradients_are_dropped_leaves_the_memory_usable(monkeypatch):
    model = Tied(width=WIDTH)
    expected = whole(model)
    memory = PausableMemory(model)

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(memory._targets, "drop_gradients", fail)
    with pytest.raises(KeyboardInterrupt):
        memory.sleep()
    monkeypatch.undo()
    assert set(states(memory).values()) == {"resident"}
    memory.sleep()
    memory.wake()
    same(whole(model), expected)


def test_gradients_are_dropped_by_each_sleep_that_names_them():
    model = Tied(width=WIDTH)
    memory = PausableMemory(model)
    memory.sleep()
    memory.wake(["parameters", "optimizer"])
    model(TOKENS).sum().backward()
    memory.sleep(["parameters"])
    memory.wake(["parameters"])
    assert model.norm.weight.grad is not None
    memory.sleep()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_target_for_a_sleeping_tag_is_refused():
    memory = PausableMemory(Tied(width=WIDTH))
    memory.sleep(["parameters"])
    with pytest.raises(StateConflictError, match="the tag parameters is asleep"):
        memory.adopt(nn.Linear(8, 8))
    memory.adopt(adamw(nn.Linear(8, 8)))


@pytest.mark.parametrize("asleep", [False, True])
def test_tensors_belong_to_one_memory(asleep):
    model = Tied(width=WIDTH)
    expected = whole(model)
    memory = PausableMemory(model)
    if asleep:
        memory.sleep()
    with pytest.raises(StateConflictError, match="another PausableMemory: close that memory first"):
        PausableMemory(model)
    with pytest.raises(StateConflictError, match="belongs to a PausableMemory"):
        Offloader(model, moves=lambda tensor: True).offload()
    memory.close()
    other = PausableMemory(model)
    other.sleep()
    other.wake()
    same(whole(model), expected)
    with pytest.raises(StateConflictError, match="is closed"):
        memory.sleep()


def test_regions_of_two_memories_may_be_nested():
    outer, inner = PausableMemory(), PausableMemory()
    with outer.region("a"), inner.region("b"):
        tensor = torch.full((WIDTH * WIDTH,), 7.0)
    for memory in (outer, inner):
        memory.sleep()
    for memory in (outer, inner):
        memory.wake()
    assert tensor.eq(7).all()


def test_a_closed_memory_keeps_no_target():
    model = Tied(width=WIDTH)
    optimizer = adamw(model)
    memory = PausableMemory(model, optimizer)
    train(model, optimizer)
    memory.close()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    with pytest.raises(StateConflictError, match="is closed"):
        memory.adopt(model)


# -- sharded modules ----------------------------------------------------------------------------------------------


def addresses_of(optimizer):
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [part.data_ptr() for tensor in [*parameters, *tensors_in(optimizer)] for part in plain_parts(tensor)]


def cycles_of_fsdp(rank, make, *arguments):
    """Losses of an undisturbed FSDP model, and of the same model that sleeps between the steps."""
    losses = []
    for disturbed in (False, True):
        model, _ = make(*arguments)
        optimizer = adamw(model)
        memory = PausableMemory(model, optimizer) if disturbed else None
        found = [train(model, optimizer)]
        for _ in range(3):
            if memory is not None:
                before = addresses_of(optimizer)
                slept = memory.sleep()
                assert sum(change.bytes_released for change in slept.changes) > 500_000
                assert {change.tag for change in slept.changes if change.bytes_released} == {"parameters", "optimizer"}
                memory.wake()
                assert addresses_of(optimizer) == before
            found.append(train(model, optimizer))
        losses.append(found)
    return losses


@pytest.mark.parametrize(("make", "arguments"), [(fsdp2, ()), (fsdp1, (False,)), (fsdp1, (True,))], ids=str)
def test_sharded_modules_go_on_bit_by_bit(pair, make, arguments):
    for undisturbed, slept in pair.run(cycles_of_fsdp, make, *arguments, *(3, WIDTH)):
        assert undisturbed == slept and len(set(slept)) == 4


def flat_gradients_after_a_sleep(rank):
    model, _ = fsdp1(True, 3, WIDTH)
    memory = PausableMemory(model)
    model(TOKENS).square().mean().backward()
    handles = [child._handle for child in model.modules() if getattr(child, "_handle", None) is not None]

    def gradients():
        return [getattr(handle.flat_param, name, None) for handle in handles for name in ("grad", "_saved_grad_shard")]

    before = any(gradient is not None for gradient in gradients())
    memory.sleep()
    return before, all(gradient is None for gradient in gradients())


def test_flat_gradients_of_fsdp_are_dropped(pair):
    assert pair.run(flat_gradients_after_a_sleep) == [(True, True)] * 2


# -- the handoff --------------------------------------------------------------------------------------------------


class Paged(nn.Module):
    """The toy engine's checkpoint as views of one flat buffer, each on pages of its own, and a wide layer."""

    def __init__(self):
        super().__init__()
        tensors = checkpoint(6)
        room = 4 * PAGE
        self.flat = torch.zeros(room * len(tensors), dtype=torch.uint8)
        self.sent = {}
        for number, (name, tensor) in enumerate(tensors.items()):
            part = self.flat[(number + 1) * room - 3 * PAGE :][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            part.copy_(tensor)
            self.sent[name] = nn.Parameter(part)
            self.register_parameter(name.replace(".", "_"), self.sent[name])
        torch.manual_seed(0)
        self.wide = nn.Linear(256, 256)

    def forward(self):
        return self.wide(torch.ones(256)).square().mean() + sum(p.float().square().mean() for p in self.sent.values())


def learn(model, optimizer):
    loss = model()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


@pytest.mark.parametrize("from_host", [False, True])
def test_a_handoff_takes_parts_and_the_losses_stay_the_same(from_host):
    undisturbed = Paged()
    optimizer = adamw(undisturbed)
    expected = [learn(undisturbed, optimizer) for _ in range(4)]

    model = Paged()
    optimizer = adamw(model)
    memory = PausableMemory(model, optimizer)
    engine = ToyEngine()
    handoff = RolloutHandoff(
        engine,
        ModelSource({name: parameter.detach() for name, parameter in model.sent.items()}),
        weights=[memory.part("parameters")],
        others=[memory.part("gradients", "optimizer")],
        from_host=from_host,
        bucket_bytes=256,
    )
    losses = []
    for step in range(4):
        with handoff.training(str(step)) as report:
            assert set(states(memory).values()) == {"resident"}
            losses.append(learn(model, optimizer))
            sent = {name: parameter.detach().clone() for name, parameter in model.sent.items()}
        assert set(states(memory).values()) == {"preserved", "discarded"} and engine.open
        assert model.flat[PAGE:-PAGE].count_nonzero() == 0
        assert report.moved_bytes["offload"] > 0 and report.moved_bytes["offload_others"] > 0
        assert step == 0 or report.moved_bytes["load"] > 0
        engine.ranks[0].model.assert_unchanged(loaded(sent))
    assert losses == expected


def handoff_of_two(rank, step):
    """What a handoff leaves if the memory of process 1 does not suffice for `step`, and after another try."""
    torch.manual_seed(0)
    model = nn.Linear(512, 512)
    optimizer = adamw(model)
    memory = PausableMemory(model, optimizer)
    model(torch.ones(1, 512)).sum().backward()
    optimizer.step()
    expected = whole(model)
    handoff = RolloutHandoff(
        [], {}, weights=[memory.part("parameters")], others=[memory.part("gradients", "optimizer")]
    )
    asleep = step == "load"
    if asleep:
        memory.sleep()
    before = states(memory)
    allocator, arena = memory._allocator, memory._manager.arena
    if rank == 1:
        allocator._margin_bytes, arena._margin_bytes = 1 << 60, 1 << 60
    found = ""
    try:
        handoff._parts.move(HandoffReport(), step, [*handoff._parts.weights, *handoff._parts.others])
    except RLMemoryError as error:
        found = type(error).__name__
    unchanged = states(memory) == before
    allocator._margin_bytes, arena._margin_bytes = 0, 0
    handoff._parts.move(HandoffReport(), step, [*handoff._parts.weights, *handoff._parts.others])
    memory.wake()
    return found, unchanged, states(memory)["optimizer"], same(whole(model), expected)


@pytest.mark.parametrize(("step", "error"), [("load", "DeviceMemoryError"), ("offload_others", "HostMemoryError")])
def test_all_processes_move_or_none(pair, step, error):
    assert pair.run(handoff_of_two, step) == [(error, True, "resident", True)] * 2


def test_a_part_counts_what_it_moves_and_what_torch_holds(monkeypatch):
    memory = PausableMemory(Tied(width=WIDTH))
    part = memory.part("parameters")
    total = memory.status()["parameters"].bytes
    assert part.load() == Moved()
    moved = part.offload()
    assert moved.bytes == total and moved.seconds > 0
    assert part.offload() == Moved()
    assert part.resident_bytes(memory.device) == total and part.resident_bytes(torch.device("cuda", 0)) == 0
    assert part.load().bytes == total


def test_a_handoff_that_cannot_load_can_be_called_again(monkeypatch):
    model = Paged()
    optimizer = adamw(model)
    memory = PausableMemory(model, optimizer)
    handoff = RolloutHandoff(
        ToyEngine(),
        {name: parameter.detach() for name, parameter in model.sent.items()},
        weights=[memory.part("parameters")],
        others=[memory.part("optimizer", "gradients")],
        bucket_bytes=256,
    )
    handoff.sync()
    starve(monkeypatch, memory)
    with pytest.raises(DeviceMemoryError) as caught:
        handoff.release()
    assert caught.value.details["step"] == "load"
    starve(monkeypatch, memory, 0)
    with handoff.training():
        learn(model, optimizer)


class Large(nn.Module):
    """Weights of many pages, and an engine's loader for them."""

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name in "abcd":
            setattr(self, name, nn.Parameter(torch.randn(256, PAGE, generator=generator), requires_grad=False))

    def load_weights(self, weights):
        for name, tensor in weights:
            getattr(self, name).data.copy_(tensor)


def test_what_falls_asleep_in_the_middle_of_an_update_is_sent_from_where_it_is_then(monkeypatch):
    """Tensors that exist when the update begins are looked for again when their turn comes."""
    rank, model = Rank(Large(1)), Large(2)
    sent = {name: parameter.clone() for name, parameter in model.named_parameters()}
    memory, packed, pack = PausableMemory(model), [], Packing.pack

    def sleeping(self, slot, entries):
        packed.append(slot)
        if len(packed) == 2:
            memory.sleep()
        return pack(self, slot, entries)

    monkeypatch.setattr(Packing, "pack", sleeping)
    with WeightSender(1, bucket_bytes=model.a.nbytes, timeout_s=10, transport="shm") as sender:
        thread = Receiving(rank, sender)
        sender.send(ModelSource(model))
    assert thread.join().error is None and len(packed) == 4
    assert reads_zero(model.a)
    for name, parameter in rank.model.named_parameters():
        assert torch.equal(parameter, sent[name]), name
