"""Moving tensors to host memory and back. `everything` makes a CPU's tensors move as a GPU's do."""

import gc
import itertools
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from models import Tied, same, whole
from torch import nn

from rl_memory_plugins.errors import DeviceMemoryError, HostMemoryError, InvalidRequestError, UnsupportedError
from rl_memory_plugins.memory import adoption, arena
from rl_memory_plugins.memory.arena import PagedArena
from rl_memory_plugins.memory.emptied import host_copies
from rl_memory_plugins.memory.host_memory import whole_pages
from rl_memory_plugins.memory.pinned import PinnedArena
from rl_memory_plugins.memory.preparation import SLEEP
from rl_memory_plugins.trainer import Moved, Offloader, held_tensors, load, offload, offloading
from rl_memory_plugins.trainer.offloading import _HostMemory, host_view, temporarily_loaded
from rl_memory_plugins.trainer.parts import TrainerParts
from rl_memory_plugins.trainer.peers import Peers


def everything(tensor):
    return True


def storage_bytes(*tensors):
    return [tensor.untyped_storage().nbytes() for tensor in tensors]


def places(*offloaders):
    return {host_copies[storage].buffer.address for one in offloaders for storage in one._storages}


def train(model, optimizer):
    model(torch.tensor([[1, 2]])).sum().backward()
    optimizer.step()


def test_a_module_comes_back_as_it_was():
    model = Tied()
    expected = whole(model)
    total = sum(tensor.nbytes for tensor in expected.values())
    offloader = Offloader(model, moves=everything)
    parameters = list(model.parameters())
    for _ in range(3):
        moved = offloader.offload()
        assert moved.bytes == total == offloader.offloaded_bytes and moved.seconds > 0
        assert set(storage_bytes(*model.parameters(), *model.buffers())) == {0}
        moved = offloader.load()
        assert moved.bytes == total and moved.seconds > 0 and offloader.offloaded_bytes == 0
        same(whole(model), expected)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert model.head.weight is model.embed.weight


def test_a_load_makes_room_for_each_group_and_does_without(monkeypatch):
    model = Tied()
    expected = whole(model)
    rooms = []

    def make_room(sizes, device):
        rooms.append(sum(sizes))
        if len(rooms) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(adoption, "GROUP_BYTES", 2000)
    monkeypatch.setattr(offloading, "make_room", make_room)
    offloader = Offloader(model, moves=everything)
    total = offloader.offload().bytes
    assert offloader.load().bytes == total == sum(rooms)
    assert len(rooms) > 2 and max(rooms) <= 2000
    same(whole(model), expected)


def test_what_does_not_move_takes_no_time():
    offloader = Offloader(Tied(), moves=everything)
    assert offloader.load() == Moved(0, 0.0)
    offloader.offload()
    assert offloader.offload() == Moved(0, 0.0)
    offloader.load()
    assert offloader.load() == Moved(0, 0.0)


def test_tensors_in_host_memory_stay_by_default():
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    assert Offloader(model, optimizer).offload() == Moved(0, 0.0)
    assert 0 not in storage_bytes(*model.parameters())


def test_host_memory_is_made_once_and_reused():
    offloader = Offloader(Tied(), moves=everything)
    offloader.offload()
    held = offloader._host.arena.held_bytes
    first = places(offloader)
    for _ in range(3):
        offloader.load()
        offloader.offload()
        assert offloader._host.arena.held_bytes == held
        assert places(offloader) == first


def test_gradients_and_state_made_since_move_too():
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    twin = Tied()
    twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=0.1)
    offloader = Offloader(model, optimizer, moves=everything)
    sizes = []
    for _ in range(3):
        train(model, optimizer)
        train(twin, twin_optimizer)
        sizes.append(offloader.offload().bytes)
        grads = [parameter.grad for parameter in model.parameters()]
        moments = [state["exp_avg"] for state in optimizer.state.values()]
        assert set(storage_bytes(*grads, *moments)) == {0}
        offloader.load()
        same(whole(model), whole(twin))
    assert sizes[0] == sizes[1] > 3.9 * sum(parameter.nbytes for parameter in model.parameters())


def test_what_appears_while_the_rest_is_away_joins_it():
    model = Tied()
    expected = whole(model)
    offloader = Offloader(model, moves=everything)
    offloader.offload()
    model.extra = nn.Parameter(torch.ones(5))
    assert offloader.offload().bytes == 20
    assert offloader.load().bytes == 20 + sum(tensor.nbytes for tensor in expected.values())
    same(whole(model), {**expected, "extra": torch.ones(5)})


def test_lazy_views_are_read_as_they_are():
    """Their bytes are those of before the conjugation or negation."""
    tensor = torch.randn(100, dtype=torch.complex64)
    views = [tensor.conj(), tensor.conj().imag, tensor.conj().imag[::2]]
    expected = [view.clone() for view in views]
    Offloader(tensor, moves=everything).offload()
    assert all(torch.equal(host_view(view), content) for view, content in zip(views, expected, strict=True))


def test_views_of_one_storage_move_as_one():
    buffer = torch.arange(100.0)
    views = {"a": buffer[:40].view(4, 10).t(), "b": buffer[40:80], "c": buffer[80:]}
    module = nn.Module()
    for name, view in views.items():
        module.register_parameter(name, nn.Parameter(view))
    offloader = Offloader(module, {"buffer": buffer}, moves=everything)
    assert offloader.offload().bytes == 400
    assert torch.equal(host_view(module.b.detach()), torch.arange(40.0, 80.0))
    assert torch.equal(host_view(module.a.detach()), torch.arange(40.0).view(4, 10).t())
    offloader.load()
    buffer[40] = -1
    assert module.b[0] == -1  # still the same storage


def test_no_host_memory_moves_nothing():
    model = Tied()
    expected = whole(model)
    offloader = Offloader(model, moves=everything)
    offloader._host = _HostMemory(PagedArena(max_bytes=4096))
    offloader._targets = (model, {"large": torch.zeros(10000)})
    with pytest.raises(HostMemoryError):
        offloader.offload()
    same(whole(model), expected)
    assert offloader.offloaded_bytes == 0
    offloader._host = None
    assert offloader.offload().bytes > 40000


def test_an_offload_leaves_host_memory_free(monkeypatch):
    model = Tied()
    expected = whole(model)
    offloader = Offloader(model, moves=everything)
    monkeypatch.setattr(arena, "free_host_bytes", lambda: offloading.HOST_MARGIN_BYTES + 4096)
    with pytest.raises(HostMemoryError) as error:
        offloader.offload()
    assert error.value.details["margin_bytes"] == offloading.HOST_MARGIN_BYTES
    same(whole(model), expected)
    monkeypatch.undo()
    assert offloader.offload().bytes > 4096


def test_what_is_loaded_while_it_is_borrowed_stays():
    tensor = torch.arange(100.0)
    offloader = Offloader([tensor], moves=everything)
    offloader.offload()
    with temporarily_loaded(tensor):
        offloader.load()
        tensor[0] = -1
    assert tensor.tolist() == [-1.0, *map(float, range(1, 100))]
    offloader.offload()
    with temporarily_loaded(tensor):
        assert tensor[0] == -1
    assert tensor.untyped_storage().nbytes() == 0


def test_no_device_memory_leaves_everything_in_host_memory(monkeypatch):
    model = Tied()
    expected = whole(model)
    offloader = Offloader(model, moves=everything)
    away = offloader.offload().bytes
    resize, calls = torch.UntypedStorage.resize_, []

    def full(storage, nbytes):
        calls.append(nbytes)
        if nbytes and len(calls) >= 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return resize(storage, nbytes)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", full)
    with pytest.raises(DeviceMemoryError) as caught:
        offloader.load()
    assert caught.value.details["needed_bytes"] == away == offloader.offloaded_bytes
    assert set(storage_bytes(*model.parameters())) == {0}
    monkeypatch.undo()
    offloader.load()
    same(whole(model), expected)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, SystemExit, RuntimeError("CUDA error")], ids=str)
def test_a_load_that_breaks_off_leaves_the_content_in_host_memory(monkeypatch, failure):
    """At every storage. Otherwise the next offload would take what has not arrived for the content."""
    bytes_of = offloading.bytes_of
    for at in itertools.count():
        model = Tied()
        expected = whole(model)
        offloader = Offloader(model, moves=everything)
        offloader.offload()
        calls = itertools.count()

        def breaks(storage, at=at, calls=calls):
            if next(calls) == at:
                storage.fill_(7)
                raise failure
            return bytes_of(storage)

        with monkeypatch.context() as patch:
            patch.setattr(offloading, "bytes_of", breaks)
            try:
                offloader.load()
            except BaseException as error:
                assert type(error) is (failure if isinstance(failure, type) else type(failure))
            else:
                break
        assert set(storage_bytes(*model.parameters())) == {0}
        offloader.offload()
        offloader.load()
        same(whole(model), expected)
    assert at > 1


def test_an_interrupted_offload_does_not_revert_what_is_trained_afterwards(monkeypatch):
    methods = [(type(host_copies), "update"), (weakref.WeakSet, "update"), (torch.UntypedStorage, "resize_")]
    for at in itertools.count():
        model, calls = Tied(), itertools.count()
        offloader = Offloader(model, moves=everything)

        def interrupted(method, at=at, calls=calls):
            def run(*arguments):
                method(*arguments)
                if next(calls) == at:
                    raise KeyboardInterrupt

            return run

        with monkeypatch.context() as patch:
            for owner, name in methods:
                patch.setattr(owner, name, interrupted(getattr(owner, name)))
            try:
                offloader.offload()
            except KeyboardInterrupt:
                pass
            else:
                break
        tensors = [*model.named_parameters(), *model.named_buffers()]
        present = {name: tensor.detach() for name, tensor in tensors if tensor.untyped_storage().nbytes()}
        for tensor in present.values():
            tensor.add_(1)
            assert host_view(tensor) is tensor
        expected = {**whole(Tied()), **{name: tensor.clone() for name, tensor in present.items()}}
        offloader.load()
        same(whole(model), expected)
        offloader.offload()
        offloader.load()
        same(whole(model), expected)
    assert at > 3


def test_an_interrupt_behind_a_load_leaves_each_tensor_here_or_there(monkeypatch):
    model = Tied()
    expected = whole(model)
    offloader = Offloader(model, moves=everything)
    offloader.offload()
    forget, calls = type(host_copies).__delitem__, itertools.count()

    def interrupted(copies, storage):
        forget(copies, storage)
        if next(calls) == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(host_copies), "__delitem__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            offloader.load()
    sizes = storage_bytes(*model.parameters())
    assert 0 in sizes and any(sizes)
    offloader.load()
    same(whole(model), expected)


def test_borrowed_tensors_are_there_for_a_moment():
    tensor = torch.arange(6.0)
    offloader = Offloader([tensor], moves=everything)
    with temporarily_loaded(tensor):
        pass
    assert storage_bytes(tensor) == [24]  # it was not away
    offloader.offload()
    with temporarily_loaded(tensor):
        assert torch.equal(tensor, torch.arange(6.0))
    assert storage_bytes(tensor) == [0]
    offloader.load()
    assert torch.equal(tensor, torch.arange(6.0))


def test_close_brings_all_back():
    model = Tied()
    expected = whole(model)
    offloader = Offloader(model, moves=everything)
    offloader.offload()
    offloader.close()
    same(whole(model), expected)
    assert offloader.offload().bytes > 0


def test_what_is_away_outlives_its_offloader_and_another_one_loads_it(arenas):
    model = Tied()
    expected = whole(model)
    first = Offloader(model, moves=everything)
    total = first.offload().bytes
    del first
    gc.collect()
    second = Offloader(model.embed, moves=everything)
    assert second.load().bytes == expected["embed.weight"].nbytes
    assert arenas[0].held_bytes > 0  # the rest lies there
    third = Offloader(model, moves=everything)
    assert third.offloaded_bytes == total - expected["embed.weight"].nbytes
    third.load()
    same(whole(model), expected)
    gc.collect()
    assert arenas[0].held_bytes == 0


def test_an_offloader_does_not_load_what_another_one_has_loaded():
    tensor = torch.arange(6.0)
    first, second = Offloader([tensor], moves=everything), Offloader([tensor], moves=everything)
    first.offload()
    assert second.load().bytes == 24 and first.offloaded_bytes == 0
    tensor += 1
    assert first.load() == Moved(0, 0.0)
    assert torch.equal(tensor, torch.arange(1.0, 7.0))


def test_host_memory_goes_with_what_was_away():
    kept, dropped = torch.ones(4), torch.ones(4)
    offloader = Offloader({"dropped": dropped}, moves=everything)
    offloader.offload()
    (place,) = places(offloader)
    offloader._targets = ({"kept": kept},)
    del dropped
    gc.collect()
    assert offloader.offloaded_bytes == 0
    offloader.offload()
    assert places(offloader) == {place}


def test_gradients_can_be_moved_apart():
    model = Tied()
    model(torch.tensor([[1, 2]])).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    before = [gradient.clone() for gradient in gradients]
    only, without = (Offloader(model, moves=everything, gradients=value) for value in (True, False))
    only.offload()
    assert set(storage_bytes(*gradients)) == {0} and 0 not in storage_bytes(*model.parameters())
    assert without.load() == Moved(0, 0.0)
    without.offload()
    assert set(storage_bytes(*model.parameters(), *model.buffers())) == {0}
    without.load()
    assert set(storage_bytes(*gradients)) == {0}
    only.load()
    assert all(torch.equal(*pair) for pair in zip(gradients, before, strict=True))


def test_the_device_is_done_before_the_first_copy(monkeypatch):
    tensor = torch.zeros(4)
    monkeypatch.setattr(offloading, "_synchronize", lambda storages: tensor.fill_(7))  # what another stream still does
    offloader = Offloader([tensor], moves=everything)
    offloader.offload()
    monkeypatch.undo()
    offloader.load()
    assert tensor.tolist() == [7] * 4


def test_the_functions_load_what_an_offloader_moved():
    model = Tied()
    expected = whole(model)
    Offloader(model, moves=everything).offload()
    assert load(model).bytes > 0
    same(whole(model), expected)


@pytest.fixture
def arenas(monkeypatch):
    """All that are made."""
    made = []

    def make(**options):
        made.append(PagedArena(**options))
        return made[-1]

    monkeypatch.setattr(offloading, "PagedArena", make)
    return made


def test_the_functions_keep_one_offloader_for_each_target(monkeypatch):
    monkeypatch.setitem(offloading.Offloader.__init__.__kwdefaults__, "moves", everything)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    assert load(model) == Moved(0, 0.0)
    assert offload(model).bytes > 0 and offload(optimizer).bytes > 0
    before = [places(offloading._offloaders[one]) for one in (model, optimizer)]
    assert load(model).bytes > 0 and load(optimizer).bytes > 0
    offload(model), offload(optimizer)
    assert [places(offloading._offloaders[one]) for one in (model, optimizer)] == before
    assert len(host_copies) > 0
    load(optimizer)
    del model, optimizer
    gc.collect()
    assert len(offloading._offloaders) == 0 and len(host_copies) == 0


def sparse(layout):
    dense = torch.arange(16.0).view(4, 4) % 3
    return dense.to_sparse() if layout is torch.sparse_coo else dense.to_sparse(layout=layout, blocksize=BLOCKS[layout])


BLOCKS = {torch.sparse_csr: None, torch.sparse_csc: None, torch.sparse_bsr: (2, 2), torch.sparse_bsc: (2, 2)}


@pytest.mark.parametrize("layout", [torch.sparse_coo, *BLOCKS], ids=str)
def test_sparse_tensors_move(layout):
    tensor = sparse(layout)
    expected = tensor.to_dense()
    offloader = Offloader([tensor], moves=everything)
    assert offloader.offload().bytes > 0 and offloader.offloaded_bytes > 0
    offloader.load()
    assert torch.equal(tensor.to_dense(), expected)


def test_sparse_gradients_move():
    embedding = nn.Embedding(8, 4, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    expected = embedding.weight.grad.to_dense()
    offloader = Offloader(embedding, moves=everything)
    offloader.offload()
    assert set(storage_bytes(embedding.weight.grad._values(), embedding.weight)) == {0}
    offloader.load()
    assert torch.equal(embedding.weight.grad.to_dense(), expected)


class Scaled(torch.Tensor):
    """As quantised tensors are made: the memory is in other tensors."""

    @staticmethod
    def __new__(cls, values, scale):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values, scale):
        self.values_, self.scale = values, scale

    def __tensor_flatten__(self):
        return ["values_", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


def test_an_offloaded_tensor_that_wraps_others_is_not_read(arenas):
    tensor = Scaled(torch.arange(8, dtype=torch.int8), torch.ones(2))
    assert host_view(tensor) is tensor
    offloader = Offloader(tensor, moves=everything)
    offloader.offload()
    with pytest.raises(UnsupportedError, match="offloaded Scaled cannot be read: load it first"):
        host_view(tensor)
    offloader.load()
    assert host_view(tensor) is tensor


class Hidden(Scaled):
    __tensor_flatten__ = property()  # has none


def test_tensors_that_wrap_others_move_by_their_parts():
    tensor = Scaled(torch.arange(8, dtype=torch.int8), torch.ones(2))
    offloader = Offloader([tensor], moves=everything)
    assert offloader.offload().bytes == 8 + 8
    assert set(storage_bytes(tensor.values_, tensor.scale)) == {0}
    offloader.load()
    assert tensor.values_.tolist() == list(range(8))


def test_a_tensor_that_hides_its_memory_is_refused():
    plain = torch.ones(3)
    offloader = Offloader([plain, Hidden(torch.ones(2), torch.ones(2))], moves=everything)
    with pytest.raises(UnsupportedError, match="Hidden"):
        offloader.offload()
    assert plain.tolist() == [1, 1, 1]


@pytest.mark.parametrize("attribute", ["buffers", "parameters"])
def test_a_module_may_have_attributes_of_its_own_under_the_names_of_methods(attribute):
    model = Tied()
    total = sum(tensor.nbytes for tensor in whole(model).values())
    setattr(model, attribute, [object()])  # as Megatron's DDP has `buffers`
    for target in (model, weakref.proxy(model)):
        offloader = Offloader(target, moves=everything)
        assert offloader.offload().bytes == offloader.load().bytes == total


@pytest.mark.parametrize(
    "make",
    [
        lambda model: model.parameters(),
        lambda model: model.state_dict().values(),
        lambda model: [model],
        lambda model: (torch.optim.SGD(model.parameters()),),
        lambda model: SimpleNamespace(optimizer=torch.optim.SGD(model.parameters())),
        lambda model: None,
        lambda model: 3,
    ],
)
def test_what_would_not_be_moved_is_refused(make):
    with pytest.raises(InvalidRequestError, match="in mappings, lists and tuples") as caught:
        Offloader({}, make(Tied()))
    assert caught.value.details["field"] == "targets"


def test_master_weights_and_their_gradients_are_moved_as_lists():
    masters = [nn.Parameter(torch.ones(4))]
    masters[0].grad = torch.ones(4)
    optimizer = torch.optim.AdamW(masters)
    optimizer.step()
    state = Offloader(optimizer, moves=everything)
    state.offload()
    assert storage_bytes(masters[0], masters[0].grad) == [16, 16]
    Offloader(masters, [masters[0].grad], moves=everything).offload()
    assert storage_bytes(masters[0], masters[0].grad) == [0, 0]


class Sharded(nn.Linear):
    """As a module of FSDP2: the methods are those of its class."""

    resharded = 0

    def unshard(self):
        raise AssertionError

    def reshard(self):
        self.resharded += 1


def test_modules_are_those_that_torch_names_in_its_order():
    shared = nn.Linear(2, 2)
    root = nn.Sequential(nn.Sequential(nn.Linear(2, 2), shared), shared, nn.ModuleDict({"a": nn.ReLU(), "b": shared}))
    root.register_module("none", None)
    assert held_tensors.modules_of(root) == list(root.modules())
    root.own = root[0]
    assert held_tensors.modules_of(root) == list(root.modules())


def test_gathered_parameters_are_freed_also_of_a_root_that_is_known_by_a_weak_reference():
    root = Sharded(2, 2)
    root.child = Sharded(2, 2)
    held_tensors.reshard(root)
    held_tensors.reshard(weakref.proxy(root))
    assert root.resharded == root.child.resharded == 2


class Preparing(PagedArena):
    """Allocates at once what is to be allocated in the background, and counts the allocations."""

    allocated = 0

    def prepare(self, sizes):
        for nbytes in sizes:
            self.release(self._allocate_now(whole_pages(nbytes), SLEEP))

    def _allocate_now(self, nbytes, caller, file=None):
        self.allocated += 1
        return super()._allocate_now(nbytes, caller, file)


@pytest.fixture
def preparing(monkeypatch):
    monkeypatch.setattr(offloading, "PagedArena", Preparing)


@pytest.mark.usefixtures("preparing")
def test_the_first_offload_finds_its_host_memory():
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    weights, states = Offloader(model, moves=everything, gradients=False), Offloader(optimizer, moves=everything)
    weights.prepare()
    states.prepare()  # before the first step has made any
    train(model, optimizer)
    expected = whole(model)
    for one in (weights, states):
        for _ in range(2):
            assert one.offload().bytes > 0 and one.load().bytes > 0
            one.prepare()
        assert one._host.arena.allocated == 1
    same(whole(model), expected)


@pytest.mark.usefixtures("preparing")
def test_nothing_is_prepared_for_what_does_not_move():
    model = Tied()
    for target in (model, torch.optim.AdamW(model.parameters()), [], torch.nn.Identity()):
        one = Offloader(target)  # a CPU's tensors stay
        one.prepare()
        assert one._host is None


@pytest.mark.usefixtures("preparing")
def test_more_than_was_prepared_moves_too():
    model = Tied()
    one = Offloader(model, moves=everything)
    one.prepare()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    total = sum(storage.nbytes() for storage in one._found())
    for prepares in (False, True):
        if prepares:
            one.prepare()
        assert one.offload().bytes == total == one.load().bytes
        assert one._host.arena.held_bytes < 2 * whole_pages(total), "one buffer, without the smaller one"


@pytest.mark.usefixtures("preparing")
def test_a_larger_preparation_takes_the_place_of_the_former():
    tensors = [torch.ones(3 << 12)]
    one = Offloader(tensors, moves=everything)
    one.prepare()
    one.prepare()
    assert one._host.arena.allocated == 1
    tensors.append(torch.ones(4 << 12))
    one.prepare()
    held = one._host.arena.held_bytes
    assert whole_pages(4 * (7 << 12)) <= held < 4 * (8 << 12)
    one.offload()
    assert one._host.arena.held_bytes == held


def test_an_arena_whose_owner_is_gone_is_freed_by_another_thread_while_it_prepares():
    """The garbage collector may run in the thread that prepares, which cannot wait for itself."""
    closed = []

    class Busy(PinnedArena):
        is_preparing = True

        def __init__(self):
            pass

        def close(self):
            closed.append(threading.current_thread())

    host = _HostMemory(Busy())
    del host
    gc.collect()
    [thread] = closed
    thread.join()
    assert thread is not threading.current_thread()


def test_a_handoff_prepares_the_parts_that_it_makes(monkeypatch):
    prepared = []
    monkeypatch.setattr(Offloader, "prepare", lambda self: prepared.append(self))
    model = Tied()
    own = Offloader(torch.ones(4))
    parts = TrainerParts([model], [own], Peers(None), overlap=False, memory_fraction=1.0)
    assert prepared == [*parts.weights, *parts.others] and own in prepared


def test_a_handoff_is_made_of_a_part_that_cannot_be_prepared(monkeypatch):
    def refuse(self):
        raise UnsupportedError("no storage")

    monkeypatch.setattr(Offloader, "prepare", refuse)
    assert TrainerParts([Tied()], [], Peers(None), overlap=False, memory_fraction=1.0).weights
